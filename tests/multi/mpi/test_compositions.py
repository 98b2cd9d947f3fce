"""Communications together with what torch has: checkpoints, derivatives of derivatives, threads,
workers.
"""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

import sys
import threading

import pytest
import torch
from mpi4py import MPI
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from multi.mpi_reference import Spread, as_one_process, inputs
from multi.mpi_runner import mpi_test
from torchrelay import mpi
from torchrelay.errors import ArgumentError, GraphError

SIZES = (2, 3)


def leaf(value, size=4):
    return torch.full((size,), float(value), dtype=torch.float64, requires_grad=True)


def replicated_functions(comm):
    """Whose result every rank holds alike, under the convention ``"replicated"``."""
    n, r = comm.size, comm.rank
    yield "Allreduce", lambda x: comm.Allreduce(x * x, mpi.MPI_SUM)
    yield "Allreduce PROD", lambda x: comm.Allreduce(x, mpi.MPI_PROD)
    yield "Allreduce MAX", lambda x: comm.Allreduce(x * x, mpi.MPI_MAX)
    yield "Allgather", lambda x: comm.Allgather(x * x, 1)
    yield "Bcast_", lambda x: comm.Bcast_(x * x, n - 1)
    yield "Iallreduce", lambda x: comm.Iallreduce(x * x, mpi.MPI_SUM).Wait()
    yield "Iallreduce PROD", lambda x: comm.Iallreduce(x, mpi.MPI_PROD).Wait()
    yield "Iallgather", lambda x: comm.Iallgather(x * x, 0).Wait()
    yield "Ibcast", lambda x: comm.Ibcast(x * x, 0).Wait()
    yield (
        "Replicate",
        lambda x: comm.Allreduce(
            comm.Replicate(comm.Allreduce(x * x, mpi.MPI_SUM)) * (r + 1), mpi.MPI_SUM
        ),
    )
    yield (
        "Reduce_scatter",
        lambda x: comm.Allgather(comm.Reduce_scatter(torch.cat([x * x] * n), mpi.MPI_SUM, 0, 2), 0),
    )
    yield "Scan", lambda x: comm.Allgather(comm.Scan(x * x, mpi.MPI_SUM), 0)
    yield "Iscan", lambda x: comm.Allgather(comm.Iscan(x * x, mpi.MPI_SUM).Wait(), 0)
    yield "Gather", lambda x: comm.Bcast_(comm.Reduce_(x * x, mpi.MPI_SUM, 0), 0)


@mpi_test(SIZES)
def test_derivatives_of_both_orders_under_the_replicated_convention(comm):
    replicated = comm.replace(convention="replicated")
    every = torch.stack(inputs([(2, 1)] * comm.size, torch.float64)).requires_grad_()
    for name, function in replicated_functions(replicated):
        torch.manual_seed(0)  # every rank draws the same cotangents

        def whole(every):
            with mpi.chain():
                return function(Spread.apply(every)[comm.rank] * 1)

        try:
            assert gradcheck(whole, every)
            assert gradgradcheck(whole, every)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def two_steps(comm):
    """Collectives in two steps, as functions of a tensor."""
    n, r = comm.size, comm.rank

    def persistent(x):
        request = comm.Allreduce_init(x.detach(), mpi.MPI_SUM)
        total = request.Start(x).Wait() * request.Start(x * x).Wait()
        request.Free()
        return total

    def crossed(x):
        first, second = comm.Iallreduce(x * x, mpi.MPI_SUM), comm.Iallgather(x.sin(), 0)
        results = [h.Wait() for h in ((first, second) if r % 2 else (second, first))]
        return results[0].sum() * results[1]

    yield "Iallreduce", lambda x: comm.Iallreduce(x * x, mpi.MPI_SUM).Wait()
    yield "Iallreduce PROD", lambda x: comm.Iallreduce(x, mpi.MPI_PROD).Wait()
    yield (
        "Ireduce_scatter",
        lambda x: comm.Ireduce_scatter(torch.cat([x * x] * n), mpi.MPI_SUM).Wait(),
    )
    yield "Ialltoall", lambda x: comm.Ialltoall(torch.cat([x * x] * n), 0, 0).Wait()
    yield "persistent", persistent
    yield "crossed", crossed


def one_steps(comm):
    n, r = comm.size, comm.rank
    yield "Allreduce", lambda x: comm.Allreduce(x * x, mpi.MPI_SUM)
    yield "Allreduce PROD", lambda x: comm.Allreduce(x, mpi.MPI_PROD)
    yield "Allgather", lambda x: comm.Allgather(x * x, 0)
    yield "Scan", lambda x: comm.Scan(x * x, mpi.MPI_SUM)
    yield "Sendrecv", lambda x: comm.Sendrecv(x * x, (r + 1) % n, (r - 1) % n)


def hessian_product(function, x, open_chain):
    """Second derivatives along a fixed direction; the chain may be open when it is differentiated
    again.
    """
    with mpi.chain():
        y = function(x).square().sum() / 2
        (g,) = mpi.grad(y, x, create_graph=True)
        if open_chain:
            return mpi.grad((g * g.detach().cos()).sum(), x)[0]
    return torch.autograd.grad((g * g.detach().cos()).sum(), x)[0]


@mpi_test(SIZES)
def test_second_derivatives_with_the_chain_open_and_closed(comm):
    x = inputs([(2, 2)] * comm.size, torch.float64)[comm.rank].requires_grad_()
    for convention in ("sum", "replicated"):
        chosen = comm.replace(convention=convention)
        pairs = dict((*one_steps(chosen), *two_steps(chosen)))
        for name, function in pairs.items():
            found = [hessian_product(function, x, open_chain) for open_chain in (False, True)]
            assert torch.allclose(*found), (convention, name)
            step = name.removeprefix("I").capitalize()
            if step in pairs and step != name:
                theirs = hessian_product(pairs[step], x, False)
                assert torch.allclose(found[0], theirs), (convention, name)


@mpi_test(SIZES)
def test_second_derivatives_agree_with_finite_differences_of_first(comm):
    """Of a program of several communications, its chain open, along a direction that differs
    between ranks.
    """
    n, r = comm.size, comm.rank
    x, w = (inputs([(2, 2)] * n, torch.float64, seed)[r] for seed in (0, 1))
    for convention in ("sum", "replicated"):
        chosen = comm.replace(convention=convention)

        def loss(x):
            own = chosen.Replicate(chosen.Allreduce(x.sin(), mpi.MPI_SUM)) ** 2 * (r + 1)
            started = chosen.Iallreduce(own.cos(), mpi.MPI_SUM)
            shifted = chosen.Sendrecv(own, (r + 1) % n, (r - 1) % n)
            total = chosen.Allreduce(shifted * own, mpi.MPI_SUM)
            return (total * started.Wait()).sum()

        def gradient(x):
            (g,) = mpi.grad(loss(x), x)
            return g

        x.requires_grad_()
        (g,) = mpi.grad(loss(x), x, create_graph=True)
        along = (g * w).sum()
        (found,) = mpi.grad(
            chosen.Allreduce(along, mpi.MPI_SUM) if convention == "replicated" else along, x
        )
        x = x.detach()
        step = 1e-6 * w
        plus, minus = (gradient((x + s).requires_grad_()) for s in (step, -step))
        assert torch.allclose(found, (plus - minus) / 2e-6, rtol=1e-5, atol=1e-5), convention


def product_scans(comm):
    """The four, as functions of a tensor whose result is one loss, which all ranks hold."""
    weight = comm.rank + 1.5

    def loss(scanned):
        return comm.Allreduce((scanned * scanned).sum() * weight, mpi.MPI_SUM)

    yield "Scan", lambda x: loss(comm.Scan(x, mpi.MPI_PROD))
    yield "Exscan", lambda x: loss(comm.Exscan(x, mpi.MPI_PROD))
    yield "Iscan", lambda x: loss(comm.Iscan(x, mpi.MPI_PROD).Wait())
    yield "Iexscan", lambda x: loss(comm.Iexscan(x, mpi.MPI_PROD).Wait())


@mpi_test((2,))
def test_second_derivatives_of_scans_of_products(comm):
    """Against the Hessian that one process computes of all ranks' tensors."""
    n, r = comm.size, comm.rank
    every = torch.stack(inputs([(2, 2)] * n, torch.float64))
    along = torch.stack(inputs([(2, 2)] * n, torch.float64, 1))

    def whole(exclusive, every):
        products = [
            every[: rank + 1 - exclusive].prod(0).square().sum() for rank in range(exclusive, n)
        ]
        return sum(
            (rank + 1.5) * product
            for rank, product in zip(range(exclusive, n), products, strict=True)
        )

    for convention, copies in (("replicated", 1), ("sum", n)):
        chosen = comm.replace(convention=convention)
        for name, function in product_scans(chosen):
            leaf = every.clone().requires_grad_()
            (g,) = torch.autograd.grad(copies * whole("x" in name, leaf), leaf, create_graph=True)
            (wanted,) = torch.autograd.grad((g * along).sum(), leaf)
            x = every[r].clone().requires_grad_()
            with mpi.chain():
                (mine,) = mpi.grad(function(x), x, create_graph=True)
                assert torch.allclose(mine, g[r]), (convention, name)
                slope = (mine * along[r]).sum()
                if convention == "replicated":
                    slope = chosen.Allreduce(slope, mpi.MPI_SUM)
                (found,) = mpi.grad(slope, x)
            assert torch.allclose(found, wanted[r]), (convention, name, found, wanted[r])


@mpi_test(SIZES)
def test_gradgradcheck_of_two_steps(comm):
    every = torch.stack(inputs([(2, 2)] * comm.size, torch.float64)).requires_grad_()
    for name, function in two_steps(comm):
        try:
            assert gradgradcheck(as_one_process(function, comm), every)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@mpi_test((1, 2, 3))
def test_checkpoints_in_a_row_and_nested(comm):
    def segment(t):
        return comm.Allreduce(t.sin(), mpi.MPI_SUM).cos() * comm.Sendrecv(
            t, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        )

    def twice(t):
        return segment(segment(t))

    x = leaf(comm.rank + 1)
    segment(segment(segment(x))).sum().backward()
    wanted, x.grad = x.grad, None
    for reentrant in (True, False):

        def run(function, t):
            return checkpoint(function, t, use_reentrant=reentrant)

        for program in (
            lambda: run(segment, run(segment, run(segment, x))),
            lambda: segment(run(twice, x)),
            lambda: run(lambda t: segment(run(twice, t)), x),
            lambda: run(twice, segment(x)),
        ):
            for _ in range(2):
                x.grad = None
                program().sum().backward()
                assert torch.allclose(x.grad, wanted), reentrant
    (first,) = torch.autograd.grad(segment(x).sum(), x, create_graph=True)
    (hessian,) = torch.autograd.grad(first.square().sum(), x)
    mpi.reset()
    y = checkpoint(segment, x, use_reentrant=False)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(first.square().sum(), x)
    assert torch.allclose(again, hessian)
    mpi.reset()


@mpi_test(SIZES)
def test_each_thread_has_a_chain_of_its_own(comm):
    """Threads that communicate over communicators of their own do not disturb each other."""
    comms = [comm.Dup() for _ in range(3)]
    leaves = [leaf(comm.rank + k) for k in range(3)]
    barrier, errors = threading.Barrier(3), []

    def work(k):
        try:
            for _ in range(5):
                leaves[k].grad = None
                y = comms[k].Allreduce(leaves[k] * (k + 1), mpi.MPI_SUM)
                barrier.wait(60)
                comms[k].Allreduce(y.sin(), mpi.MPI_SUM).sum().backward()
                barrier.wait(60)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return
    threads = [threading.Thread(target=work, args=(k,)) for k in (1, 2)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join(120)
    assert not errors, errors
    for k in range(3):
        total = sum((r + k) * (k + 1) for r in range(comm.size))
        wanted = torch.tensor(float(total)).double().cos() * comm.size * comm.size * (k + 1)
        assert torch.allclose(leaves[k].grad, wanted.expand(4)), k


@mpi_test(SIZES)
def test_unreachable_policy_of_a_communicator_reaches_its_backward(comm):
    warns = comm.replace(unreachable_policy="ignore")
    x = leaf(1)
    y = warns.Allreduce(x * x, mpi.MPI_SUM)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    warns.Allreduce(g, mpi.MPI_SUM)  # out of reach of what follows
    torch.autograd.grad(g.sum(), x)
    mpi.reset()
    with pytest.warns(DeprecationWarning, match="unreached.* is now unreachable_policy"):
        assert comm.replace(unreached="ignore").unreachable_policy == "ignore"
    assert warns.reverse.unreachable_policy == "ignore" and comm.reverse.unreachable_policy is None


@mpi_test(SIZES)
def test_communicators_are_given_back(comm):
    """More communicators than MPI has: freed by hand, by a block, and when nobody holds them any
    more.
    """
    x = torch.ones(2, dtype=torch.int64)
    for index in range(3000):
        part = comm.Split(index % 2 if comm.rank else 0, comm.rank)
        if index % 500 == 0:
            assert part.Allreduce(x, mpi.MPI_SUM)[0] == part.size
    for _ in range(50):
        with comm.Dup() as copy:
            assert copy.Allreduce(x, mpi.MPI_SUM)[0] == comm.size
    for _ in range(50):
        grid = comm.Cart([comm.size], [True])
        inner = grid.Split(0).Dup()  # the grid itself is freed only with what was made of it
        del grid
        assert inner.Allreduce(x, mpi.MPI_SUM)[0] == comm.size
        none = comm.Split(mpi.MPI_UNDEFINED if comm.rank else 0)
        assert (none is None) == bool(comm.rank)
    kept = comm.Dup()
    other = kept.replace(convention="replicated")
    y = kept.Scan(torch.ones(2, requires_grad=True), mpi.MPI_SUM)
    y.sum().backward()
    kept.Free()
    kept.Free()
    for freed in (kept, other):
        with pytest.raises(ArgumentError, match="freed"):
            freed.Allreduce(x, mpi.MPI_SUM)
    with pytest.raises(ArgumentError, match="COMM_WORLD"):
        comm.Free()
    assert comm.Allreduce(x, mpi.MPI_SUM)[0] == comm.size


@mpi_test(SIZES)
def test_alltoallv_of_more_ranks_than_a_header_holds(comm):
    """Their counts are exchanged apart."""
    alltoallv = sys.modules["torchrelay.mpi._alltoallv"]
    counts = [rank + comm.rank for rank in range(comm.size)]
    x = torch.arange(float(sum(counts))).requires_grad_()
    expected = comm.Alltoallv(x, counts, 0)
    known, alltoallv.MAX_DIMS = alltoallv.MAX_DIMS, 1
    try:
        found = comm.Alltoallv(x, counts, 0)
        assert torch.equal(found, expected)
        mpi.backward(found.square().sum())
        assert torch.equal(x.grad, 2 * x.detach())
    finally:
        alltoallv.MAX_DIMS = known


@mpi_test((2,))
def test_gradgradcheck_of_several_communications_needs_a_chain(comm):
    """It differentiates earlier evaluations again: every rank raises, and names what would be left
    out.
    """
    x = torch.full((1,), 0.5 + comm.rank, dtype=torch.float64, requires_grad=True)

    def function(x):
        return comm.Allgather(comm.Scan(x * x, mpi.MPI_SUM), 0)

    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    torch.autograd.grad(function(x).sum(), x, create_graph=True)
    with pytest.raises(
        GraphError, match=r"does not reach the .* communications after it .*Scan, Allgather"
    ):
        torch.autograd.grad(first.sum(), x)
    mpi.reset()
    with pytest.raises(
        GraphError, match=r"does not reach the .* communications after it .*Scan, Allgather"
    ):
        gradgradcheck(function, x)
