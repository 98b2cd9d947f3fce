"""What bench_mpi.py measures: each case the same communication by all rivals that have it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as dist_functional
from mpi4py import MPI
from torch import Tensor

from torchrelay import mpi
from torchrelay._torch import apply_of

__all__ = ["GROUP_RIVALS", "Case", "cases", "group_cases"]

GROUP_RIVALS = (
    "torchrelay (sml)",
    "torch.distributed.nn (sml)",
    "functional collectives (sml)",
    "torchrelay (gloo)",
    "torch.distributed.nn (gloo)",
    "functional collectives (gloo)",
    "torchrelay (MPI)",
    "no communication, a node in Python",
    "no communication",
)

Run = Callable[[], object]


class Case(NamedTuple):
    """Rivals' functions without arguments, and what ours must return on this rank."""

    name: str
    size_bytes: int
    runs: dict[str, Run]
    wanted: Tensor
    grad: bool = False  # whether to run it in grad mode

    def check(self) -> None:
        """Raises if a rival that returns a tensor returns something else than ``wanted``."""
        for rival, run in self.runs.items():
            with torch.set_grad_enabled(self.grad):
                got = run()
            if isinstance(got, Tensor) and not torch.allclose(got.detach(), self.wanted):
                raise AssertionError(
                    f"{self.name} of {self.size_bytes} bytes by {rival}: a wrong result"
                )


def cases(bare: MPI.Intracomm, sizes: Sequence[int]) -> Iterator[Case]:
    """Every case at every size in bytes, each made when it is its turn."""
    comm, theirs = mpi.COMM_WORLD, _mpi4torch()
    for size_bytes in sizes:
        x = torch.rand(
            size_bytes // 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        x += bare.rank
        yield from _allreduce(comm, bare, theirs, x)
        if size_bytes >= 1024:
            yield from _rooted(comm, bare, theirs, x)
            yield from _symmetric(comm, bare, theirs, x)
            yield from _between_two(comm, bare, x)
    if max(sizes) > 1 << 20:
        yield _along_axis_1(comm, bare, theirs)


def _mpi4torch() -> Any:
    if importlib.util.find_spec("mpi4torch") is None:
        return None
    return importlib.import_module("mpi4torch")


def _by_name(
    ours: Run, bare: Run, mpi4torch: Run | None = None, gloo: Run | None = None
) -> dict[str, Run]:
    runs = {"torchrelay": ours, "bare mpi4py": bare, "mpi4torch": mpi4torch, "torch (gloo)": gloo}
    return {name: run for name, run in runs.items() if run is not None}


def _ranks(x: Tensor, n: int, rank: int) -> list[Tensor]:
    """All ranks' inputs."""
    return [x - rank + r for r in range(n)]


def _both_ways(leaf: Tensor, cotangent: Tensor, function: Callable[[Tensor], Tensor]) -> Run:
    """A function that runs ``function`` forward and backward, and returns the gradient."""

    def run() -> Tensor | None:
        function(leaf).backward(cotangent)  # type: ignore[no-untyped-call]
        grad, leaf.grad = leaf.grad, None
        return grad

    return run


class _Node(torch.autograd.Function):
    """A node in Python with a token, as a communication has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return torch.empty_like(x), torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _token: None) -> tuple[Tensor, None]:
        return grad * mpi.COMM_WORLD.size, None


def group_cases(sizes: Sequence[int]) -> Iterator[Case]:
    """Allreduce, forward and backward, over process groups and MPI."""
    import torchrelay.aggregation  # noqa: F401, PLC0415 - registers sml

    warnings.filterwarnings("ignore", category=FutureWarning)  # it has no successor for autograd
    groups = {name: dist.new_group(backend=name) for name in ("sml", "gloo")}
    comms = {name: mpi.Communicator.from_group(group) for name, group in groups.items()}

    def ours(comm: mpi.Communicator, t: Tensor) -> Tensor:
        return comm.Allreduce(t, mpi.MPI_SUM)  # type: ignore[no-any-return]

    def theirs(group: dist.ProcessGroup, t: Tensor) -> Tensor:
        reduced: Tensor = dist_functional.all_reduce(t, group=group)  # type: ignore[no-untyped-call]
        return reduced

    def functionally(group: dist.ProcessGroup, t: Tensor) -> Tensor:
        return functional.all_reduce(t, "sum", group)  # type: ignore[no-any-return]

    node, token = apply_of(_Node), torch.zeros((), requires_grad=True)

    def alone(t: Tensor) -> Tensor:
        return node(t, token)[0]  # type: ignore[no-any-return]

    for size_bytes in sizes:
        leaf = torch.rand(size_bytes // 4, requires_grad=True)
        ones = torch.ones_like(leaf)
        runs: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, group in groups.items():
            runs[f"torchrelay ({name})"] = partial(ours, comms[name])
            runs[f"torch.distributed.nn ({name})"] = partial(theirs, group)
            runs[f"functional collectives ({name})"] = partial(functionally, group)
        runs["torchrelay (MPI)"] = partial(ours, mpi.COMM_WORLD)
        runs["no communication, a node in Python"] = alone
        runs["no communication"] = lambda t: t * mpi.COMM_WORLD.size
        yield Case(
            "Allreduce, forward and backward",
            size_bytes,
            {name: _both_ways(leaf, ones, run) for name, run in runs.items()},
            mpi.COMM_WORLD.size * ones,
            grad=True,
        )


def _allreduce(
    comm: mpi.Communicator, bare: MPI.Intracomm, theirs: Any, x: Tensor
) -> Iterator[Case]:
    a, size_bytes, total = x.numpy(), x.nbytes, sum(_ranks(x, comm.size, comm.rank))
    out, leaf, ones = x.clone(), x.clone().requires_grad_(), torch.ones_like(x)
    cotangent = ones.numpy()
    torch_all_reduce: Callable[[Tensor], Tensor] = dist_functional.all_reduce
    # it is deprecated, and has no successor for autograd
    warnings.filterwarnings("ignore", category=FutureWarning)

    def bare_once() -> None:
        bare.Allreduce(a, np.empty_like(a))

    def bare_twice() -> None:
        result, grad = np.empty_like(a), np.empty_like(a)  # both are there at the end
        bare.Allreduce(a, result)
        bare.Allreduce(cotangent, grad)

    their_sum = None if theirs is None else lambda t: theirs.COMM_WORLD.Allreduce(t, theirs.MPI_SUM)
    assert isinstance(total, Tensor)
    yield Case(
        "Allreduce",
        size_bytes,
        _by_name(
            lambda: comm.Allreduce(x, mpi.MPI_SUM),
            bare_once,
            None if their_sum is None else lambda: their_sum(x),
            lambda: dist.all_reduce(out),
        ),
        total,
    )
    yield Case(
        "Allreduce, forward and backward",
        size_bytes,
        _by_name(
            _both_ways(leaf, ones, lambda t: comm.Allreduce(t, mpi.MPI_SUM)),
            bare_twice,
            None if their_sum is None else _both_ways(leaf, ones, their_sum),
            _both_ways(leaf, ones, torch_all_reduce),
        ),
        comm.size * ones,
        grad=True,
    )


def _rooted(comm: mpi.Communicator, bare: MPI.Intracomm, theirs: Any, x: Tensor) -> Iterator[Case]:
    n, r, a, size_bytes = comm.size, comm.rank, x.numpy(), x.nbytes
    every, part, world = (
        _ranks(x, n, r),
        x.numel() // n,
        None if theirs is None else theirs.COMM_WORLD,
    )
    # Pages that are there: zeros_like has none yet.
    memory, same = torch.zeros_like(x), np.full_like(a, 0)
    nothing, zeros = x[:0], torch.zeros_like(x)

    def bare_reduce() -> None:
        bare.Reduce(MPI.IN_PLACE if r == 0 else same, same if r == 0 else None, MPI.SUM, 0)
        if r != 0:
            same.fill(0)  # as all rivals do

    yield Case(
        "Bcast_",
        size_bytes,
        _by_name(
            lambda: comm.Bcast_(memory, 0),
            lambda: bare.Bcast(same, 0),
            world and (lambda: world.Bcast_(memory, 0)),
        ),
        zeros,
    )
    yield Case(
        "Reduce_",
        size_bytes,
        _by_name(
            lambda: comm.Reduce_(memory, mpi.MPI_SUM, 0),
            bare_reduce,
            world and (lambda: world.Reduce_(memory, theirs.MPI_SUM, 0)),
        ),
        zeros,
    )
    yield Case(
        "Gather",
        size_bytes,
        _by_name(
            lambda: comm.Gather(x, 0, 0),
            lambda: bare.Gather(a, np.empty((n, x.numel())) if r == 0 else None, 0),
            world and (lambda: _on_root(world.Gather(x, 0, 0), r)),
        ),
        torch.cat(every) if r == 0 else nothing,
    )
    yield Case(
        "Scatter",
        size_bytes,
        _by_name(
            lambda: comm.Scatter(x, 0, part, 0),
            lambda: bare.Scatter(a if r == 0 else None, np.empty(part), 0),
            world and (lambda: world.Scatter(x, 0, part, 0)),
        ),
        every[0][r * part : (r + 1) * part],
    )


def _on_root(result: Tensor, rank: int) -> Tensor | None:
    """What others than root get is not defined."""
    return result if rank == 0 else None


def _symmetric(
    comm: mpi.Communicator, bare: MPI.Intracomm, theirs: Any, x: Tensor
) -> Iterator[Case]:
    n, r, a, size_bytes = comm.size, comm.rank, x.numpy(), x.nbytes
    every, part, world = (
        _ranks(x, n, r),
        x.numel() // n,
        None if theirs is None else theirs.COMM_WORLD,
    )
    rows, total = x.view(n, part), sum(every)
    mine = slice(r * part, (r + 1) * part)
    assert isinstance(total, Tensor)

    def bare_in_two_steps() -> None:
        result = np.empty_like(a)  # held here: mpi4py may let go of it before MPI does
        bare.Iallreduce(a, result).Wait()

    yield Case(
        "Allgather",
        size_bytes,
        _by_name(
            lambda: comm.Allgather(x, 0),
            lambda: bare.Allgather(a, np.empty((n, x.numel()))),
            world and (lambda: world.Allgather(x, 0)),
        ),
        torch.cat(every),
    )
    yield Case(
        "Alltoall",
        size_bytes,
        _by_name(
            lambda: comm.Alltoall(rows, 1, 0, 1),
            lambda: bare.Alltoall(a, np.empty_like(a)),
            world and (lambda: world.Alltoall(rows, 1, 0, 1)),
        ),
        torch.cat([each[mine] for each in every]).view(1, -1),
    )
    yield Case(
        "Alltoallv",
        size_bytes,
        _by_name(
            lambda: comm.Alltoallv(x, [part] * n),
            lambda: bare.Alltoallv((a, [part] * n), (np.empty_like(a), [part] * n)),
        ),
        torch.cat([each[mine] for each in every]),
    )
    yield Case(
        "Reduce_scatter",
        size_bytes,
        _by_name(
            lambda: comm.Reduce_scatter(x, mpi.MPI_SUM, 0, part),
            lambda: bare.Reduce_scatter(a, np.empty(part)),
        ),
        total[mine],
    )
    yield Case(
        "Scan",
        size_bytes,
        _by_name(lambda: comm.Scan(x, mpi.MPI_SUM), lambda: bare.Scan(a, np.empty_like(a))),
        torch.stack(every[: r + 1]).sum(0),
    )
    yield Case(
        "Iallreduce and Wait",
        size_bytes,
        _by_name(
            lambda: comm.Iallreduce(x, mpi.MPI_SUM).Wait(),
            bare_in_two_steps,
        ),
        total,
    )


def _between_two(comm: mpi.Communicator, bare: MPI.Intracomm, x: Tensor) -> Iterator[Case]:
    r, a, other = comm.rank, x.numpy(), (comm.rank + 1) % comm.size
    memory, same = torch.empty_like(x), np.empty_like(a)
    wanted = x - r + (r - 1) % comm.size

    def there_and_back() -> Tensor:
        if r == 0:
            comm.Send(x, 1)
            return comm.Recv(memory, 1)
        comm.Recv(memory, 0)
        comm.Send(x, 0)
        return memory

    def bare_there_and_back() -> None:
        if r == 0:
            bare.Send(a, 1)
            bare.Recv(same, 1)
        else:
            bare.Recv(same, 0)
            bare.Send(a, 0)

    def in_two_steps() -> Tensor:
        receiving, sending = comm.Irecv(memory, other), comm.Isend(x, other)
        comm.Wait(sending)
        return comm.Wait(receiving)

    def bare_in_two_steps() -> None:
        receiving, sending = bare.Irecv(same, other), bare.Isend(a, other)
        sending.Wait()
        receiving.Wait()

    yield Case(
        "Send and Recv, there and back",
        x.nbytes,
        _by_name(there_and_back, bare_there_and_back),
        wanted,
    )
    yield Case("Isend, Irecv and Wait", x.nbytes, _by_name(in_two_steps, bare_in_two_steps), wanted)
    yield Case(
        "Sendrecv",
        x.nbytes,
        _by_name(
            lambda: comm.Sendrecv(x, other, other),
            lambda: bare.Sendrecv(a, other, 0, np.empty_like(a), other, 0),
        ),
        wanted,
    )


def _along_axis_1(comm: mpi.Communicator, bare: MPI.Intracomm, theirs: Any) -> Case:
    matrix = torch.rand(1024, 1024, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    a, n = matrix.numpy(), comm.size
    return Case(
        "Allgather along axis 1",
        matrix.nbytes,
        _by_name(
            lambda: comm.Allgather(matrix, 1),
            lambda: np.concatenate(_gathered(bare, a, n), axis=1),
            None if theirs is None else lambda: theirs.COMM_WORLD.Allgather(matrix, 1),
        ),
        torch.cat([matrix] * n, 1),
    )


def _gathered(bare: MPI.Intracomm, a: Any, n: int) -> Any:
    every = np.empty((n, *a.shape))
    bare.Allgather(a, every)
    return every
