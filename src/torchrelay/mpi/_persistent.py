"""Persistent requests: a communication that is set up once and made again and again.

Each ``Start`` is a communication of its own, with its own place in the order, and its own derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi import _check, _compiled, _nonblocking
from torchrelay.mpi._allreduce import Allreduce
from torchrelay.mpi._bcast import Bcast
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import Op, buffer, mpi_op
from torchrelay.mpi._library import MPI
from torchrelay.mpi._meeting import meet
from torchrelay.mpi._memory import placed
from torchrelay.mpi._message import Receiving
from torchrelay.mpi._nonblocking import CollectiveHandle
from torchrelay.mpi._point_to_point import Irecv, Isend, WaitHandle
from torchrelay.mpi._record import Started, record
from torchrelay.mpi._reduce import Reduce
from torchrelay.mpi._settings import settings

__all__ = [
    "PersistentCollective",
    "PersistentRecv",
    "PersistentSend",
    "allreduce_init",
    "bcast_init",
    "reduce_init",
]

_P = TypeVar("_P", bound="_Persistent")


class _Persistent:
    """A communication's memory and request; at most one ``Start`` may be under way."""

    request: MPI.Prequest

    def __init__(self, comm: Comm, tensor: Tensor) -> None:
        if tensor.numel() > settings.max_count:
            raise ArgumentError(
                f"a persistent request carries at most {settings.max_count} elements, not {tensor.numel()}"
            )
        self.comm = comm
        self.memory = torch.zeros(tensor.shape, dtype=tensor.dtype)
        self.tensor = tensor

    def load(self, x: Tensor) -> Tensor:
        """The request's memory, with the values of ``x``."""
        if (x.shape, x.dtype) != (self.memory.shape, self.memory.dtype):
            raise ArgumentError(
                f"Start of a persistent request for {self.memory.dtype} {tuple(self.memory.shape)} with "
                f"{x.dtype} {tuple(x.shape)}"
            )
        return self.memory.copy_(x)

    def Free(self) -> None:
        """Return the request to MPI. It cannot be started again."""
        self.request.Free()

    def __enter__(self: _P) -> _P:
        return self

    def __exit__(self, *_: object) -> None:
        self.Free()


class _Message(_Persistent):
    def __init__(self, comm: Comm, tensor: Tensor, peer: int, tag: int) -> None:
        super().__init__(comm, tensor)
        self.peer = peer
        self.tag = tag


class _StartSend(Isend):
    __slots__ = ("message",)
    name = "Start"

    def __init__(self, message: _Message) -> None:
        super().__init__(message.comm, message.peer, message.tag)
        self.message = message

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        memory, request = self.message.load(x), self.message.request
        if settings.debug:
            _check.announce(self, memory, self.peer, self.tag)
        request.Start()
        self.transfer.sending = [(request, memory)]
        return torch.zeros((), dtype=x.dtype, device=x.device)


class _StartRecv(Irecv):
    __slots__ = ("message",)
    name = "Start"

    def __init__(self, message: _Message) -> None:
        super().__init__(message.comm, message.peer, message.tag)
        self.message = message

    def forward(self, x: Tensor) -> Tensor:
        memory, request = self.message.memory, self.message.request
        request.Start()
        self.transfer.keeps_memory = True
        self.transfer.receiving = Receiving(self.comm, memory, self.peer, self.tag, request)
        return torch.zeros((), dtype=x.dtype, device=x.device)


class PersistentSend(_Message):
    """Sends ``tensor``, or what ``Start`` is given."""

    def __init__(self, comm: Comm, tensor: Tensor, dest: int, tag: int) -> None:
        super().__init__(comm, tensor, *comm.check_dest(dest, tag))
        self.request = comm.mpi.Send_init(buffer(self.memory), dest, tag)

    @_compiled.eager_only
    def Start(self, tensor: Tensor | None = None) -> WaitHandle:
        """Starts sending ``tensor`` (default: the one it was set up with), whose shape and dtype stay the same."""
        call = _StartSend(self)
        return WaitHandle(call.transfer, record(call, self.tensor if tensor is None else tensor))


class PersistentRecv(_Message):
    """Receives tensors shaped as ``tensor``."""

    def __init__(self, comm: Comm, tensor: Tensor, source: int, tag: int) -> None:
        super().__init__(comm, tensor, *comm.check_source(source, tag))
        self.request = comm.mpi.Recv_init(buffer(self.memory), source, tag)

    @_compiled.eager_only
    def Start(self) -> WaitHandle:
        """Starts receiving; ``Wait`` gives a new tensor."""
        call = _StartRecv(self)
        call.transfer.target = torch.empty_like(self.tensor)
        return WaitHandle(call.transfer, record(call, call.transfer.target))


class PersistentCollective(_Persistent):
    """A collective on tensors shaped as ``tensor``, with results of the same shape."""

    def __init__(
        self,
        call: Allreduce | Bcast | Reduce,
        tensor: Tensor,
        init: Callable[[Tensor, Tensor], MPI.Prequest],
    ) -> None:
        super().__init__(call.comm, tensor)
        self.call = call
        meet(call, f"{call.signature(tensor)}, set up to be repeated")
        self.result = torch.zeros_like(self.memory)
        self.request = init(self.memory, self.result)

    @_compiled.eager_only
    def Start(self, tensor: Tensor | None = None) -> CollectiveHandle:
        """Starts on ``tensor`` (default: the one it was set up with), whose shape and dtype stay the same."""
        return _nonblocking.start(self.call, self.tensor if tensor is None else tensor, begin=self._start)

    def _start(self, x: Tensor) -> Started:
        self.load(x)
        self.request.Start()
        return Started([self.request], lambda: placed(self.result.clone(), x))


def allreduce_init(comm: Comm, x: Tensor, op: Op) -> PersistentCollective:
    """Sets up Allreduce."""
    kind = mpi_op(x.dtype, op)
    return PersistentCollective(
        Allreduce(comm, op), x, lambda ours, total: comm.mpi.Allreduce_init(buffer(ours), buffer(total), kind)
    )


def reduce_init(comm: Comm, x: Tensor, op: Op, root: int) -> PersistentCollective:
    """Sets up a reduction to root, and zeros on the others."""
    kind, is_root = mpi_op(x.dtype, op), comm.check_rank(root) == comm.rank
    return PersistentCollective(
        Reduce(comm, op, root),
        x,
        lambda ours, total: comm.mpi.Reduce_init(
            buffer(ours), buffer(total) if is_root else None, kind, root
        ),
    )


def bcast_init(comm: Comm, x: Tensor, root: int) -> PersistentCollective:
    """Sets up giving every rank root's tensor."""
    call = Bcast(comm, comm.check_rank(root))
    persistent = PersistentCollective(call, x, lambda ours, _: comm.mpi.Bcast_init(buffer(ours), root))
    persistent.result = persistent.memory
    return persistent
