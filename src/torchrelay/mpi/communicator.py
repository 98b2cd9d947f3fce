"""Communicators: the face of MPI, with MPI's own names.

Every communicator has two duplicates: backward passes communicate over the first, apart from the user's
messages; ranks that wait for each other talk over the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi import _wait, point_to_point
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._library import MPI
from torchrelay.mpi._settings import settings
from torchrelay.mpi.allgather import allgather
from torchrelay.mpi.allreduce import Located, allreduce, allreduce_located
from torchrelay.mpi.alltoall import alltoall
from torchrelay.mpi.bcast import bcast_
from torchrelay.mpi.gather import gather
from torchrelay.mpi.point_to_point import WaitHandle
from torchrelay.mpi.reduce import reduce_
from torchrelay.mpi.reduce_scatter import reduce_scatter
from torchrelay.mpi.scan import exscan, scan
from torchrelay.mpi.scatter import scatter

__all__ = ["CartCommunicator", "Communicator", "from_mpi4py"]

_C = TypeVar("_C", bound="Communicator")
_names = itertools.count()


class Communicator:
    """Ranks that communicate with each other. Made by :func:`from_mpi4py`, :meth:`Split`, :meth:`Dup`, :meth:`Cart`."""

    mpi: MPI.Intracomm
    control: MPI.Intracomm
    reverse: Communicator
    rank: int
    size: int
    name: str
    convention: str

    def __init__(self, mpi: MPI.Comm, name: str | None = None) -> None:
        """Collective over ``mpi``'s ranks."""
        if not isinstance(mpi, MPI.Intracomm):
            raise ArgumentError(f"{mpi!r} is not an intra-communicator")
        self.mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.name = name or f"communicator {next(_names)}"
        self.convention = settings.convention
        self.control = mpi.Dup()
        reverse = self._copy()
        reverse.mpi, reverse.reverse, reverse.name = mpi.Dup(), reverse, f"{self.name} (backward)"
        self.reverse = reverse
        self._ended: Communicator | None = None
        reverse._ended = None
        _wait.register(self)

    def _copy(self: _C) -> _C:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __repr__(self) -> str:
        return f"<{self.name}: rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        if self.name == WORLD_NAME:
            return _world, ()
        raise ArgumentError(
            f"{self.name} cannot be pickled; only COMM_WORLD means the same in another process"
        )

    # Communicators

    def replace(self, convention: str) -> Communicator:
        """The same communicator under another gradient convention, ``"sum"`` or ``"replicated"``."""
        if convention == self.convention:
            return self
        if convention not in ("sum", "replicated"):
            raise ArgumentError(f"convention {convention!r}: it must be 'sum' or 'replicated'")
        other = self._copy()
        other.convention = convention
        other.reverse = self.reverse._copy()
        other.reverse.convention, other.reverse.reverse = convention, other.reverse
        return other

    def Dup(self) -> Communicator:
        """The same ranks, with messages of their own."""
        return self._derived(self.mpi.Dup())

    def Split(self, color: int = 0, key: int = 0) -> Communicator | None:
        """Ranks with the same ``color`` form a communicator, ordered by ``key``; none for ``MPI_UNDEFINED``."""
        mpi = self.mpi.Split(color, key)
        return None if mpi == MPI.COMM_NULL else self._derived(mpi)

    def Cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> CartCommunicator | None:
        """The ranks on a grid of ``dims``; periodic along the axes where ``periods`` is true."""
        mpi: MPI.Comm = self.mpi.Create_cart(list(dims), periods or [False] * len(dims), reorder)
        if mpi == MPI.COMM_NULL:
            return None
        cart = CartCommunicator(mpi)
        return cart.replace(self.convention)  # type: ignore[return-value]

    def _derived(self, mpi: MPI.Comm) -> Communicator:
        return Communicator(mpi).replace(self.convention)

    def from_the_end(self) -> Communicator:
        """The backward communicator with its ranks in reverse order; made at first use, by all ranks."""
        if self._ended is None:
            ended = self._copy()
            split = self.mpi.Split(0, -self.rank)
            assert isinstance(split, MPI.Intracomm)
            ended.mpi = split
            ended.rank = self.size - 1 - self.rank
            ended.reverse, ended._ended = ended, self
            self._ended = ended
        return self._ended

    def check_rank(self, rank: int) -> int:
        """Raises :class:`ArgumentError` if there is no such rank."""
        if not 0 <= rank < self.size:
            raise ArgumentError(f"rank {rank} of {self.name}, which has ranks 0 to {self.size - 1}")
        return rank

    def check_peer(self, rank: int) -> int:
        """As :meth:`check_rank`; ``MPI_ANY_SOURCE`` and ``MPI_PROC_NULL`` are peers too."""
        return rank if rank in (MPI.ANY_SOURCE, MPI.PROC_NULL) else self.check_rank(rank)

    # Collectives

    def Barrier(self) -> None:
        """Returns when all ranks have called it. Not recorded."""
        _wait.barrier(self)

    def Allreduce(self, tensor: Tensor, op: Op) -> Tensor | Located:
        """The reduction of all ranks' tensors, on every rank."""
        if op is Op.MAXLOC or op is Op.MINLOC:
            return allreduce_located(self, tensor, op)
        return allreduce(self, tensor, op)

    def Bcast_(self, tensor: Tensor, root: int) -> Tensor:
        return bcast_(self, tensor, root)

    def Reduce_(self, tensor: Tensor, op: Op, root: int) -> Tensor:
        return reduce_(self, tensor, op, root)

    def Gather(self, tensor: Tensor, gatheraxis: int, root: int) -> Tensor:
        return gather(self, tensor, gatheraxis, root)

    def Allgather(self, tensor: Tensor, gatheraxis: int) -> Tensor:
        return allgather(self, tensor, gatheraxis)

    def Scatter(self, tensor: Tensor, scatteraxis: int, numelem: int, root: int) -> Tensor:
        return scatter(self, tensor, scatteraxis, numelem, root)

    def Alltoall(self, tensor: Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> Tensor:
        return alltoall(self, tensor, gatheraxis, scatteraxis, numelem)

    def Reduce_scatter(self, tensor: Tensor, op: Op, scatteraxis: int, numelem: int) -> Tensor:
        return reduce_scatter(self, tensor, op, scatteraxis, numelem)

    def Scan(self, tensor: Tensor, op: Op) -> Tensor:
        return scan(self, tensor, op)

    def Exscan(self, tensor: Tensor, op: Op) -> Tensor:
        return exscan(self, tensor, op)

    # Between two ranks

    def Send(self, tensor: Tensor, dest: int, tag: int = 0) -> Tensor:
        return point_to_point.send(self, tensor, dest, tag)

    def Recv(self, tensor: Tensor, source: int, tag: int = 0) -> Tensor:
        return point_to_point.recv(self, tensor, source, tag)

    def Isend(self, tensor: Tensor, dest: int, tag: int = 0) -> WaitHandle:
        return point_to_point.isend(self, tensor, dest, tag)

    def Irecv(self, tensor: Tensor, source: int, tag: int = 0) -> WaitHandle:
        return point_to_point.irecv(self, tensor, source, tag)

    def Wait(self, handle: WaitHandle) -> Tensor:
        return point_to_point.wait(handle)


class CartCommunicator(Communicator):
    """Ranks on a grid."""


def from_mpi4py(comm: MPI.Intracomm) -> Communicator:
    """mpi4py's communicator, made differentiable. Collective over its ranks."""
    return Communicator(comm)


WORLD_NAME = "COMM_WORLD"
COMM_WORLD = Communicator(MPI.COMM_WORLD, WORLD_NAME)


def _world() -> Communicator:
    return COMM_WORLD
