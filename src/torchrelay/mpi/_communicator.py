"""Communicators, with MPI's functions under MPI's names.

A communicator is MPI's or that of a c10d process group. It has two duplicates: one for the
communication of backward passes, and one over which waiting ranks report their state.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from torchrelay.errors import ArgumentError, UnavailableError
from torchrelay.mpi import _compiled, _headers, _wait
from torchrelay.mpi._allgather import allgather
from torchrelay.mpi._allreduce import allreduce, allreduce_located
from torchrelay.mpi._alltoall import alltoall
from torchrelay.mpi._alltoallv import alltoallv
from torchrelay.mpi._bcast import bcast_
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._gather import gather
from torchrelay.mpi._halo import Neighbors
from torchrelay.mpi._layout import equal_part
from torchrelay.mpi._lease import Lease
from torchrelay.mpi._library import MPI, load
from torchrelay.mpi._nonblocking import CollectiveHandle
from torchrelay.mpi._point_to_point import Messages, WaitHandle
from torchrelay.mpi._reduce import reduce_
from torchrelay.mpi._reduce_scatter import reduce_scatter
from torchrelay.mpi._replicate import replicate
from torchrelay.mpi._scan import exscan, scan
from torchrelay.mpi._scatter import scatter
from torchrelay.mpi._settings import settings
from torchrelay.mpi._starting import NonBlocking
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED, Transport

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["WORLD_NAME", "CartCommunicator", "Communicator", "from_mpi4py", "world"]

_C = TypeVar("_C", bound="Communicator")
_names = itertools.count()
WORLD_NAME = "COMM_WORLD"


class Communicator(NonBlocking, Messages):
    """A group of ranks with MPI's functions for tensors.

    Created by :meth:`from_group`, :func:`from_mpi4py`, :meth:`Split`, :meth:`Dup` and :meth:`Cart`.
    A context manager that frees it. Unless stated otherwise, functions are recorded in grad mode,
    take tensors of any strides on any device, and accept integers, bool, float16, bfloat16,
    float32, float64, complex64 and complex128. Negative axes count from the end.

    Attributes:
        rank: this process's rank.
        size: the number of ranks.
        name: identifies the communicator in errors.
        convention: ``"sum"`` or ``"replicated"``: which loss a gradient belongs to.

    Raises:
        ArgumentError: from every function, for invalid ranks, axes, dtypes or operations.
        MismatchError: from collectives, if the ranks make different calls.
        OperationTimeoutError: from blocking functions, after ``TORCHRELAY_MPI_TIMEOUT_S``.
        PeerLostError: from every function, if another rank failed or ended.
    """

    transport: Transport
    lease: Lease
    rank: int
    size: int
    name: str
    convention: str
    number: int
    is_reverse: bool

    def __init__(
        self, transport: Transport, name: str | None = None, parent: Lease | None = None
    ) -> None:
        """Use ``transport``; collective over its ranks. A child is freed with its ``parent``."""
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.name = name or f"communicator {next(_names)}"
        self.convention = settings.convention
        self.unreachable_policy: str | None = None  # None: as the setting
        self.is_reverse = False
        self.lease = Lease(transport, parent)
        self._reverse: Communicator | None = None
        reverse = self._copy()
        reverse.transport = self.lease.own(transport.duplicate())
        reverse.name = f"{self.name} (backward)"
        reverse.is_reverse = True
        self._reverse = reverse
        self.number = _compiled.register(self)
        reverse.number = self.number

    @classmethod
    def from_group(cls, group: ProcessGroup | DeviceMesh) -> Communicator:
        """Return the communicator of a c10d process group. Collective over its ranks.

        Its messages are separate from the group's own. It moves tensors of this host with a
        duplicate of the group's backend for them (``sml`` or Gloo; Gloo, if it has none), CUDA
        tensors with one of NCCL, where the group has it, and messages between two ranks over the
        network of ``TORCHRELAY_TRANSPORT_*``.

        Args:
            group: also a mesh of one dimension.

        Raises:
            ArgumentError: this process is not in the group.
            OperationTimeoutError: a rank did not call it within ``TORCHRELAY_MPI_TIMEOUT_S``.
        """
        from torchrelay.mpi._c10d import group_transport  # noqa: PLC0415 - as in world()

        return cls(group_transport(group))

    @property
    def reverse(self) -> Communicator:
        """The communicator of backward passes; for that one, itself."""
        return self if self._reverse is None else self._reverse

    def _copy(self: _C) -> _C:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __repr__(self) -> str:
        return f"<{self.name}: rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        if self.name == WORLD_NAME:
            return world, ()
        raise ArgumentError(
            f"{self.name} cannot be pickled; only COMM_WORLD means the same in another process"
        )

    # Communicators

    def replace(
        self, convention: str | None = None, unreachable_policy: str | None = None
    ) -> Communicator:
        """Return this communicator with other settings. Not collective.

        Args:
            convention: ``"sum"`` or ``"replicated"``.
            unreachable_policy: ``"raise"``, ``"warn"`` or ``"ignore"``, instead of
                ``TORCHRELAY_MPI_UNREACHABLE_POLICY``.

        Raises:
            ArgumentError: a value is not one of these.
        """
        convention = convention or self.convention
        policy = unreachable_policy or self.unreachable_policy
        if (convention, policy) == (self.convention, self.unreachable_policy):
            return self
        if convention not in ("sum", "replicated"):
            raise ArgumentError(f"convention={convention!r}: it must be 'sum' or 'replicated'")
        if policy not in (None, "raise", "warn", "ignore"):
            raise ArgumentError(
                f"unreachable_policy={policy!r}: it must be 'raise', 'warn' or 'ignore'"
            )
        other = self._copy()
        other.convention, other.unreachable_policy = convention, policy
        if self._reverse is not None:
            other._reverse = self._reverse._copy()
            other._reverse.convention, other._reverse.unreachable_policy = convention, policy
        if not self.is_reverse:
            _compiled.join(other)
        return other

    def Dup(self) -> Communicator:
        """Return a communicator of the same ranks whose messages are separate. Collective."""
        self._agree("Dup")
        return self._derived(self.transport.duplicate())

    def Split(self, color: int = 0, key: int = 0) -> Communicator | None:
        """Return the communicator of all ranks with the same ``color``. Collective.

        Its ranks are ordered by ``key``. None for ``MPI_UNDEFINED``.
        """
        transport = self._split(self._agree("Split"), color, key)
        return None if transport is None else self._derived(transport)

    def Cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> CartCommunicator | None:
        """Arrange the ranks in a grid. Collective.

        Args:
            dims: the extents of the grid.
            periods: which dimensions are periodic; default: none.
            reorder: accepted as by MPI; the ranks keep their order.

        Returns:
            None on ranks that the grid leaves out.
        """
        dims, periods = list(dims), list(periods or [False] * len(dims))
        if len(periods) != len(dims) or min(dims, default=1) < 1 or math.prod(dims) > self.size:
            raise ArgumentError(
                f"Cart: {self.name} of {self.size} ranks cannot form a grid of {dims} with periods "
                f"{periods}"
            )
        call = self._agree("Cart", f"dims={dims}, periods={periods}")
        transport = self._split(call, 0 if self.rank < math.prod(dims) else UNDEFINED, self.rank)
        if transport is None:
            return None
        cart = CartCommunicator(transport, dims, periods, self.lease)
        return cart.replace(self.convention, self.unreachable_policy)  # type: ignore[return-value]

    def _agree(self, name: str, arguments: str = "") -> _wait.Waiting:
        """Wait for all ranks in the creation of a communicator; return what to wait in."""
        _wait.check_usable(self)
        call = _wait.Named(self, f"{name}({arguments})")
        _headers.agree(call, name, arguments)
        self.lease.collect(call)
        return call

    def _split(self, call: _wait.Waiting, color: int, key: int) -> Transport | None:
        transport: Transport | None = self.transport.split(
            color, key, lambda request: _wait.finish(request, call)
        )
        if transport is None:
            self.lease.no_child()
        return transport

    def _derived(self, transport: Transport) -> Communicator:
        child = Communicator(transport, parent=self.lease)
        return child.replace(self.convention, self.unreachable_policy)

    def Free(self) -> None:
        """Release the communicator, which MPI has few of. Collective.

        Neither it nor its copies (:meth:`replace`) can be used afterwards. A communicator that no
        rank can reach any more is freed when another one is created from the same parent.

        Raises:
            ArgumentError: it is ``COMM_WORLD``.
        """
        if self.name == WORLD_NAME:
            raise ArgumentError(f"{self.name} cannot be freed")
        if not self.lease.is_freed:
            _wait.check_usable(self)
            _headers.agree(_wait.Named(self, "Free()"), "Free")
            self.lease.free()

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Free it, unless the block raised: other ranks may not leave theirs then."""
        if kind is None:
            self.Free()

    def check_rank(self, rank: int) -> int:
        """Raise :class:`ArgumentError` if there is no such rank."""
        if not 0 <= rank < self.size:
            raise ArgumentError(f"rank {rank} of {self.name}, which has ranks 0 to {self.size - 1}")
        return rank

    def check_dest(self, rank: int, tag: int) -> tuple[int, int]:
        """Raise :class:`ArgumentError` if ``dest`` is neither a rank nor ``MPI_PROC_NULL``."""
        if rank != PROC_NULL:
            self.check_rank(rank)
        if not 0 <= tag <= self.transport.max_tag:
            raise ArgumentError(
                f"tag {tag}: a message has a tag from 0 to {self.transport.max_tag}"
            )
        return rank, tag

    def check_source(self, rank: int, tag: int) -> tuple[int, int]:
        """Raise :class:`ArgumentError` if ``source`` is no rank, wildcard or ``MPI_PROC_NULL``."""
        if rank != ANY_SOURCE:
            self.check_dest(rank, 0)
        if tag != ANY_TAG:
            self.check_dest(PROC_NULL, tag)
        return rank, tag

    # Collectives

    def Barrier(self) -> None:
        """Wait until all ranks have called it. Not recorded."""
        _headers.barrier(self)

    def Allreduce(self, tensor: Tensor, op: Op) -> Any:
        """Reduce the tensors of all ranks, with the result on every rank. Collective and blocking.

        Args:
            tensor: of equal shape and dtype on all ranks.
            op: the reduction.

        Returns:
            A tensor like ``tensor``; for MAXLOC and MINLOC a :class:`Located`.
        """
        if op is Op.MAXLOC or op is Op.MINLOC:
            return allreduce_located(self, tensor, op)
        return allreduce(self, tensor, op)

    def Bcast_(self, tensor: Tensor, root: int) -> Tensor:
        """Overwrite ``tensor`` with root's values. Collective and blocking.

        Args:
            tensor: of equal shape and dtype on all ranks.
            root: the rank whose values all get.

        Returns:
            ``tensor``; a new tensor if it is a leaf that requires grad.
        """
        return bcast_(self, tensor, root)

    def Reduce_(self, tensor: Tensor, op: Op, root: int) -> Tensor:
        """Overwrite ``tensor`` with the reduction on root, with zeros elsewhere.

        Collective and blocking.

        Args:
            tensor: of equal shape and dtype on all ranks.
            op: the reduction.
            root: the rank that gets the result.

        Returns:
            ``tensor``; a new tensor if it is a leaf that requires grad.
        """
        return reduce_(self, tensor, op, root)

    def Gather(self, tensor: Tensor, gatheraxis: int, root: int) -> Tensor:
        """Concatenate the tensors of all ranks on root. Collective and blocking.

        Args:
            tensor: shapes may differ between ranks along ``gatheraxis``.
            gatheraxis: the axis of concatenation.
            root: the rank that gets the result.

        Returns:
            The concatenation on root; an empty tensor on other ranks.
        """
        return gather(self, tensor, gatheraxis, root)

    def Allgather(self, tensor: Tensor, gatheraxis: int) -> Tensor:
        """Concatenate the tensors of all ranks on every rank. Collective and blocking.

        Shapes may differ between ranks along ``gatheraxis``.
        """
        return allgather(self, tensor, gatheraxis)

    def Scatter(self, tensor: Tensor, scatteraxis: int, numelem: int, root: int) -> Tensor:
        """Return this rank's part of root's tensor. Collective and blocking.

        Args:
            tensor: read on root only.
            scatteraxis: the axis along which it is cut.
            numelem: the length of this rank's part; the sum over all ranks is the length of root's.
            root: the rank whose tensor is cut.
        """
        return scatter(self, tensor, scatteraxis, numelem, root)

    def Alltoall(self, tensor: Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> Tensor:
        """Gather along one axis and scatter along another. Collective and blocking.

        Args:
            tensor: shapes may differ between ranks along ``gatheraxis``.
            gatheraxis: the axis of concatenation.
            scatteraxis: the axis along which the concatenation is cut; if equal, parts move between
                ranks.
            numelem: the length of this rank's part along ``scatteraxis``.
        """
        return alltoall(self, tensor, gatheraxis, scatteraxis, numelem)

    def Reduce_scatter(self, tensor: Tensor, op: Op, scatteraxis: int, numelem: int) -> Tensor:
        """Reduce the tensors of all ranks and return one part. Collective and blocking.

        Args:
            tensor: of equal shape and dtype on all ranks.
            op: the reduction.
            scatteraxis: the axis along which the reduction is cut.
            numelem: the length of this rank's part.
        """
        return reduce_scatter(self, tensor, op, scatteraxis, numelem)

    def Reduce_scatter_block(self, tensor: Tensor, op: Op, scatteraxis: int = 0) -> Tensor:
        """Call :meth:`Reduce_scatter` with equal parts."""
        return reduce_scatter(
            self, tensor, op, scatteraxis, equal_part(tensor, scatteraxis, self.size)
        )

    def Scan(self, tensor: Tensor, op: Op) -> Tensor:
        """Reduce the tensors of ranks 0 to this one, inclusive. Collective and blocking."""
        return scan(self, tensor, op)

    def Exscan(self, tensor: Tensor, op: Op) -> Tensor:
        """Reduce the tensors of all ranks before this one; zeros on rank 0.

        Collective and blocking.
        """
        return exscan(self, tensor, op)

    def Replicate(self, tensor: Tensor) -> Tensor:
        """Mark ``tensor``, equal on all ranks, as used differently by each rank from here on.

        Communicates in the backward pass only, under the convention ``"replicated"``: its
        derivative is Allreduce.
        """
        return replicate(self, tensor)

    # Collectives with counts

    def Gatherv(self, tensor: Tensor, root: int, axis: int = 0) -> Tensor:
        """Call :meth:`Gather`, which supports different lengths."""
        return gather(self, tensor, axis, root)

    def Allgatherv(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Call :meth:`Allgather`, which supports different lengths."""
        return allgather(self, tensor, axis)

    def Scatterv(self, tensor: Tensor, counts: Sequence[int], root: int, axis: int = 0) -> Tensor:
        """Return this rank's ``counts[rank]`` along ``axis`` of root's tensor.

        Collective and blocking. All ranks pass equal ``counts``.
        """
        if len(counts) != self.size:
            raise ArgumentError(
                f"Scatterv: {self.size} ranks need as many counts, not {list(counts)}"
            )
        return scatter(self, tensor, axis, counts[self.rank], root)

    def Alltoallv(self, tensor: Tensor, sendcounts: Sequence[int], axis: int = 0) -> Tensor:
        """Send ``sendcounts[r]`` along ``axis`` to each rank r. Collective and blocking.

        Returns:
            The received parts, concatenated in the order of ranks.
        """
        return alltoallv(self, tensor, sendcounts, axis)

    def Wait(self, handle: WaitHandle | CollectiveHandle) -> Tensor:
        """Complete a started communication and return its result. Blocks."""
        return handle.Wait()


class CartCommunicator(Communicator, Neighbors):
    """A communicator whose ranks form a grid.

    Attributes:
        dims: the extents of the grid.
        periods: which dimensions are periodic.
        coords: this rank's position.
        neighbors: for each dimension the lower and the upper neighbour; ``MPI_PROC_NULL`` at a
            border.
    """

    def __init__(
        self, transport: Transport, dims: list[int], periods: list[bool], parent: Lease
    ) -> None:
        super().__init__(transport, parent=parent)
        self.dims, self.periods, self.coords = dims, periods, self._coords(dims)
        self.neighbors = [(self._at(d, -1), self._at(d, 1)) for d in range(len(dims))]
        self.faces = self.lease.own(transport.duplicate())
        self.reverse.__dict__.update(
            dims=dims,
            periods=periods,
            coords=self.coords,
            neighbors=self.neighbors,
            faces=self.lease.own(transport.duplicate()),
        )

    def _coords(self, dims: list[int]) -> list[int]:
        """Return this rank's position; ranks are in row-major order."""
        coords: list[int] = []
        rest = self.rank
        for extent in reversed(dims):
            rest, coord = divmod(rest, extent)
            coords.insert(0, coord)
        return coords

    def _at(self, dim: int, step: int) -> int:
        """Return the rank ``step`` away along ``dim``; PROC_NULL beyond a border."""
        extent, coord = self.dims[dim], self.coords[dim] + step
        if not (self.periods[dim] or 0 <= coord < extent):
            return PROC_NULL
        return self.rank + (coord % extent - self.coords[dim]) * math.prod(self.dims[dim + 1 :])


def from_mpi4py(comm: Intracomm) -> Communicator:
    """Return a differentiable communicator over mpi4py's. Collective over its ranks.

    Raises:
        ArgumentError: it is not an intra-communicator.
        UnavailableError: mpi4py was imported after torchrelay.mpi, and names wildcards otherwise.
    """
    found = load()
    if (found.ANY_SOURCE, found.PROC_NULL) != (ANY_SOURCE, PROC_NULL):
        raise UnavailableError("import mpi4py.MPI before torchrelay.mpi, for the same constants")
    from torchrelay.mpi._mpi4py import MpiTransport  # noqa: PLC0415 - initialises MPI

    return Communicator(MpiTransport(comm))


@functools.cache
def world() -> Communicator:
    """Return the communicator of all processes that the launcher started. Collective at first.

    It is MPI's under mpirun, that of the default process group under torchrun, Slurm or Ray, which
    is made with ``sml`` if there is none, and of this process alone without a launcher.
    """
    if MPI is not None:
        from torchrelay.mpi._mpi4py import MpiTransport  # noqa: PLC0415 - initialises MPI

        return Communicator(MpiTransport(MPI.COMM_WORLD), WORLD_NAME)
    from torchrelay.mpi._c10d import world_transport  # noqa: PLC0415 - imports torch.distributed

    return Communicator(world_transport(), WORLD_NAME)
