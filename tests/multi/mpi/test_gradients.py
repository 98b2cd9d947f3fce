"""gradcheck and gradgradcheck of every differentiable function: as a function of all ranks' inputs
to all outputs.

Every output element of every rank gets its own cotangent, so cotangents differ between ranks.
"""

# ruff: noqa: B023, PLR0915 - functions made in a loop are called in the same round of it
from __future__ import annotations

import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from multi.mpi_reference import as_one_process, inputs
from multi.mpi_runner import mpi_test
from torchrelay import mpi


def functions(comm):
    n, r = comm.size, comm.rank
    above, below = (r + 1) % n, (r - 1) % n

    def ring(x):
        handle = comm.Isend(x, above, 3)
        got = comm.Recv(torch.empty_like(x), below, 3)
        comm.Wait(handle)
        return got

    def irecv(x):
        got, sent = comm.Irecv(torch.empty_like(x), below), comm.Isend(x, above)
        return comm.Wait(got) + 0 * comm.Wait(sent)

    def persistent(x):
        send, recv = comm.Send_init(x, above, 5), comm.Recv_init(x, below, 5)
        total = 0
        for factor in (1, 2):
            handles = send.Start(factor * x), recv.Start()
            total = total + comm.Wait(handles[1]) ** factor
            comm.Wait(handles[0])
        send.Free()
        recv.Free()
        return total

    def two_at_once(x):
        first, second = comm.Iallreduce(x, mpi.MPI_SUM), comm.Iallgather(x * x, 0)
        results = [h.Wait() for h in ((first, second) if r % 2 else (second, first))]
        return results[0].sum() * results[1]

    def total(x):
        return comm.Iallreduce(x, mpi.MPI_SUM)

    yield "Allreduce", lambda x: comm.Allreduce(x * x, mpi.MPI_SUM)
    yield "Allreduce MAX", lambda x: comm.Allreduce(x * x, mpi.MPI_MAX)
    yield "Allreduce MIN", lambda x: comm.Allreduce(x * x, mpi.MPI_MIN)
    yield "Allreduce PROD", lambda x: comm.Allreduce(x, mpi.MPI_PROD)
    yield "MAXLOC", lambda x: comm.Allreduce(x * x, mpi.MPI_MAXLOC).values
    yield "Bcast_", lambda x: comm.Bcast_(x * x, n - 1)
    yield "Reduce_", lambda x: comm.Reduce_(x * x, mpi.MPI_SUM, n - 1)
    yield "Reduce_ PROD", lambda x: comm.Reduce_(x * 1, mpi.MPI_PROD, 0)
    yield "Gather", lambda x: comm.Gather(x * x, 1, n - 1)
    yield "Allgather", lambda x: comm.Allgather(x * x, 0)
    yield "Scatter", lambda x: comm.Scatter(torch.cat([x * x] * n, 1), 1, 2, n - 1)
    yield "Alltoall", lambda x: comm.Alltoall(torch.cat([x * x] * n, 1), 0, 1, 2)
    yield "Alltoall, equal axes", lambda x: comm.Alltoall(x * x, 1, 1, 2 * n if r == 0 else 0)
    yield (
        "Alltoallv",
        lambda x: comm.Alltoallv(x * x, [2 if s == above else 0 for s in range(n)], 1),
    )
    yield "Reduce_scatter", lambda x: comm.Reduce_scatter(torch.cat([x * x] * n), mpi.MPI_SUM, 0, 2)
    yield (
        "Reduce_scatter_block MAX",
        lambda x: comm.Reduce_scatter_block(torch.cat([x * x] * n), mpi.MPI_MAX),
    )
    yield "Scan", lambda x: comm.Scan(x * x, mpi.MPI_SUM)
    yield "Exscan", lambda x: comm.Exscan(x * x, mpi.MPI_SUM)
    yield "Scan PROD", lambda x: comm.Scan(x, mpi.MPI_PROD)
    yield "Sendrecv", lambda x: comm.Sendrecv(x * x, above, below)
    yield "ring", lambda x: ring(x * x)
    yield "Irecv", lambda x: irecv(x * x)
    yield "persistent", persistent
    yield "Iallreduce", lambda x: comm.Iallreduce(x * x, mpi.MPI_SUM).Wait()
    yield "Ibcast", lambda x: comm.Ibcast(x * x, 0).Wait()
    yield "Ireduce", lambda x: comm.Ireduce(x * x, mpi.MPI_SUM, 0).Wait()
    yield "Igather", lambda x: comm.Igather(x * x, 1, 0).Wait()
    yield "Iallgather", lambda x: comm.Iallgather(x * x, 1).Wait()
    yield "Iscatter", lambda x: comm.Iscatter(torch.cat([x * x] * n), 0, 0).Wait()
    yield "Ialltoall", lambda x: comm.Ialltoall(torch.cat([x * x] * n), 1, 0).Wait()
    yield (
        "Ireduce_scatter",
        lambda x: comm.Ireduce_scatter(torch.cat([x * x] * n), mpi.MPI_SUM).Wait(),
    )
    yield "two collectives at once", two_at_once
    yield "two collectives in turn", lambda x: total(x).Wait() * total(x * x).Wait()
    yield from with_operations(comm)
    yield from with_counts(comm)
    yield from set_up_once(comm)
    cart = comm.Cart([n], [True])
    yield "Neighbor_alltoall", lambda x: cart.Neighbor_alltoall(x * x)
    yield "Halo_exchange", lambda x: cart.Halo_exchange(x * x, [(1, 2)], axes=[1])
    edge = comm.Cart([n], [False])
    yield "Halo_exchange at a border", lambda x: edge.Halo_exchange(x * x, 1)


def with_operations(comm):
    n = comm.size
    yield "Iallreduce MAX", lambda x: comm.Iallreduce(x * x, mpi.MPI_MAX).Wait()
    yield "Iallreduce PROD", lambda x: comm.Iallreduce(x, mpi.MPI_PROD).Wait()
    yield "Ireduce MIN", lambda x: comm.Ireduce(x * x, mpi.MPI_MIN, n - 1).Wait()
    yield (
        "Ireduce_scatter PROD",
        lambda x: comm.Ireduce_scatter(torch.cat([x] * n), mpi.MPI_PROD).Wait(),
    )
    yield "Iscan", lambda x: comm.Iscan(x * x, mpi.MPI_SUM).Wait()
    yield "Iexscan MAX", lambda x: comm.Iexscan(x * x, mpi.MPI_MAX).Wait()


def with_counts(comm):
    n, r = comm.size, comm.rank
    counts = [1 + s % 2 for s in range(n)]
    to, whence = ([2 if s == (r + step) % n else 0 for s in range(n)] for step in (1, -1))
    wide = lambda x, axis: torch.cat([x * x] * n, axis).narrow(axis, 0, sum(counts))  # noqa: E731
    yield "Igatherv", lambda x: comm.Igatherv((x * x)[:, : counts[r]], counts, n - 1, 1).Wait()
    yield "Iallgatherv", lambda x: comm.Iallgatherv((x * x)[:, : counts[r]], counts, 1).Wait()
    yield "Iscatterv", lambda x: comm.Iscatterv(wide(x, 1), counts, n - 1, 1).Wait()
    yield "Ialltoallv", lambda x: comm.Ialltoallv(x * x, to, whence, 1).Wait()
    yield (
        "Ireduce_scatterv",
        lambda x: comm.Ireduce_scatterv(wide(x, 0), mpi.MPI_SUM, counts).Wait(),
    )
    yield (
        "Ireduce_scatterv MIN",
        lambda x: comm.Ireduce_scatterv(wide(x, 1), mpi.MPI_MIN, counts, 1).Wait(),
    )


def set_up_once(comm):
    def twice(request, x):
        total = sum(request.Start(factor * x).Wait() ** factor for factor in (1, 2))
        request.Free()
        return total

    yield "Allreduce_init", lambda x: twice(comm.Allreduce_init(x, mpi.MPI_SUM), x)
    yield "Reduce_init", lambda x: twice(comm.Reduce_init(x, mpi.MPI_SUM, 0), x)
    yield "Bcast_init", lambda x: twice(comm.Bcast_init(x, comm.size - 1), x)


def run(comm, check, dtype=torch.float64):
    every = torch.stack(inputs([(2, 2)] * comm.size, dtype)).requires_grad_()
    for name, function in functions(comm):
        if dtype.is_complex and any(op in name for op in ("MAX", "MIN")):
            continue
        try:
            assert check(as_one_process(function, comm), every)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@mpi_test((1, 2, 3))
def test_gradcheck(comm):
    run(comm, gradcheck)


@mpi_test((1, 2))
def test_gradcheck_complex(comm):
    run(comm, gradcheck, torch.complex128)


@mpi_test((1, 2, 3))
def test_gradgradcheck(comm):
    run(comm, gradgradcheck)


@mpi_test((1, 2, 3))
def test_product_at_zeros_has_derivatives_of_both_orders(comm):
    every = torch.stack(inputs([(2, 3)] * comm.size, torch.float64)).round().requires_grad_()
    function = as_one_process(lambda x: comm.Allreduce(x, mpi.MPI_PROD), comm)
    assert gradcheck(function, every)
    assert gradgradcheck(function, every)


@mpi_test((1, 2, 3))
def test_forward_mode_agrees_with_finite_differences(comm):
    every = inputs([(2, 2)] * comm.size, torch.float64)
    tangents = inputs([(2, 2)] * comm.size, torch.float64, seed=3)
    for name, function in functions(comm):
        if name == "persistent":
            continue
        x, t = every[comm.rank], tangents[comm.rank]
        with torch.no_grad():
            difference = (function(x + 1e-6 * t) - function(x - 1e-6 * t)) / 2e-6
            with forward_ad.dual_level():
                tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, t))).tangent
        assert torch.allclose(tangent, difference, atol=1e-7), name


@mpi_test((1, 2, 3))
def test_forward_mode_needs_a_tangent_on_one_rank_only(comm):
    x = torch.ones(2, dtype=torch.float64)
    with torch.no_grad(), forward_ad.dual_level():
        y = comm.Allreduce(forward_ad.make_dual(x, x) if comm.rank == 0 else x, mpi.MPI_SUM)
        assert forward_ad.unpack_dual(y).tangent.tolist() == [1.0, 1.0]


COMPOSABLE = (
    "Allreduce",
    "Allreduce MAX",
    "Allreduce PROD",
    "Reduce_scatter",
    "Allgather",
    "Gather",
    "Alltoall",
    "Scan",
    "Sendrecv",
)


@mpi_test((1, 2, 3))
def test_func_grad_jvp_vmap(comm):
    x = inputs([(2, 2)] * comm.size, torch.float64)[comm.rank]
    for name, function in functions(comm):
        if name not in COMPOSABLE:
            continue
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        mpi.backward(y.sin().sum())
        grad = torch.func.grad(lambda x: function(x).sin().sum())(x)
        assert torch.allclose(grad, leaf.grad), name
        value, tangent = torch.func.jvp(function, (x,), (torch.ones_like(x),))
        with torch.no_grad():
            close = (function(x + 1e-6) - function(x - 1e-6)) / 2e-6
            assert torch.allclose(value, function(x)) and torch.allclose(
                tangent, close, atol=1e-7
            ), name
            batch = torch.stack([x, 2 * x, 3 * x], 1)
            rows = torch.stack([function(batch[:, i]) for i in range(3)])
            assert torch.allclose(torch.vmap(function, in_dims=1)(batch), rows), name
        if name != "Gather":  # jacrev batches over the outputs, which must be as many on each rank
            assert torch.func.jacrev(function)(x).shape == (*y.shape, *x.shape), name
        mpi.reset()
