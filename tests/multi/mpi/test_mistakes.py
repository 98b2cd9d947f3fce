"""Calls that do not match: every rank gets an error that names both, and can go on."""

from __future__ import annotations

import pytest
import torch

from multi.mpi_runner import mpi_test
from torchrelay import mpi
from torchrelay.errors import ArgumentError, MismatchError

LARGE = 1 << 14  # elements: in every dtype below more than what is checked without debug mode


def either(comm, first, second):
    """What rank 0 does, and what all others do."""
    return first() if comm.rank == 0 else second()


def mismatches(comm, length):
    """Calls that differ between rank 0 and the others, and what the error must name."""
    n, root = comm.size, min(comm.rank, 1)
    x = torch.ones(n * length, dtype=torch.float64)
    y = torch.ones(n * length, dtype=torch.float32)
    yield "roots of Gather", lambda: comm.Gather(x, 0, root), ("root=0", "root=1")
    yield "roots of Scatter", lambda: comm.Scatter(x, 0, length, root), ("root=0", "root=1")
    yield (
        "Allgather and Gather",
        lambda: either(comm, lambda: comm.Allgather(x, 0), lambda: comm.Gather(x, 0, 0)),
        ("Allgather", "Gather"),
    )
    yield (
        "Alltoall and Allgather",
        lambda: either(
            comm, lambda: comm.Alltoall(x, 0, 0, n * length), lambda: comm.Allgather(x, 0)
        ),
        ("Alltoall", "Allgather"),
    )
    yield (
        "Alltoallv and Reduce_scatter",
        lambda: either(
            comm,
            lambda: comm.Alltoallv(x, [length] * n),
            lambda: comm.Reduce_scatter(x, mpi.MPI_SUM, 0, length),
        ),
        ("Alltoallv", "Reduce_scatter"),
    )
    yield (
        "operations of Reduce_scatter",
        lambda: comm.Reduce_scatter(x, mpi.MPI_MIN if root else mpi.MPI_SUM, 0, length),
        ("Reduce_scatter(SUM", "Alltoall" if torch.is_grad_enabled() else "MIN"),
    )
    yield "dtypes of Allgather", lambda: comm.Allgather(y if root else x, 0), ("float64", "float32")
    yield (
        "dtypes of Alltoallv",
        lambda: comm.Alltoallv(y if root else x, [length] * n),
        ("float64", "float32"),
    )


def large_mismatches(comm, length):
    """Those that are noticed from 64 KiB up."""
    root = min(comm.rank, 1)
    x = torch.ones(length, dtype=torch.float64)
    op = mpi.MPI_MAX if root else mpi.MPI_SUM
    yield (
        "roots of Reduce_",
        lambda: comm.Reduce_(x.clone(), mpi.MPI_SUM, root),
        ("root=0", "root=1"),
    )
    yield "roots of Bcast_", lambda: comm.Bcast_(x.clone(), root), ("root=0", "root=1")
    yield (
        "Allreduce and Reduce_",
        lambda: either(
            comm,
            lambda: comm.Allreduce(x, mpi.MPI_SUM),
            lambda: comm.Reduce_(x.clone(), mpi.MPI_SUM, 0),
        ),
        ("Allreduce", "Reduce"),
    )
    yield "operations of Allreduce", lambda: comm.Allreduce(x, op), ("SUM", "MAX")
    for dtype in (torch.float32, torch.int64, torch.complex128):
        yield (
            f"float64 and {dtype}",
            lambda dtype=dtype: comm.Allreduce(x.to(dtype) if root else x, mpi.MPI_SUM),
            ("float64", str(dtype)),
        )
    yield (
        "shapes of Allreduce",
        lambda: comm.Allreduce(x.view(2, -1) if root else x, mpi.MPI_SUM),
        (f"({length},)", f"(2, {length // 2})"),
    )
    yield (
        "Scan and Exscan",
        lambda: either(
            comm, lambda: comm.Scan(x, mpi.MPI_SUM), lambda: comm.Exscan(x, mpi.MPI_SUM)
        ),
        ("Scan", "Exscan"),
    )
    yield (
        "Allreduce and Allgather",
        lambda: either(comm, lambda: comm.Allreduce(x, mpi.MPI_SUM), lambda: comm.Allgather(x, 0)),
        ("Allreduce", "Allgather"),
    )
    yield (
        "Allreduce in one MPI call and in pieces",
        lambda: comm.Allreduce(torch.ones(1 << 23) if root else x, mpi.MPI_SUM),
        ("float64", "float32"),
    )


def assert_refused(comm, name, call, named):
    with pytest.raises(MismatchError) as caught:
        call()
    for text in named:
        assert text in str(caught.value), f"{name}: {caught.value}"
    mpi.reset()
    with torch.no_grad():
        total = comm.Allreduce(torch.ones(()), mpi.MPI_SUM).item()  # the ranks are still in step
    assert total == comm.size, name


@mpi_test((2, 3))
def test_mismatched_calls_are_named_on_all_ranks(comm):
    for grad_mode in (False, True):
        with torch.set_grad_enabled(grad_mode):
            for case in (
                *mismatches(comm, 2),
                *mismatches(comm, LARGE),
                *large_mismatches(comm, LARGE),
            ):
                assert_refused(comm, *case)


@mpi_test((2, 3))
def test_backward_is_checked_too(comm):
    x = torch.ones(LARGE, dtype=torch.float64, requires_grad=True)
    with mpi.chain():
        y = comm.Allgather(x, 0)
    with mpi.chain():
        z = comm.Allreduce(x, mpi.MPI_SUM)
    mine = y if comm.rank == 0 else z
    with pytest.raises(
        MismatchError, match=r"(?s)(Reduce_scatter.*Allreduce|Allreduce.*Reduce_scatter)"
    ):
        mine.sum().backward()


@mpi_test((2, 3))
def test_two_ways_to_overwrite_are_one_function(comm):
    """A rank whose tensor cannot be overwritten by MPI copies: the others must not take that for
    another call.
    """
    for length in (4, LARGE):
        whole = torch.ones(length, 2, dtype=torch.float64)
        x = whole[:, 0] if comm.rank == 0 else whole[:, 0].clone()
        comm.Bcast_(x, 0)
        comm.Reduce_(x, mpi.MPI_SUM, 0)
        assert x[0] == (comm.size if comm.rank == 0 else 0)


@mpi_test((2, 3))
def test_alltoallv_with_other_counts_on_each_rank(comm):
    counts = [(comm.rank + peer) % 3 for peer in range(comm.size)]
    x = torch.arange(sum(counts)).double() + 100 * comm.rank
    y = comm.Alltoallv(x, counts)
    wanted = []
    for peer in range(comm.size):
        theirs = [(peer + other) % 3 for other in range(comm.size)]
        start = sum(theirs[: comm.rank])
        wanted += [100.0 * peer + start + k for k in range(theirs[comm.rank])]
    assert y.tolist() == wanted


@mpi_test((2, 3))
def test_new_communicators_are_made_by_all_ranks(comm):
    with pytest.raises(MismatchError, match=r"(?s)(Split.*Dup|Dup.*Split)"):
        either(comm, comm.Dup, lambda: comm.Split(0))


@mpi_test((1, 2, 3))
def test_border_without_a_neighbour(comm):
    """MPI_PROC_NULL, the usual way to write the ends of a line of ranks, in both directions of
    autograd.
    """
    above = comm.rank + 1 if comm.rank + 1 < comm.size else mpi.MPI_PROC_NULL
    below = comm.rank - 1 if comm.rank else mpi.MPI_PROC_NULL
    has_above, has_below = float(above >= 0), float(below >= 0)
    x = torch.full((3,), comm.rank + 1.0, requires_grad=True)
    y = comm.Sendrecv(x, above, below)
    assert y.tolist() == [comm.rank * has_below] * 3
    z = comm.Recv(torch.zeros(3), below, mpi.MPI_ANY_TAG) if comm.rank % 2 else None
    handle = comm.Isend(x, above)
    if z is None:
        z = comm.Recv(torch.zeros(3), below, mpi.MPI_ANY_TAG)
    comm.Wait(handle)
    got = comm.Irecv(torch.zeros(3), below)
    sent = comm.Isend(x, above)
    w = comm.Wait(got)
    comm.Wait(sent)
    (y + 2 * z + 3 * w).sum().backward()
    assert x.grad.tolist() == [6.0 * has_above] * 3


@mpi_test((1, 2, 3))
def test_sendrecv_receives_what_like_says(comm):
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = torch.full(
        (2, 3), comm.rank + 1.0, dtype=torch.float64 if comm.rank == 0 else torch.float32
    )
    like = torch.empty(2, 3, dtype=torch.float64 if below == 0 else torch.float32)
    x.requires_grad_()
    y = comm.Sendrecv(x, above, below, like=like)
    assert y.dtype is like.dtype and y.tolist() == [[below + 1.0] * 3] * 2
    (y * (comm.rank + 1)).sum().backward()
    assert x.grad.dtype is x.dtype and x.grad.tolist() == [[above + 1.0] * 3] * 2
    with pytest.raises(ArgumentError, match="like"):
        comm.Sendrecv(x, above, below, like=torch.empty(2, dtype=torch.int64))
    mpi.reset()
