"""Communications together with what torch has: checkpoints, derivatives of derivatives, threads,
workers.
"""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from grads import grad_of
from multi.mpi.reference import Differentiable, Spread, check_second_order, inputs
from multi.mpi.runner import THREADS, mpi_test
from torchrelay import mpi
from torchrelay.errors import ArgumentError, GraphError, UnsupportedError
from torchrelay.mpi import Communicator, _library

SIZES = (2, 3)


def leaf(value: float, size: int = 4) -> Tensor:
    return torch.full((size,), float(value), dtype=torch.float64, requires_grad=True)


REPLICATED: dict[str, Differentiable] = {
    "Allreduce": lambda comm, x: comm.Allreduce(x * x, mpi.MPI_SUM),
    "Allreduce PROD": lambda comm, x: comm.Allreduce(x, mpi.MPI_PROD),
    "Allreduce MAX": lambda comm, x: comm.Allreduce(x * x, mpi.MPI_MAX),
    "Allgather": lambda comm, x: comm.Allgather(x * x, 1),
    "Bcast_": lambda comm, x: comm.Bcast_(x * x, comm.size - 1),
    "Iallreduce": lambda comm, x: comm.Iallreduce(x * x, mpi.MPI_SUM).Wait(),
    "Iallreduce PROD": lambda comm, x: comm.Iallreduce(x, mpi.MPI_PROD).Wait(),
    "Replicate": lambda comm, x: comm.Allreduce(
        comm.Replicate(comm.Allreduce(x * x, mpi.MPI_SUM)) * (comm.rank + 1), mpi.MPI_SUM
    ),
    "Reduce_scatter": lambda comm, x: comm.Allgather(
        comm.Reduce_scatter(torch.cat([x * x] * comm.size), mpi.MPI_SUM, 0, 2), 0
    ),
    "Scan": lambda comm, x: comm.Allgather(comm.Scan(x * x, mpi.MPI_SUM), 0),
    "Gather": lambda comm, x: comm.Bcast_(comm.Reduce_(x * x, mpi.MPI_SUM, 0), 0),
}


@mpi_test(SIZES, on=THREADS, name=REPLICATED)
def test_derivatives_of_both_orders_under_the_replicated_convention(
    comm: Communicator, name: str
) -> None:
    """The result of each function is one that every rank holds alike."""
    replicated = comm.replace(convention="replicated")
    every = torch.stack(inputs([(2, 1)] * comm.size, torch.float64)).requires_grad_()

    def whole(every: Tensor) -> Tensor:
        with mpi.chain():
            return REPLICATED[name](replicated, Spread.apply(every)[comm.rank] * 1)

    assert gradcheck(whole, every, fast_mode=True)
    check_second_order(whole, every)


def two_steps(comm: Communicator) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Collectives in two steps, as functions of a tensor."""

    def crossed(x: Tensor) -> Tensor:
        first, second = comm.Iallreduce(x * x, mpi.MPI_SUM), comm.Iallreduce(x, mpi.MPI_PROD)
        results = [h.Wait() for h in ((first, second) if comm.rank % 2 else (second, first))]
        return results[0].sum() * results[1]

    yield "Iallreduce", lambda x: comm.Iallreduce(x * x, mpi.MPI_SUM).Wait()
    yield "Iallreduce PROD", lambda x: comm.Iallreduce(x, mpi.MPI_PROD).Wait()
    yield "crossed", crossed


def one_steps(comm: Communicator) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    n, r = comm.size, comm.rank
    yield "Allreduce", lambda x: comm.Allreduce(x * x, mpi.MPI_SUM)
    yield "Allreduce PROD", lambda x: comm.Allreduce(x, mpi.MPI_PROD)
    yield "Allgather", lambda x: comm.Allgather(x * x, 0)
    yield "Scan", lambda x: comm.Scan(x * x, mpi.MPI_SUM)
    yield "Sendrecv", lambda x: comm.Sendrecv(x * x, (r + 1) % n, (r - 1) % n)


def hessian_product(function: Callable[[Tensor], Tensor], x: Tensor, open_chain: bool) -> Tensor:
    """Second derivatives along a fixed direction; the chain may be open when it is differentiated
    again.
    """
    with mpi.chain():
        y = function(x).square().sum() / 2
        (g,) = mpi.grad(y, x, create_graph=True)
        if open_chain:
            return mpi.grad((g * g.detach().cos()).sum(), x)[0]
    return torch.autograd.grad((g * g.detach().cos()).sum(), x)[0]


@mpi_test(SIZES, on=THREADS)
def test_second_derivatives_with_the_chain_open_and_closed(comm: Communicator) -> None:
    x = inputs([(2, 2)] * comm.size, torch.float64)[comm.rank].requires_grad_()
    for convention in ("sum", "replicated"):
        chosen = comm.replace(convention=convention)
        pairs = dict((*one_steps(chosen), *two_steps(chosen)))
        for name, function in pairs.items():
            found = [hessian_product(function, x, open_chain) for open_chain in (False, True)]
            assert torch.allclose(found[0], found[1]), (convention, name)
            step = name.removeprefix("I").capitalize()
            if step in pairs and step != name:
                theirs = hessian_product(pairs[step], x, False)
                assert torch.allclose(found[0], theirs), (convention, name)


@mpi_test(SIZES, on=THREADS)
def test_second_derivatives_agree_with_finite_differences_of_first(comm: Communicator) -> None:
    """Of a program of several communications, its chain open, along a direction that differs
    between ranks.
    """
    n, r = comm.size, comm.rank
    x, w = (inputs([(2, 2)] * n, torch.float64, seed)[r] for seed in (0, 1))
    for convention in ("sum", "replicated"):
        chosen = comm.replace(convention=convention)

        def loss(x: Tensor) -> Tensor:
            own = chosen.Replicate(chosen.Allreduce(x.sin(), mpi.MPI_SUM)) ** 2 * (r + 1)
            started = chosen.Iallreduce(own.cos(), mpi.MPI_SUM)
            shifted = chosen.Sendrecv(own, (r + 1) % n, (r - 1) % n)
            total = chosen.Allreduce(shifted * own, mpi.MPI_SUM)
            return (total * started.Wait()).sum()

        def gradient(x: Tensor) -> Tensor:
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


@mpi_test((1, 2, 3), on=THREADS)
def test_checkpoints_in_a_row_and_nested(comm: Communicator) -> None:
    def segment(t: Tensor) -> Tensor:
        return comm.Allreduce(t.sin(), mpi.MPI_SUM).cos() * comm.Sendrecv(
            t, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        )

    def twice(t: Tensor) -> Tensor:
        return segment(segment(t))

    x = leaf(comm.rank + 1)
    segment(segment(segment(x))).sum().backward()
    wanted, x.grad = grad_of(x), None
    for reentrant in (True, False):

        def run(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
            return checkpoint(function, t, use_reentrant=reentrant)

        for program in (
            lambda: run(segment, run(segment, run(segment, x))),
            lambda: segment(run(twice, x)),
            lambda: run(lambda t: segment(run(twice, t)), x),
            lambda: run(twice, segment(x)),
        ):
            for _ in range(2):
                x.grad = torch.zeros_like(x)
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
def test_messages_in_transforms_are_refused(comm: Communicator) -> None:
    x = leaf(1).detach()
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for call in (
        lambda t: comm.Isend(t, above).dummy,
        lambda t: comm.Send(t, above),
        lambda t: comm.Irecv(torch.empty_like(t), below).dummy,
        lambda t: comm.Recv(torch.empty_like(t), below),
    ):
        for transformed in (
            lambda: torch.func.grad(lambda t: call(t).sum())(x),
            lambda: torch.func.jvp(call, (x,), (x,)),
            lambda: torch.func.vmap(call)(x.unsqueeze(0)),
        ):
            with pytest.raises(UnsupportedError, match="use Sendrecv or a collective"):
                transformed()


@mpi_test(SIZES)
def test_what_has_no_derivative_runs_in_transforms(comm: Communicator) -> None:
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda t: comm.Allreduce(t.long(), mpi.MPI_SUM),
        lambda t: comm.Allreduce(t, mpi.MPI_LAND),
        lambda t: comm.Allreduce(t, mpi.MPI_MAXLOC).ranks,
        lambda t: comm.Scan((t > 2).int(), mpi.MPI_BXOR),
        lambda t: comm.Allgather(t > 2, 0)[comm.rank * len(t) :][: len(t)],
        lambda t: comm.Sendrecv(t.long(), comm.rank, comm.rank),
    )
    x = (torch.arange(6.0).view(3, 2) + comm.rank).double()
    for function in functions:
        slope = functools.partial(lambda f, t: (t * f(t)).sum(), function)
        rows = torch.stack([function(row) for row in x])
        assert torch.equal(torch.vmap(function)(x), rows)
        assert torch.equal(torch.func.grad(slope)(x), function(x).double())
        assert torch.equal(torch.vmap(torch.func.grad(slope))(x), rows.double())
        _, tangent = torch.func.jvp(slope, (x,), (torch.ones_like(x),))[:2]
        assert tangent == function(x).sum()


@mpi_test(SIZES)
def test_non_blocking_collectives_in_transforms(comm: Communicator) -> None:
    x = leaf(1).detach()

    def apply(t: Tensor) -> Tensor:
        handle = comm.Iallreduce(t, mpi.MPI_SUM)
        y = handle.Wait().sum()
        with pytest.raises(ArgumentError, match="already waited for"):
            handle.Wait()
        return y

    wanted = comm.Allreduce(x.new_ones(()), mpi.MPI_SUM)
    assert torch.equal(torch.func.grad(apply)(x), wanted.expand_as(x))
    assert torch.equal(torch.vmap(apply)(x.unsqueeze(0)), wanted * x.sum().unsqueeze(0))
    assert torch.equal(torch.vmap(torch.func.grad(apply))(x.unsqueeze(0))[0], wanted.expand_as(x))


def unequal_segments(comm: Communicator) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Functions whose graph of local operations differs between ranks."""
    n, r = comm.size, comm.rank

    def total(t: Tensor) -> Tensor:
        return comm.Allreduce(t.sin(), mpi.MPI_SUM) * t

    def message(t: Tensor) -> Tensor:
        if r == 0:
            comm.Send(t.sin(), 1)
        return comm.Recv(torch.empty_like(t), 0).cos() * t if r == 1 else t.sin()

    def gathered(t: Tensor) -> Tensor:
        y = comm.Gather(total(t), 0, 0)
        return y.cos().sum() if r == 0 else y.sum()

    yield "Exscan", lambda t: comm.Exscan(total(t), mpi.MPI_MAX)
    yield "Reduce_", lambda t: comm.Reduce_(total(t), mpi.MPI_MAX, n - 1)
    yield "Gather with work on root", gathered
    yield "Send and Recv", message
    yield "loss on rank 0", lambda t: total(t).cos() * (r == 0)


@mpi_test(SIZES)
def test_gradients_per_sample_go_to_whoever_sent(comm: Communicator) -> None:
    above = (comm.rank + 1) % comm.size

    def loss(x: Tensor) -> Tensor:
        like = x.new_empty(1)
        y = comm.Sendrecv(x.sum(0, True), above, mpi.MPI_ANY_SOURCE, like)
        return (comm.rank + 1) * y.square().sum() / 2

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double()
    grads = torch.vmap(torch.func.grad(loss))(x)
    assert grads.tolist() == [[3.0 * (above + 1)] * 2, [7.0 * (above + 1)] * 2]


@mpi_test(SIZES, on=THREADS)
def test_checkpoints_recompute_at_one_place_where_local_graphs_differ(comm: Communicator) -> None:
    x = leaf(comm.rank + 1)
    for name, segment in unequal_segments(comm):
        for has_loss in (True, comm.rank == 0):
            found = []
            for function in (
                segment,
                lambda t: checkpoint(segment, t, use_reentrant=False),
                lambda t: checkpoint(
                    lambda t: (
                        checkpoint(segment, t.exp().log(), use_reentrant=False).sinh().asinh()
                    ),
                    t,
                    use_reentrant=False,
                ),
            ):
                x.grad = torch.zeros_like(x)
                y = comm.Allreduce(x, mpi.MPI_SUM).sum() * function(x)
                mpi.backward(y.sum() if has_loss else None)
                found.append(x.grad)
            assert torch.allclose(found[0], found[1]), (name, has_loss)
            assert torch.allclose(found[0], found[2]), (name, has_loss)


@mpi_test(SIZES, on=THREADS)
def test_second_derivatives_of_checkpoints_where_local_graphs_differ(comm: Communicator) -> None:
    """On rank 0 a local operation needs the segment first, on others a communication."""

    def total(t: Tensor) -> Tensor:
        y = comm.Allreduce(2 * comm.Allreduce(t, mpi.MPI_SUM), mpi.MPI_SUM)
        return y * y if comm.rank == 0 else 2 * y

    def message(t: Tensor) -> Tensor:
        y = comm.Allreduce(t * t, mpi.MPI_SUM)
        if comm.rank == 0:
            comm.Send(y * y, 1)
        return comm.Recv(torch.empty_like(y), 0) if comm.rank == 1 else y

    for segment in (total, message):
        found = []
        for function in (segment, lambda t: checkpoint(segment, t, use_reentrant=False)):
            x = leaf(comm.rank + 1)
            (g,) = mpi.grad(function(x).sum(), x, create_graph=True)
            found.append(mpi.grad((g * g).sum(), x)[0])
        assert torch.allclose(found[0], found[1]), segment.__name__


@mpi_test(SIZES)
def test_each_thread_has_a_chain_of_its_own(comm: Communicator) -> None:
    """Threads that communicate over communicators of their own do not disturb each other."""
    comms = [comm.Dup() for _ in range(3)]
    leaves = [leaf(comm.rank + k) for k in range(3)]
    barrier, errors = threading.Barrier(3), []

    def work(k: int) -> None:
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

    if _library.MPI and _library.MPI.Query_thread() < _library.MPI.THREAD_MULTIPLE:
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
        assert torch.allclose(grad_of(leaves[k]), wanted.expand(4)), k


@mpi_test(SIZES)
def test_each_thread_has_a_chain_of_its_own_in_transforms(comm: Communicator) -> None:
    if _library.MPI and _library.MPI.Query_thread() < _library.MPI.THREAD_MULTIPLE:
        return
    other, x = comm.Dup(), leaf(1).detach()

    def apart() -> None:
        torch.func.grad(lambda t: other.Allreduce(t, mpi.MPI_SUM).sum())(x)

    def loss(t: Tensor) -> Tensor:
        y = comm.Allreduce(t.sin(), mpi.MPI_SUM)
        thread = threading.Thread(target=apart)
        thread.start()
        thread.join()
        z = comm.Allreduce(t, mpi.MPI_SUM)
        return (z if comm.rank == 0 else y + z).sum()

    wanted = comm.size + (comm.size - 1) * x.cos()
    assert torch.allclose(torch.func.grad(loss)(x), wanted)


@mpi_test(SIZES)
def test_unreachable_policy_of_a_communicator_reaches_its_backward(comm: Communicator) -> None:
    warns = comm.replace(unreachable_policy="ignore")
    x = leaf(1)
    y = warns.Allreduce(x * x, mpi.MPI_SUM)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    warns.Allreduce(g, mpi.MPI_SUM)  # out of reach of what follows
    torch.autograd.grad(g.sum(), x)
    mpi.reset()
    assert warns.reverse.unreachable_policy == "ignore" and comm.reverse.unreachable_policy is None


@mpi_test(SIZES)
def test_communicators_are_given_back(comm: Communicator) -> None:
    """More communicators than MPI has, freed by hand and by a block."""
    x = torch.ones(2, dtype=torch.int64)
    for index in range(1000 if _library.MPI else 20):  # process groups have no limit
        part = comm.Split(index % 2 if comm.rank else 0, comm.rank)
        assert part is not None
        if index % 50 == 0:
            assert part.Allreduce(x, mpi.MPI_SUM)[0] == part.size
        part.Free()
    for _ in range(10):
        with comm.Dup() as copy:
            assert copy.Allreduce(x, mpi.MPI_SUM)[0] == comm.size
        with comm.Cart([comm.size], [True]) or comm.Dup() as grid:
            inner = grid.Dup()
        assert inner.Allreduce(x, mpi.MPI_SUM)[0] == comm.size
        inner.Free()
    kept = comm.Dup()
    other = kept.replace(convention="replicated")
    y = kept.Scan(torch.ones(2, requires_grad=True), mpi.MPI_SUM)
    y.sum().backward()
    kept.Free()
    kept.Free()
    for freed in (kept, other):
        with pytest.raises(ArgumentError, match="freed"):
            freed.Allreduce(x, mpi.MPI_SUM)
        for call in (
            freed.Barrier,
            freed.Dup,
            lambda comm=freed: comm.Allgather(x, 0),
            lambda comm=freed: comm.Gather(x, 0, 0),
            lambda comm=freed: comm.Iallreduce(x, mpi.MPI_SUM),
            lambda comm=freed: comm.Send(x, 0),
            lambda comm=freed: comm.Bcast_(x.clone(), 0),
        ):
            with pytest.raises(ArgumentError, match="freed"):
                call()
    with pytest.raises(ArgumentError, match="COMM_WORLD"):
        comm.Free()
    assert comm.Allreduce(x, mpi.MPI_SUM)[0] == comm.size


@mpi_test((2,), on=THREADS)
def test_gradgradcheck_of_several_communications_needs_a_chain(comm: Communicator) -> None:
    """It differentiates earlier evaluations again: every rank raises, and names what would be left
    out.
    """
    x = torch.full((1,), 0.5 + comm.rank, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
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
