"""Every collective, dtype and axis, at 1, 2, 3 and 5 ranks, against plain torch on all ranks'
inputs.
"""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

import torch

from multi.mpi_reference import ALL_DTYPES, COMPLEX, FLOATS, INTEGERS, check, close, inputs
from multi.mpi_runner import mpi_test
from torchrelay import mpi

SIZES = (1, 2, 3, 5)
REDUCTIONS = {
    mpi.MPI_SUM: lambda s: s.sum(0, dtype=s.dtype) if s.dtype is not torch.bool else s.any(0),
    mpi.MPI_PROD: lambda s: s.prod(0, dtype=s.dtype) if s.dtype is not torch.bool else s.all(0),
    mpi.MPI_MAX: lambda s: s.amax(0),
    mpi.MPI_MIN: lambda s: s.amin(0),
}


def ops_of(dtype):
    return [op for op in REDUCTIONS if not (dtype.is_complex and op in (mpi.MPI_MAX, mpi.MPI_MIN))]


def ragged(comm, axis, shape=(2, 3, 2)):
    """Shapes whose length along ``axis`` is different on each rank, and zero on the second."""
    return [
        tuple((r * 2) % 5 + (r != 1) if a == axis % len(shape) else n for a, n in enumerate(shape))
        for r in range(comm.size)
    ]


@mpi_test(SIZES)
def test_allreduce(comm):
    for dtype in ALL_DTYPES:
        given = inputs([(3, 2)] * comm.size, dtype)
        for op in ops_of(dtype):
            reduction = REDUCTIONS[op]
            check(
                lambda x: comm.Allreduce(x, op),
                lambda xs: [reduction(torch.stack(xs))] * comm.size,
                given,
                comm.rank,
            )


@mpi_test(SIZES)
def test_allreduce_ties_and_zeros(comm):
    for op in (mpi.MPI_MAX, mpi.MPI_MIN, mpi.MPI_PROD):
        given = [x.round() for x in inputs([(4, 5)] * comm.size, torch.float64)]
        check(
            lambda x: comm.Allreduce(x, op),
            lambda xs: [REDUCTIONS[op](torch.stack(xs))] * comm.size,
            given,
            comm.rank,
        )


@mpi_test(SIZES)
def test_logical_and_bitwise(comm):
    for dtype in (*INTEGERS, torch.bool):
        stacked = torch.stack(inputs([(5,)] * comm.size, dtype))
        mine = stacked[comm.rank]
        bits = stacked.to(torch.int64)
        wanted = {
            mpi.MPI_LAND: (stacked != 0).all(0),
            mpi.MPI_LOR: (stacked != 0).any(0),
            mpi.MPI_LXOR: (stacked != 0).sum(0) % 2,
            mpi.MPI_BAND: bits[0],
            mpi.MPI_BOR: bits[0],
            mpi.MPI_BXOR: bits[0],
        }
        for row in bits[1:]:
            wanted[mpi.MPI_BAND] = wanted[mpi.MPI_BAND] & row
            wanted[mpi.MPI_BOR] = wanted[mpi.MPI_BOR] | row
            wanted[mpi.MPI_BXOR] = wanted[mpi.MPI_BXOR] ^ row
        for op, result in wanted.items():
            close(comm.Allreduce(mine, op), result.to(dtype))
    floats = torch.tensor([0.0, 1.0, float(comm.rank)])
    assert comm.Allreduce(floats, mpi.MPI_LAND).tolist() == [0.0, 1.0, 0.0]


@mpi_test(SIZES)
def test_maxloc_and_minloc(comm):
    stacked = torch.stack(inputs([(6,)] * comm.size, torch.float64)).round()
    for op, best in ((mpi.MPI_MAXLOC, stacked.amax(0)), (mpi.MPI_MINLOC, stacked.amin(0))):
        values, ranks = comm.Allreduce(stacked[comm.rank], op)
        assert torch.equal(values, best)
        assert torch.equal(ranks, (stacked == best).int().argmax(0))


@mpi_test(SIZES)
def test_bcast(comm):
    for dtype in ALL_DTYPES:
        given = inputs([(3, 2)] * comm.size, dtype)
        for root in range(comm.size):
            check(
                lambda x: comm.Bcast_(x, root),
                lambda xs: [xs[root] * 1 if dtype is not torch.bool else xs[root]] * comm.size,
                given,
                comm.rank,
            )


@mpi_test(SIZES)
def test_reduce(comm):
    for dtype in ALL_DTYPES:
        given = inputs([(3, 2)] * comm.size, dtype)
        root = comm.size - 1
        for op in ops_of(dtype):

            def model(xs, op=op):
                total = REDUCTIONS[op](torch.stack(xs))
                return [total if r == root else torch.zeros_like(total) for r in range(comm.size)]

            check(lambda x: comm.Reduce_(x, op, root), model, given, comm.rank)


@mpi_test(SIZES)
def test_gather(comm):
    for dtype in ALL_DTYPES:
        for axis in (0, 1, 2, -1, -2):
            given = inputs(ragged(comm, axis), dtype)
            for root in {0, comm.size - 1}:

                def model(xs, root=root, axis=axis):
                    whole = torch.cat(xs, axis)
                    return [
                        whole if r == root else whole.narrow(axis, 0, 0) for r in range(comm.size)
                    ]

                check(lambda x: comm.Gather(x, axis, root), model, given, comm.rank)


@mpi_test(SIZES)
def test_allgather(comm):
    for dtype in ALL_DTYPES:
        for axis in (0, 1, 2, -1, -3):
            given = inputs(ragged(comm, axis), dtype)
            check(
                lambda x: comm.Allgather(x, axis),
                lambda xs: [torch.cat(xs, axis)] * comm.size,
                given,
                comm.rank,
            )


@mpi_test(SIZES)
def test_scatter(comm):
    for dtype in ALL_DTYPES:
        for axis in (0, 1, -1):
            lengths = [s[axis] for s in ragged(comm, axis)]
            whole = [2, 3, 2]
            whole[axis] = sum(lengths)
            root = comm.size // 2
            given = inputs([whole if r == root else (1, 2) for r in range(comm.size)], dtype)

            def model(xs, root=root, lengths=lengths, axis=axis):
                return [
                    part * 1 if part.dtype is not torch.bool else part
                    for part in xs[root].split(lengths, axis)
                ]

            check(
                lambda x: comm.Scatter(x, axis, lengths[comm.rank], root), model, given, comm.rank
            )


@mpi_test(SIZES)
def test_alltoall(comm):
    n = comm.size
    for dtype in ALL_DTYPES:
        for gatheraxis, scatteraxis in ((0, 1), (1, 0), (2, -2), (-1, 0), (0, -1)):
            wanted = [r % 3 + 1 for r in range(n)]
            shape = [2, 2, 2]
            shape[scatteraxis] = sum(wanted)
            given = inputs(ragged(comm, gatheraxis, tuple(shape)), dtype)

            def model(xs, g=gatheraxis, s=scatteraxis, wanted=wanted):
                return list(torch.cat(xs, g).split(wanted, s))

            check(
                lambda x: comm.Alltoall(x, gatheraxis, scatteraxis, wanted[comm.rank]),
                model,
                given,
                comm.rank,
            )


@mpi_test(SIZES)
def test_alltoall_moves_borders_when_axes_are_equal(comm):
    for dtype in (torch.float64, torch.bfloat16, torch.int16):
        for axis in (0, 1, -1):
            shapes = ragged(comm, axis)
            total = sum(s[axis] for s in shapes)
            wanted = [total // comm.size + (r < total % comm.size) for r in range(comm.size)]
            check(
                lambda x: comm.Alltoall(x, axis, axis, wanted[comm.rank]),
                lambda xs: list(torch.cat(xs, axis).split(wanted, axis)),
                inputs(shapes, dtype),
                comm.rank,
            )


@mpi_test(SIZES)
def test_reduce_scatter(comm):
    wanted = [(r + 1) % 3 for r in range(comm.size)]
    for dtype in ALL_DTYPES:
        for axis in (0, -1):
            shape = [2, 2]
            shape[axis] = sum(wanted)
            given = inputs([shape] * comm.size, dtype)
            for op in ops_of(dtype):
                check(
                    lambda x: comm.Reduce_scatter(x, op, axis, wanted[comm.rank]),
                    lambda xs: list(REDUCTIONS[op](torch.stack(xs)).split(wanted, axis)),
                    given,
                    comm.rank,
                )


@mpi_test(SIZES)
def test_scan_and_exscan(comm):
    for dtype in (torch.int64, *FLOATS, *COMPLEX):
        given = inputs([(3, 2)] * comm.size, dtype)
        for op in ops_of(dtype):
            reduction = REDUCTIONS[op]
            check(
                lambda x: comm.Scan(x, op),
                lambda xs: [reduction(torch.stack(xs[: r + 1])) for r in range(comm.size)],
                given,
                comm.rank,
            )
            check(
                lambda x: comm.Exscan(x, op),
                lambda xs: [
                    reduction(torch.stack(xs[:r])) if r else torch.zeros_like(xs[0])
                    for r in range(comm.size)
                ],
                given,
                comm.rank,
            )


@mpi_test(SIZES)
def test_layouts(comm):
    """Transposed, strided, expanded, conjugated and empty tensors are sent as what they show."""
    base = inputs([(4, 6)] * comm.size, torch.complex128)
    views = (
        lambda x: x.t(),
        lambda x: x[::2, 1::2],
        lambda x: x[:1].expand(3, 6),
        lambda x: x.conj(),
        lambda x: x.conj().imag,
        lambda x: x[:0],
    )
    for view in views:
        for function, model in (
            (
                lambda x: comm.Allreduce(x, mpi.MPI_SUM),
                lambda xs: [torch.stack(xs).sum(0)] * comm.size,
            ),
            (lambda x: comm.Allgather(x, 1), lambda xs: [torch.cat(xs, 1)] * comm.size),
            (
                lambda x: comm.Bcast_(x.clone(memory_format=torch.preserve_format), 0),
                lambda xs: [xs[0] * 1] * comm.size,
            ),
        ):
            check(
                lambda x: function(view(x)),
                lambda xs: model([view(x) for x in xs]),
                base,
                comm.rank,
            )


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm):
    from torchrelay.mpi._settings import changed

    given = inputs([(5, 4)] * comm.size, torch.float64)
    with changed(max_count=3):
        check(
            lambda x: comm.Allreduce(x, mpi.MPI_SUM),
            lambda xs: [torch.stack(xs).sum(0)] * comm.size,
            given,
            comm.rank,
        )
        check(lambda x: comm.Bcast_(x, 0), lambda xs: [xs[0] * 1] * comm.size, given, comm.rank)
        check(
            lambda x: comm.Reduce_(x * 1, mpi.MPI_SUM, 0),
            lambda xs: [torch.stack(xs).sum(0) * (r == 0) for r in range(comm.size)],
            given,
            comm.rank,
        )
        check(
            lambda x: comm.Allgather(x, 1),
            lambda xs: [torch.cat(xs, 1)] * comm.size,
            given,
            comm.rank,
        )
        check(
            lambda x: comm.Gather(x, 1, 0),
            lambda xs: [torch.cat(xs, 1) if r == 0 else xs[0][:, :0] for r in range(comm.size)],
            given,
            comm.rank,
        )
        check(
            lambda x: comm.Scan(x, mpi.MPI_SUM),
            lambda xs: [torch.stack(xs[: r + 1]).sum(0) for r in range(comm.size)],
            given,
            comm.rank,
        )
        whole = inputs([(5, 2 * comm.size)] * comm.size, torch.float64)
        check(
            lambda x: comm.Alltoall(x, 0, 1, 2),
            lambda xs: list(torch.cat(xs, 0).split(2, 1)),
            whole,
            comm.rank,
        )
        check(
            lambda x: comm.Scatter(x, 1, 2, 0),
            lambda xs: [p * 1 for p in xs[0].split(2, 1)],
            whole,
            comm.rank,
        )
        check(
            lambda x: comm.Reduce_scatter(x, mpi.MPI_SUM, 1, 2),
            lambda xs: list(torch.stack(xs).sum(0).split(2, 1)),
            whole,
            comm.rank,
        )
