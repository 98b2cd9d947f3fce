"""Calls that do not match: every rank gets an error that names both, and can go on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from multi.mpi.runner import REAL, THREADS, mpi_test
from torchrelay import mpi
from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi import Communicator

Mismatch = tuple[str, Callable[[], object], tuple[str, ...]]  # name, call, what the error names
LARGE = 1 << 14  # elements: more than a header holds, and than MPI sends at once


def either(comm: Communicator, first: Callable[[], object], second: Callable[[], object]) -> object:
    """What rank 0 does, and what all others do."""
    return first() if comm.rank == 0 else second()


def mismatches(comm: Communicator, length: int) -> Iterator[Mismatch]:
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
        ("Reduce_scatter(SUM", "Reduce_scatter(MIN"),
    )
    yield "dtypes of Allgather", lambda: comm.Allgather(y if root else x, 0), ("float64", "float32")
    yield (
        "dtypes of Alltoallv",
        lambda: comm.Alltoallv(y if root else x, [length] * n),
        ("float64", "float32"),
    )
    # With equal shapes.
    z = torch.ones(length, dtype=torch.float64)
    op = mpi.MPI_PROD if root else mpi.MPI_SUM
    yield (
        "roots of Reduce_",
        lambda: comm.Reduce_(z.clone(), mpi.MPI_SUM, root),
        ("root=0", "root=1"),
    )
    yield "roots of Bcast_", lambda: comm.Bcast_(z.clone(), root), ("root=0", "root=1")
    yield (
        "Allreduce and Reduce_",
        lambda: either(
            comm,
            lambda: comm.Allreduce(z, mpi.MPI_SUM),
            lambda: comm.Reduce_(z.clone(), mpi.MPI_SUM, 0),
        ),
        ("Allreduce", "Reduce"),
    )
    yield "operations of Allreduce", lambda: comm.Allreduce(z, op), ("SUM", "PROD")
    for dtype in (torch.float32, torch.int64, torch.complex128):
        yield (
            f"float64 and {dtype}",
            functools.partial(comm.Allreduce, z.to(dtype) if root else z, mpi.MPI_SUM),
            ("float64", str(dtype)),
        )
    yield (
        "shapes of Allreduce",
        lambda: comm.Allreduce(z.view(2, -1) if root else z, mpi.MPI_SUM),
        (f"({length},)", f"(2, {length // 2})"),
    )
    yield (
        "Scan and Exscan",
        lambda: either(
            comm, lambda: comm.Scan(z, mpi.MPI_SUM), lambda: comm.Exscan(z, mpi.MPI_SUM)
        ),
        ("Scan", "Exscan"),
    )
    yield (
        "Allreduce and Exscan of MAX",
        lambda: either(
            comm, lambda: comm.Allreduce(z, mpi.MPI_MAX), lambda: comm.Exscan(z, mpi.MPI_MAX)
        ),
        ("Allreduce(MAX)", "Exscan(MAX)"),
    )
    yield (
        "roots of Reduce_ of PROD",
        lambda: comm.Reduce_(z.clone(), mpi.MPI_PROD, root),
        ("root=0", "root=1"),
    )
    yield (
        "operations of Reduce_scatter that are gathered",
        lambda: comm.Reduce_scatter(x, mpi.MPI_MIN if root else mpi.MPI_MAX, 0, length),
        ("Reduce_scatter(MAX", "Reduce_scatter(MIN"),
    )
    yield (
        "Allreduce and Allgather",
        lambda: either(comm, lambda: comm.Allreduce(z, mpi.MPI_SUM), lambda: comm.Allgather(z, 0)),
        ("Allreduce", "Allgather"),
    )
    yield (
        "Allreduce in one MPI call and in pieces",
        lambda: comm.Allreduce(torch.ones(1 << 23) if root else z, mpi.MPI_SUM),
        ("float64", "float32"),
    )


def assert_refused(
    comm: Communicator, name: str, call: Callable[[], object], named: tuple[str, ...]
) -> None:
    with pytest.raises(MismatchError) as caught:
        call()
    for text in named:
        assert text in str(caught.value), f"{name}: {caught.value}"
    mpi.reset()
    with torch.no_grad():
        total = comm.Allreduce(torch.ones(()), mpi.MPI_SUM).item()  # the ranks are still in step
    assert total == comm.size, name


@mpi_test((2, 3))
def test_mismatched_calls_are_named_on_all_ranks(comm: Communicator) -> None:
    for grad_mode in (False, True):
        with torch.set_grad_enabled(grad_mode):
            for case in (*mismatches(comm, 2), *mismatches(comm, 100), *mismatches(comm, LARGE)):
                assert_refused(comm, *case)


@mpi_test((2, 3))
def test_backward_is_checked_too(comm: Communicator) -> None:
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
def test_two_ways_to_overwrite_are_one_function(comm: Communicator) -> None:
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
def test_new_communicators_are_made_by_all_ranks(comm: Communicator) -> None:
    with pytest.raises(MismatchError, match=r"(?s)(Split.*Dup|Dup.*Split)"):
        either(comm, comm.Dup, lambda: comm.Split(0))


def with_wrong_arguments(
    comm: Communicator, wrong: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of every function that all ranks make, with wrong arguments if ``wrong``."""
    n, x = comm.size, torch.ones(comm.size, 2)
    given: Any = None if wrong else x
    op: Any = "sum" if wrong else mpi.MPI_SUM
    axis, root = (5, n) if wrong else (0, 0)
    yield "Allreduce", lambda: comm.Allreduce(given, mpi.MPI_SUM)
    yield "Allreduce", lambda: comm.Allreduce(x, op)
    yield "Allreduce", lambda: comm.Allreduce(x.to_sparse() if wrong else x, mpi.MPI_SUM)
    yield "Bcast_", lambda: comm.Bcast_(x, root)
    yield "Reduce_", lambda: comm.Reduce_(given, mpi.MPI_SUM, 0)
    yield "Gather", lambda: comm.Gather(x, axis, 0)
    yield "Gatherv", lambda: comm.Gatherv(x, root)
    yield "Allgather", lambda: comm.Allgather(given, 0)
    yield "Allgatherv", lambda: comm.Allgatherv(x, axis)
    yield "Scatter", lambda: comm.Scatter(given, 0, 1, 0)
    yield "Scatterv", lambda: comm.Scatterv(x, [1] * (n + wrong), 0)
    yield "Alltoall", lambda: comm.Alltoall(given, 0, 0, 1)
    yield "Alltoallv", lambda: comm.Alltoallv(x, [n] * n if wrong else [1] * n)
    yield "Reduce_scatter", lambda: comm.Reduce_scatter(x, op, 0, 1)
    yield "Reduce_scatter_block", lambda: comm.Reduce_scatter_block(given, mpi.MPI_SUM)
    yield "Scan", lambda: comm.Scan(x, op)
    yield "Exscan", lambda: comm.Exscan(given, mpi.MPI_SUM)
    yield "Split", lambda: comm.Split("red" if wrong else 0)  # type: ignore[arg-type]
    yield "Cart", lambda: comm.Cart([n + wrong])


@mpi_test((2, 3))
def test_wrong_arguments_of_one_rank_end_the_call_on_all(comm: Communicator) -> None:
    is_wrong = comm.rank == comm.size - 1
    for name, call in with_wrong_arguments(comm, is_wrong):
        if is_wrong:
            with pytest.raises(ArgumentError):
                call()
        else:
            with pytest.raises(MismatchError, match=rf"(?s){name.removesuffix('v')}.*\(refused: "):
                call()
        with torch.no_grad():  # the next call is the next of all
            assert comm.Allreduce(torch.ones(1), mpi.MPI_SUM) == comm.size, name
        mpi.reset()


def neighbors(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@functools.cache
def grid(comm: Communicator) -> mpi.CartCommunicator:
    cart = comm.Cart([1, comm.size], [False, True])
    assert cart is not None
    return cart


def messages(
    comm: Communicator, value: float, wrong: Any
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Calls that send ``value`` to the next rank; named, if given ``wrong`` where it is not None.

    Those that receive return two values of the last rank.
    """
    above, below = neighbors(comm)
    x, memory = torch.full((2, 2), value), torch.empty(2, 2)
    given, like = (x, memory) if wrong is None else (wrong[0], wrong[0])
    yield "Send", lambda: comm.Send(given, above)
    yield "receive", lambda: comm.Recv(memory.clone(), below)
    yield "Isend", lambda: comm.Isend(given, above).Wait()
    yield "receive", lambda: comm.Irecv(memory.clone(), below).Wait()
    yield "send", lambda: comm.Send(x, above)
    yield "Recv", lambda: comm.Recv(like, below)
    yield "send", lambda: comm.Isend(x, above).Wait()
    yield "Irecv", lambda: comm.Irecv(like, below).Wait()
    yield "Sendrecv", lambda: comm.Sendrecv(given, above, below)
    yield "Halo_exchange", lambda: grid(comm).Halo_exchange(given, [(0, 0), (1, 0)])[:, :1]


RECEIVE = ("receive", "Recv", "Irecv", "Sendrecv", "Halo_exchange")


@mpi_test((2, 3), on=(*REAL, *THREADS))
def test_refused_messages_are_not_taken_for_later_ones(comm: Communicator) -> None:
    """The rank with wrong arguments raises, and the one that waits for its message."""
    last, (_, below) = comm.size - 1, neighbors(comm)
    sparse, unsigned = torch.ones(2, 2).to_sparse(), torch.ones(2, 2, dtype=torch.uint16)
    for mistake in ([None], [sparse], [unsigned], [[1.0, 2.0]]):
        previous = ""
        for name, call in messages(comm, float(comm.rank), mistake if comm.rank == last else None):
            is_refused = comm.rank == last and name[0].isupper()
            if is_refused:
                with pytest.raises(ArgumentError):
                    call()
            elif below == last and (
                name in ("Sendrecv", "Halo_exchange") or previous in ("Send", "Isend")
            ):
                with pytest.raises(MismatchError, match="whose call failed"):
                    call()
            else:
                y = call()
                assert name not in RECEIVE or (y == below).all(), (name, y)
            previous = name
        mpi.reset()
        for name, call in messages(comm, comm.rank + 10.0, None):  # the next are the next of all
            y = call()
            assert name not in RECEIVE or (y == below + 10).all(), (name, y)
        mpi.reset()
