"""Persistent requests: a communication that is created once and started many times.

Each ``Start`` is a communication of its own, with its own place in the order and its own
derivative.
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
    """Memory and request of a communication; at most one ``Start`` may be in flight."""

    request: MPI.Prequest

    def __init__(self, comm: Comm, tensor: Tensor) -> None:
        if tensor.numel() > settings.max_count:
            raise ArgumentError(
                f"a persistent request carries at most {settings.max_count} elements, not "
                f"{tensor.numel()}"
            )
        self.comm = comm
        self.memory = torch.zeros(tensor.shape, dtype=tensor.dtype)
        self.tensor = tensor

    def load(self, x: Tensor) -> Tensor:
        """Copy ``x`` into the memory of the request and return that."""
        if (x.shape, x.dtype) != (self.memory.shape, self.memory.dtype):
            raise ArgumentError(
                f"Start of a persistent request for {self.memory.dtype} {tuple(self.memory.shape)} "
                f"with {x.dtype} {tuple(x.shape)}"
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
    """A persistent send of tensors of one shape and dtype."""

    def __init__(self, comm: Comm, tensor: Tensor, dest: int, tag: int) -> None:
        super().__init__(comm, tensor, *comm.check_dest(dest, tag))
        self.request = comm.mpi.Send_init(buffer(self.memory), dest, tag)

    @_compiled.eager_only
    def Start(self, tensor: Tensor | None = None) -> WaitHandle:
        """Start to send ``tensor`` (default: the one given at creation)."""
        call = _StartSend(self)
        return WaitHandle(call.transfer, record(call, self.tensor if tensor is None else tensor))


class PersistentRecv(_Message):
    """A persistent receive of tensors of one shape and dtype."""

    def __init__(self, comm: Comm, tensor: Tensor, source: int, tag: int) -> None:
        super().__init__(comm, tensor, *comm.check_source(source, tag))
        self.request = comm.mpi.Recv_init(buffer(self.memory), source, tag)

    @_compiled.eager_only
    def Start(self) -> WaitHandle:
        """Start to receive; ``Wait`` returns a new tensor."""
        call = _StartRecv(self)
        call.transfer.target = torch.empty_like(self.tensor)
        return WaitHandle(call.transfer, record(call, call.transfer.target))


class PersistentCollective(_Persistent):
    """A persistent collective on tensors of one shape and dtype."""

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
        """Start on ``tensor`` (default: the one given at creation)."""
        return _nonblocking.start(
            self.call, self.tensor if tensor is None else tensor, begin=self._start
        )

    def _start(self, x: Tensor) -> Started:
        self.load(x)
        self.request.Start()
        return Started([self.request], lambda: placed(self.result.clone(), x))


def allreduce_init(comm: Comm, x: Tensor, op: Op) -> PersistentCollective:
    """Create a persistent Allreduce."""
    kind = mpi_op(x.dtype, op)
    return PersistentCollective(
        Allreduce(comm, op),
        x,
        lambda ours, total: comm.mpi.Allreduce_init(buffer(ours), buffer(total), kind),
    )


def reduce_init(comm: Comm, x: Tensor, op: Op, root: int) -> PersistentCollective:
    """Create a persistent reduction to root, with zeros elsewhere."""
    kind, is_root = mpi_op(x.dtype, op), comm.check_rank(root) == comm.rank
    return PersistentCollective(
        Reduce(comm, op, root),
        x,
        lambda ours, total: comm.mpi.Reduce_init(
            buffer(ours), buffer(total) if is_root else None, kind, root
        ),
    )


def bcast_init(comm: Comm, x: Tensor, root: int) -> PersistentCollective:
    """Create a persistent broadcast of root's tensor."""
    call = Bcast(comm, comm.check_rank(root))
    persistent = PersistentCollective(
        call, x, lambda ours, _: comm.mpi.Bcast_init(buffer(ours), root)
    )
    persistent.result = persistent.memory
    return persistent
