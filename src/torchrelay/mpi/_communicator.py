"""Communicators: the face of MPI, with MPI's own names.

Every communicator has two duplicates: backward passes communicate over the first, apart from the user's
messages; ranks that wait for each other talk over the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi import _compiled, _persistent, _point_to_point, _starting, _wait
from torchrelay.mpi._allgather import allgather
from torchrelay.mpi._allreduce import allreduce, allreduce_located
from torchrelay.mpi._alltoall import alltoall
from torchrelay.mpi._alltoallv import alltoallv
from torchrelay.mpi._bcast import bcast_
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._gather import gather
from torchrelay.mpi._halo import halo_exchange, neighbor_alltoall
from torchrelay.mpi._history import History
from torchrelay.mpi._layout import equal_part
from torchrelay.mpi._lease import Lease
from torchrelay.mpi._library import MPI
from torchrelay.mpi._meeting import meet
from torchrelay.mpi._nonblocking import CollectiveHandle
from torchrelay.mpi._persistent import PersistentCollective, PersistentRecv, PersistentSend
from torchrelay.mpi._point_to_point import WaitHandle
from torchrelay.mpi._reduce import reduce_
from torchrelay.mpi._reduce_scatter import reduce_scatter
from torchrelay.mpi._replicate import replicate
from torchrelay.mpi._scan import exscan, scan
from torchrelay.mpi._scatter import scatter
from torchrelay.mpi._settings import settings

__all__ = ["CartCommunicator", "Communicator", "from_mpi4py"]

_C = TypeVar("_C", bound="Communicator")
_names = itertools.count()
MAX_TAG: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]


class Communicator:
    """Ranks that communicate with each other. Made by :func:`from_mpi4py`, :meth:`Split`, :meth:`Dup`, :meth:`Cart`."""

    mpi: MPI.Intracomm
    meeting: MPI.Intracomm
    lease: Lease
    history: History
    rank: int
    size: int
    name: str
    convention: str
    number: int
    is_reverse: bool

    def __init__(self, mpi: MPI.Comm, name: str | None = None, parent: Lease | None = None) -> None:
        """Collective over ``mpi``'s ranks. What has a parent is freed with all that belongs to it."""
        if not isinstance(mpi, MPI.Intracomm):
            raise ArgumentError(f"{mpi!r} is not an intra-communicator")
        self.mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.name = name or f"communicator {next(_names)}"
        self.convention = settings.convention
        self.unreached: str | None = None  # the setting's value
        self.is_reverse = False
        self.lease = Lease(mpi, parent)
        self.meeting = self.lease.control
        self.history = self.lease.histories[0]
        self._reverse: Communicator | None = None
        reverse = self._copy()
        reverse.mpi = reverse.meeting = self.lease.own(mpi.Dup())
        reverse.name = f"{self.name} (backward)"
        reverse.is_reverse = True
        reverse.history = self.lease.histories[1]
        self._reverse = reverse
        self.number = _compiled.register(self)
        reverse.number = self.number

    @property
    def reverse(self) -> Communicator:
        """The communicator for backward passes; its own is itself."""
        return self if self._reverse is None else self._reverse

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

    def replace(self, convention: str | None = None, unreached: str | None = None) -> Communicator:
        """The same communicator with another gradient convention, ``"sum"`` or ``"replicated"``.

        ``unreached`` (``"raise"``, ``"warn"``, ``"ignore"``) replaces the setting of that name.
        """
        convention, unreached = convention or self.convention, unreached or self.unreached
        if (convention, unreached) == (self.convention, self.unreached):
            return self
        if convention not in ("sum", "replicated") or unreached not in (None, "raise", "warn", "ignore"):
            raise ArgumentError(f"no such convention or choice: {convention!r}, {unreached!r}")
        other = self._copy()
        other.convention, other.unreached = convention, unreached
        if self._reverse is not None:
            other._reverse = self._reverse._copy()
            other._reverse.convention, other._reverse.unreached = convention, unreached
        if not self.is_reverse:
            _compiled.join(other)
        return other

    def Dup(self) -> Communicator:
        """The same ranks, with messages of their own."""
        return self._derived(self._make("Dup()", self.mpi.Dup))

    def Split(self, color: int = 0, key: int = 0) -> Communicator | None:
        """Ranks with the same ``color`` form a communicator, ordered by ``key``; none for ``MPI_UNDEFINED``."""
        mpi = self._make("Split()", lambda: self.mpi.Split(color, key))
        return None if mpi is None else self._derived(mpi)

    def Cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> CartCommunicator | None:
        """The ranks on a grid of ``dims``; periodic along the axes where ``periods`` is true."""
        dims, periods = list(dims), list(periods or [False] * len(dims))
        mpi = self._make(
            f"Cart(dims={dims}, periods={periods})",
            lambda: self.mpi.Create_cart(dims, periods, reorder),
        )
        if mpi is None:
            return None
        cart = CartCommunicator(mpi, parent=self.lease)
        return cart.replace(self.convention, self.unreached)  # type: ignore[return-value]

    def _make(self, name: str, make: Callable[[], MPI.Comm]) -> MPI.Comm | None:
        """A new communicator of MPI, made by all ranks; None for a rank that is no part of it."""
        _wait.check_usable()
        call = _wait.Named(self, name)
        meet(call, name)
        self.lease.collect(call)
        mpi = make()
        if mpi != MPI.COMM_NULL:
            return mpi
        self.lease.no_child()
        return None

    def _derived(self, mpi: MPI.Comm | None) -> Communicator:
        assert mpi is not None
        return Communicator(mpi, parent=self.lease).replace(self.convention, self.unreached)

    def Free(self) -> None:
        """Gives it back to MPI. Collective; neither it nor its copies (:meth:`replace`) can be used any more.

        One that no rank can reach any more is freed when another is made of the one it was made of.
        """
        if self.name == WORLD_NAME:
            raise ArgumentError(f"{self.name} cannot be freed")
        if self.mpi != MPI.COMM_NULL:
            meet(_wait.Named(self, "Free()"), "Free()")
            self.lease.free()
            self.mpi = MPI.Intracomm()

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Frees it, unless the block raised: other ranks may not get here then."""
        if kind is None:
            self.Free()

    def descending(self) -> MPI.Intracomm:
        """MPI's communicator with the ranks in reverse order; made at first use, by all ranks."""
        if self.lease.descending is None:
            meet(_wait.Named(self, "Scan()"), "the first derivative of a scan")
            split = self.mpi.Split(0, -self.rank)
            assert isinstance(split, MPI.Intracomm)
            self.lease.descending = self.lease.own(split)
        return self.lease.descending

    def check_rank(self, rank: int) -> int:
        """Raises :class:`ArgumentError` if there is no such rank."""
        if not 0 <= rank < self.size:
            raise ArgumentError(f"rank {rank} of {self.name}, which has ranks 0 to {self.size - 1}")
        return rank

    def check_dest(self, rank: int, tag: int) -> tuple[int, int]:
        """Raises :class:`ArgumentError` if nothing can be sent there; ``MPI_PROC_NULL`` is a destination too."""
        if rank != MPI.PROC_NULL:
            self.check_rank(rank)
        if not 0 <= tag <= MAX_TAG:
            raise ArgumentError(f"tag {tag}: a message has a tag from 0 to {MAX_TAG}")
        return rank, tag

    def check_source(self, rank: int, tag: int) -> tuple[int, int]:
        """Raises :class:`ArgumentError` if nothing can come from there; wildcards and ``MPI_PROC_NULL`` are fine."""
        if rank != MPI.ANY_SOURCE:
            self.check_dest(rank, 0)
        if tag != MPI.ANY_TAG:
            self.check_dest(MPI.PROC_NULL, tag)
        return rank, tag

    # Collectives. Tensors may have any layout, and axes may be negative.

    def Barrier(self) -> None:
        """Returns when all ranks have called it. Not recorded."""
        _wait.barrier(self)

    def Allreduce(self, tensor: Tensor, op: Op) -> Any:
        """The reduction of all ranks' tensors, on every rank; for MAXLOC and MINLOC a :class:`Located`."""
        if op is Op.MAXLOC or op is Op.MINLOC:
            return allreduce_located(self, tensor, op)
        return allreduce(self, tensor, op)

    def Bcast_(self, tensor: Tensor, root: int) -> Tensor:
        """``tensor`` with root's values, in place."""
        return bcast_(self, tensor, root)

    def Reduce_(self, tensor: Tensor, op: Op, root: int) -> Tensor:
        """``tensor`` with the reduction on root and zeros on the others, in place."""
        return reduce_(self, tensor, op, root)

    def Gather(self, tensor: Tensor, gatheraxis: int, root: int) -> Tensor:
        """All ranks' tensors along ``gatheraxis``, on root; an empty tensor on the others."""
        return gather(self, tensor, gatheraxis, root)

    def Allgather(self, tensor: Tensor, gatheraxis: int) -> Tensor:
        """All ranks' tensors along ``gatheraxis``, on every rank."""
        return allgather(self, tensor, gatheraxis)

    def Scatter(self, tensor: Tensor, scatteraxis: int, numelem: int, root: int) -> Tensor:
        """This rank's ``numelem`` along ``scatteraxis`` of root's tensor."""
        return scatter(self, tensor, scatteraxis, numelem, root)

    def Alltoall(self, tensor: Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> Tensor:
        """All ranks' tensors along ``gatheraxis``, this rank's ``numelem`` of it along ``scatteraxis``."""
        return alltoall(self, tensor, gatheraxis, scatteraxis, numelem)

    def Reduce_scatter(self, tensor: Tensor, op: Op, scatteraxis: int, numelem: int) -> Tensor:
        """This rank's ``numelem`` along ``scatteraxis`` of the reduction of all ranks' tensors."""
        return reduce_scatter(self, tensor, op, scatteraxis, numelem)

    def Reduce_scatter_block(self, tensor: Tensor, op: Op, scatteraxis: int = 0) -> Tensor:
        """As :meth:`Reduce_scatter`, in equal parts."""
        return reduce_scatter(self, tensor, op, scatteraxis, equal_part(tensor, scatteraxis, self.size))

    def Scan(self, tensor: Tensor, op: Op) -> Tensor:
        """The reduction of the tensors of ranks 0 to this one."""
        return scan(self, tensor, op)

    def Exscan(self, tensor: Tensor, op: Op) -> Tensor:
        """The reduction of the tensors of all ranks before this one; zeros on rank 0."""
        return exscan(self, tensor, op)

    def Replicate(self, tensor: Tensor) -> Tensor:
        """A tensor that all ranks hold alike, from here on used by each in its own way."""
        return replicate(self, tensor)

    # Collectives with counts

    def Gatherv(self, tensor: Tensor, root: int, axis: int = 0) -> Tensor:
        """:meth:`Gather`, whose lengths may differ anyway."""
        return gather(self, tensor, axis, root)

    def Allgatherv(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """:meth:`Allgather`, whose lengths may differ anyway."""
        return allgather(self, tensor, axis)

    def Scatterv(self, tensor: Tensor, counts: Sequence[int], root: int, axis: int = 0) -> Tensor:
        """``counts[r]`` along ``axis`` of root's tensor go to rank r; all ranks give the same counts."""
        if len(counts) != self.size:
            raise ArgumentError(f"Scatterv: {self.size} ranks need as many counts, not {list(counts)}")
        return scatter(self, tensor, axis, counts[self.rank], root)

    def Alltoallv(self, tensor: Tensor, sendcounts: Sequence[int], axis: int = 0) -> Tensor:
        """``sendcounts[r]`` along ``axis`` go to rank r; what comes is joined in the order of ranks."""
        return alltoallv(self, tensor, sendcounts, axis)

    # Collectives in two steps: change nothing until Wait. All ranks give tensors of one shape, or the same counts

    def Iallreduce(self, tensor: Tensor, op: Op) -> CollectiveHandle:
        """Starts :meth:`Allreduce`."""
        return _starting.iallreduce(self, tensor, op)

    def Ibcast(self, tensor: Tensor, root: int) -> CollectiveHandle:
        """Starts to give every rank root's tensor, in new memory."""
        return _starting.ibcast(self, tensor, root)

    def Ireduce(self, tensor: Tensor, op: Op, root: int) -> CollectiveHandle:
        """Starts a reduction to root, in new memory."""
        return _starting.ireduce(self, tensor, op, root)

    def Iscan(self, tensor: Tensor, op: Op) -> CollectiveHandle:
        """Starts :meth:`Scan`."""
        return _starting.iscan(self, tensor, op, False)

    def Iexscan(self, tensor: Tensor, op: Op) -> CollectiveHandle:
        """Starts :meth:`Exscan`."""
        return _starting.iscan(self, tensor, op, True)

    def Igather(self, tensor: Tensor, gatheraxis: int, root: int) -> CollectiveHandle:
        """Starts :meth:`Gather`."""
        return _starting.igather(self, tensor, None, gatheraxis, root)

    def Igatherv(self, tensor: Tensor, counts: Sequence[int], root: int, axis: int = 0) -> CollectiveHandle:
        """Starts :meth:`Gatherv`; rank r gives ``counts[r]``."""
        return _starting.igather(self, tensor, counts, axis, root)

    def Iallgather(self, tensor: Tensor, gatheraxis: int) -> CollectiveHandle:
        """Starts :meth:`Allgather`."""
        return _starting.iallgather(self, tensor, None, gatheraxis)

    def Iallgatherv(self, tensor: Tensor, counts: Sequence[int], axis: int = 0) -> CollectiveHandle:
        """Starts :meth:`Allgatherv`; rank r gives ``counts[r]``."""
        return _starting.iallgather(self, tensor, counts, axis)

    def Iscatter(self, tensor: Tensor, scatteraxis: int, root: int) -> CollectiveHandle:
        """Starts :meth:`Scatter`, in equal parts; all ranks give a tensor of the shape of root's."""
        return _starting.iscatter(self, tensor, None, scatteraxis, root)

    def Iscatterv(self, tensor: Tensor, counts: Sequence[int], root: int, axis: int = 0) -> CollectiveHandle:
        """Starts :meth:`Scatterv`; all ranks give a tensor of the shape of root's."""
        return _starting.iscatter(self, tensor, counts, axis, root)

    def Ialltoall(self, tensor: Tensor, gatheraxis: int, scatteraxis: int) -> CollectiveHandle:
        """Starts :meth:`Alltoall`, in equal parts."""
        return _starting.ialltoall(self, tensor, gatheraxis, scatteraxis)

    def Ialltoallv(
        self, tensor: Tensor, sendcounts: Sequence[int], recvcounts: Sequence[int], axis: int = 0
    ) -> CollectiveHandle:
        """Starts :meth:`Alltoallv`; ``recvcounts[r]`` come from rank r."""
        return _starting.ialltoallv(self, tensor, sendcounts, recvcounts, axis)

    def Ireduce_scatter(self, tensor: Tensor, op: Op, scatteraxis: int = 0) -> CollectiveHandle:
        """Starts :meth:`Reduce_scatter_block`."""
        return _starting.ireduce_scatter(self, tensor, op, None, scatteraxis)

    def Ireduce_scatterv(
        self, tensor: Tensor, op: Op, counts: Sequence[int], axis: int = 0
    ) -> CollectiveHandle:
        """Starts :meth:`Reduce_scatter`; rank r gets ``counts[r]``."""
        return _starting.ireduce_scatter(self, tensor, op, counts, axis)

    # Set up once, started again and again

    def Allreduce_init(self, tensor: Tensor, op: Op) -> PersistentCollective:
        """An :meth:`Allreduce` that ``Start`` repeats."""
        return _persistent.allreduce_init(self, tensor, op)

    def Reduce_init(self, tensor: Tensor, op: Op, root: int) -> PersistentCollective:
        """A reduction to root, in new memory, that ``Start`` repeats."""
        return _persistent.reduce_init(self, tensor, op, root)

    def Bcast_init(self, tensor: Tensor, root: int) -> PersistentCollective:
        """Root's tensor on every rank, in new memory; ``Start`` repeats it."""
        return _persistent.bcast_init(self, tensor, root)

    # Between two ranks

    def Send(self, tensor: Tensor, dest: int, tag: int = 0) -> Tensor:
        """Returns when ``tensor`` may be changed again; the 0-dim result depends on it."""
        return _point_to_point.send(self, tensor, dest, tag)

    def Recv(self, tensor: Tensor, source: int, tag: int = 0) -> Tensor:
        """``tensor`` with the values received, in place."""
        return _point_to_point.recv(self, tensor, source, tag)

    def Sendrecv(
        self,
        tensor: Tensor,
        dest: int,
        source: int,
        like: Tensor | None = None,
        sendtag: int = 0,
        recvtag: int = MPI.ANY_TAG,
    ) -> Tensor:
        """Sends ``tensor``, and returns what comes from ``source``, shaped as ``like`` (default: as ``tensor``)."""
        return _point_to_point.sendrecv(self, tensor, dest, sendtag, like, source, recvtag)

    def Isend(self, tensor: Tensor, dest: int, tag: int = 0) -> WaitHandle:
        """Starts :meth:`Send`."""
        return _point_to_point.isend(self, tensor, dest, tag)

    def Irecv(self, tensor: Tensor, source: int, tag: int = 0) -> WaitHandle:
        """Starts :meth:`Recv`."""
        return _point_to_point.irecv(self, tensor, source, tag)

    def Wait(self, handle: WaitHandle | CollectiveHandle) -> Tensor:
        """Ends what was started, and returns its result."""
        return handle.Wait()

    def Send_init(self, tensor: Tensor, dest: int, tag: int = 0) -> PersistentSend:
        """A message that ``Start`` sends again and again."""
        return PersistentSend(self, tensor, dest, tag)

    def Recv_init(self, tensor: Tensor, source: int, tag: int = 0) -> PersistentRecv:
        """A message that ``Start`` receives again and again."""
        return PersistentRecv(self, tensor, source, tag)


class CartCommunicator(Communicator):
    """Ranks on a grid: ``dims``, ``periods``, ``coords``, and ``neighbors[d]``, the lower and upper one along d."""

    mpi: MPI.Cartcomm

    def __init__(self, mpi: MPI.Comm, name: str | None = None, parent: Lease | None = None) -> None:
        super().__init__(mpi, name, parent)
        self.dims, self.periods, self.coords = self.mpi.Get_topo()
        self.neighbors = [self.mpi.Shift(d, 1) for d in range(len(self.dims))]
        self.faces = self.lease.own(self.mpi.Dup())
        self.reverse.__dict__.update(
            dims=self.dims,
            periods=self.periods,
            coords=self.coords,
            neighbors=self.neighbors,
            faces=self.lease.own(self.mpi.Dup()),
        )

    def Neighbor_alltoall(self, tensor: Tensor) -> Tensor:
        """``tensor[2 * d]`` and ``tensor[2 * d + 1]`` go to the lower and upper neighbour along d."""
        return neighbor_alltoall(self, tensor)

    def Halo_exchange(
        self,
        tensor: Tensor,
        width: int | Sequence[int | tuple[int, int]] = 1,
        axes: Sequence[int] | None = None,
    ) -> Tensor:
        """``tensor`` with a halo of the neighbours' values; see :func:`torchrelay.mpi._halo.halo_exchange`."""
        return halo_exchange(self, tensor, width, axes)


def from_mpi4py(comm: MPI.Intracomm) -> Communicator:
    """mpi4py's communicator, made differentiable. Collective over its ranks."""
    return Communicator(comm)


WORLD_NAME = "COMM_WORLD"
COMM_WORLD = Communicator(MPI.COMM_WORLD, WORLD_NAME)


def _world() -> Communicator:
    return COMM_WORLD
