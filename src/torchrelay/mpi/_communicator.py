"""Communicators, with MPI's functions under MPI's names."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchrelay._names import no_attribute
from torchrelay._platform import has_core, need_core
from torchrelay.errors import ArgumentError, UnavailableError
from torchrelay.mpi._collectives import (
    Allreduce,
    Bcast,
    Exscan,
    Replicate,
    Scan,
    allgather,
    allreduce,
    allreduce_located,
    alltoall,
    alltoallv,
    gather,
    reduce_,
    reduce_scatter,
    scan,
    scatter,
)
from torchrelay.mpi._comm import WORLD_NAME, collective, once
from torchrelay.mpi._dtypes import Op, check_integer, integers
from torchrelay.mpi._halo import Neighbors
from torchrelay.mpi._inplace import overwrite
from torchrelay.mpi._library import is_mpi_job, load
from torchrelay.mpi._memory import check_counts, equal_part
from torchrelay.mpi._nonblocking import NonBlocking
from torchrelay.mpi._point_to_point import Messages, WaitHandle
from torchrelay.mpi._record import record, run
from torchrelay.mpi._transport import ANY_SOURCE, PROC_NULL, UNDEFINED, Transport
from torchrelay.world import World

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CartCommunicator", "Communicator", "from_mpi4py", "world"]


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

    if not TYPE_CHECKING:  # mypy knows the attributes

        def __getattr__(self, name: str) -> Any:
            names = (*dir(type(self)), *vars(self))
            public = (one for one in names if not one.startswith("_"))
            raise no_attribute(type(self).__name__, name, public)

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
        from torchrelay.mpi.transports._group import group_transport  # noqa: PLC0415 - as in world()

        return cls(group_transport(group), is_owned=True)

    def __copy__(self) -> Communicator:
        return self  # what is copied with it communicates with the same ranks

    def __deepcopy__(self, memo: object) -> Communicator:
        return self

    @classmethod
    def _world(cls, convention: str, unreachable_policy: str | None) -> Communicator:
        return world().replace(convention, unreachable_policy)

    def __reduce__(self) -> Any:
        if self.name == WORLD_NAME:
            return self._world, (self.convention, self.unreachable_policy)
        raise ArgumentError(
            f"{self.name} cannot be pickled; only COMM_WORLD means the same in another process"
        )

    @once
    def Dup(self) -> Communicator:
        """Return a communicator of the same ranks whose messages are separate. Collective."""
        self._agree("Dup")
        return self._derived(self.transport.duplicate())

    @collective
    @once
    def Split(self, color: int = 0, key: int = 0) -> Communicator | None:
        """Return the communicator of all ranks with the same ``color``. Collective.

        Its ranks are ordered by ``key``. None for ``MPI_UNDEFINED``.
        """
        check_integer("color", color)
        check_integer("key", key)
        transport = self._split("Split", "", color, key)
        return None if transport is None else self._derived(transport)

    @collective
    @once
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
        dims = integers("dims", dims)
        periodic = [bool(each) for each in integers("periods", periods or [False] * len(dims))]
        if len(periodic) != len(dims) or min(dims, default=1) < 1 or math.prod(dims) > self.size:
            raise ArgumentError(
                f"Cart: {self.name} of {self.size} ranks cannot form a grid of {dims} with periods "
                f"{periodic}"
            )
        color = 0 if self.rank < math.prod(dims) else UNDEFINED
        transport = self._split("Cart", f"dims={dims}, periods={periodic}", color, self.rank)
        if transport is None:
            return None
        cart = CartCommunicator(transport, dims, periodic)
        return cart.replace(self.convention, self.unreachable_policy)

    def _split(self, name: str, arguments: str, color: int, key: int) -> Transport | None:
        given = self._agree(name, arguments, (color, key))
        members = sorted((k, rank) for rank, (c, k) in enumerate(given) if c == color)
        part: Transport | None = self.transport.split(color, [rank for _, rank in members])
        return part

    def _derived(self, transport: Transport) -> Communicator:
        child = Communicator(transport, is_owned=True)
        return child.replace(self.convention, self.unreachable_policy)

    # Collectives

    @once
    def Barrier(self) -> None:
        """Wait until all ranks have called it. Not recorded."""
        self._agree("Barrier")

    @collective
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
        if op is Op.SUM:
            return record(Allreduce(self, op), tensor)
        return run(allreduce(self, tensor, op))

    @collective
    def Bcast_(self, tensor: Tensor, root: int) -> Tensor:
        """Overwrite ``tensor`` with root's values. Collective and blocking.

        Args:
            tensor: of equal shape and dtype on all ranks.
            root: the rank whose values all get.

        Returns:
            ``tensor``; a new tensor if it is a leaf that requires grad.
        """
        return overwrite(Bcast(self, self.check_rank(root)), tensor)

    @collective
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

    @collective
    def Gather(self, tensor: Tensor, gatheraxis: int, root: int) -> Tensor:
        """Concatenate the tensors of all ranks on root. Collective and blocking.

        Args:
            tensor: shapes may differ between ranks along ``gatheraxis``.
            gatheraxis: the axis of concatenation.
            root: the rank that gets the result.

        Returns:
            The concatenation on root; an empty tensor on other ranks.
        """
        return run(gather(self, tensor, gatheraxis, root))

    @collective
    def Allgather(self, tensor: Tensor, gatheraxis: int) -> Tensor:
        """Concatenate the tensors of all ranks on every rank. Collective and blocking.

        Shapes may differ between ranks along ``gatheraxis``.
        """
        return run(allgather(self, tensor, gatheraxis))

    @collective
    def Scatter(self, tensor: Tensor, scatteraxis: int, numelem: int, root: int) -> Tensor:
        """Return this rank's part of root's tensor. Collective and blocking.

        Args:
            tensor: read on root only.
            scatteraxis: the axis along which it is cut.
            numelem: the length of this rank's part; the sum over all ranks is the length of root's.
            root: the rank whose tensor is cut.
        """
        return run(scatter(self, tensor, scatteraxis, numelem, root))

    @collective
    def Alltoall(self, tensor: Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> Tensor:
        """Gather along one axis and scatter along another. Collective and blocking.

        Args:
            tensor: shapes may differ between ranks along ``gatheraxis``.
            gatheraxis: the axis of concatenation.
            scatteraxis: the axis along which the concatenation is cut; if equal, parts move between
                ranks.
            numelem: the length of this rank's part along ``scatteraxis``.
        """
        return run(alltoall(self, tensor, gatheraxis, scatteraxis, numelem))

    @collective
    def Reduce_scatter(self, tensor: Tensor, op: Op, scatteraxis: int, numelem: int) -> Tensor:
        """Reduce the tensors of all ranks and return one part. Collective and blocking.

        Args:
            tensor: of equal shape and dtype on all ranks.
            op: the reduction.
            scatteraxis: the axis along which the reduction is cut.
            numelem: the length of this rank's part.
        """
        return run(reduce_scatter(self, tensor, op, scatteraxis, numelem))

    @collective
    def Reduce_scatter_block(self, tensor: Tensor, op: Op, scatteraxis: int = 0) -> Tensor:
        """Call :meth:`Reduce_scatter` with equal parts."""
        numelem = equal_part(tensor, scatteraxis, self.size)
        return self.Reduce_scatter(tensor, op, scatteraxis, numelem)

    @collective
    def Scan(self, tensor: Tensor, op: Op) -> Tensor:
        """Reduce the tensors of ranks 0 to this one, inclusive. Collective and blocking."""
        return run(scan(Scan, self, tensor, op))

    @collective
    def Exscan(self, tensor: Tensor, op: Op) -> Tensor:
        """Reduce the tensors of all ranks before this one; zeros on rank 0.

        Collective and blocking.
        """
        return run(scan(Exscan, self, tensor, op))

    def Replicate(self, tensor: Tensor) -> Tensor:
        """Mark ``tensor``, equal on all ranks, as used differently by each rank from here on.

        Communicates in the backward pass only, under the convention ``"replicated"``: its
        derivative is Allreduce.
        """
        return record(Replicate(self), tensor)

    # Collectives with counts

    def Gatherv(self, tensor: Tensor, root: int, axis: int = 0) -> Tensor:
        """Call :meth:`Gather`, which supports different lengths."""
        return self.Gather(tensor, axis, root)

    def Allgatherv(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Call :meth:`Allgather`, which supports different lengths."""
        return self.Allgather(tensor, axis)

    @collective
    def Scatterv(self, tensor: Tensor, counts: Sequence[int], root: int, axis: int = 0) -> Tensor:
        """Return this rank's ``counts[rank]`` along ``axis`` of root's tensor.

        Collective and blocking. All ranks pass equal ``counts``.
        """
        numelem = check_counts(counts, self.size)[self.rank]
        return self.Scatter(tensor, axis, numelem, root)

    @collective
    def Alltoallv(self, tensor: Tensor, sendcounts: Sequence[int], axis: int = 0) -> Tensor:
        """Send ``sendcounts[r]`` along ``axis`` to each rank r. Collective and blocking.

        Returns:
            The received parts, concatenated in the order of ranks.
        """
        return run(alltoallv(self, tensor, sendcounts, axis))

    def Wait(self, handle: WaitHandle) -> Tensor:
        """Complete a started communication and return its result. Blocks."""
        if not isinstance(handle, WaitHandle):
            raise ArgumentError(
                f"Wait takes what Isend, Irecv or Iallreduce returned, not {type(handle).__name__}"
            )
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


def from_mpi4py(comm: Intracomm) -> Communicator:
    """Return a differentiable communicator over mpi4py's. Collective over its ranks.

    Raises:
        ArgumentError: it is not an intra-communicator.
        UnavailableError: mpi4py was imported after torchrelay.mpi, and names wildcards otherwise.
    """
    found = load()
    if (found.ANY_SOURCE, found.PROC_NULL) != (ANY_SOURCE, PROC_NULL):
        raise UnavailableError("import mpi4py.MPI before torchrelay.mpi, for the same constants")
    from torchrelay.mpi.transports._mpi4py import MpiTransport  # noqa: PLC0415 - initialises MPI

    return Communicator(MpiTransport(comm))


@functools.cache
def world() -> Communicator:
    """Return the communicator of all processes that the launcher started. Collective at first.

    It is MPI's under mpirun, that of the default process group under torchrun, Slurm or Ray, which
    is made with ``sml`` if there is none, and of this process alone without a launcher. Without
    the native core it is always MPI's.

    Raises:
        UnavailableError: there is no MPI, which is needed.
        UnsupportedError: there are several processes, and neither MPI nor the native core.
    """
    if is_mpi_job or not has_core:
        if not is_mpi_job and _num_ranks() > 1:
            need_core("torchrelay.mpi over a process group", "start with mpirun, over mpi4py")
        mpi = load()
        from torchrelay.mpi.transports._mpi4py import MpiTransport  # noqa: PLC0415 - initialises MPI

        return Communicator(MpiTransport(mpi.COMM_WORLD), WORLD_NAME)
    from torchrelay.mpi.transports._group import world_transport  # noqa: PLC0415 - imports torch.distributed

    return Communicator(world_transport(), WORLD_NAME)


def _num_ranks() -> int:
    """Return how many processes torch or a launcher knows of."""
    import torch.distributed as dist  # noqa: PLC0415 - as in world()

    has_group = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if has_group else World.from_environment().size
