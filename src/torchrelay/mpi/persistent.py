"""Persistent requests: a message between two ranks that is sent again and again, set up once.

Each ``Start`` is a communication of its own, with its own place in the order, and its own derivative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrelay.mpi._dtypes import buffer
from torchrelay.mpi._record import record
from torchrelay.mpi.point_to_point import Irecv, Isend, WaitHandle

if TYPE_CHECKING:
    from torchrelay.mpi._library import MPI
    from torchrelay.mpi.communicator import Communicator

__all__ = ["PersistentRecv", "PersistentSend"]


class _StartSend(Isend):
    __slots__ = ("memory", "request")
    name = "Start"

    def __init__(
        self, comm: Communicator, peer: int, tag: int, request: MPI.Prequest, memory: Tensor
    ) -> None:
        super().__init__(comm, peer, tag)
        self.request = request
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.dtype = x.shape, x.dtype
        self.memory.copy_(x)
        self.request.Start()
        self.transfer.requests = [(self.request, self.memory)]
        return torch.zeros((), dtype=x.dtype, device=x.device)


class _StartRecv(Irecv):
    __slots__ = ("memory", "request")
    name = "Start"

    def __init__(
        self, comm: Communicator, peer: int, tag: int, request: MPI.Prequest, memory: Tensor
    ) -> None:
        super().__init__(comm, peer, tag)
        self.request = request
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        self.request.Start()
        self.transfer.memory = self.memory
        self.transfer.keeps_memory = True
        self.transfer.requests = [(self.request, self.memory)]
        return torch.zeros((), dtype=x.dtype, device=x.device)


class _Persistent:
    """A message's memory and request; at most one ``Start`` may be under way."""

    request: MPI.Prequest

    def __init__(self, comm: Communicator, tensor: Tensor, peer: int, tag: int) -> None:
        self.comm = comm
        self.peer = comm.check_peer(peer)
        self.tag = tag
        self.memory = torch.zeros(tensor.shape, dtype=tensor.dtype)
        self.tensor = tensor

    def Free(self) -> None:
        """Gives the request back to MPI."""
        self.request.Free()


class PersistentSend(_Persistent):
    """Sends ``tensor``, or what ``Start`` is given."""

    def __init__(self, comm: Communicator, tensor: Tensor, dest: int, tag: int) -> None:
        super().__init__(comm, tensor, dest, tag)
        self.request = comm.mpi.Send_init(buffer(self.memory), dest, tag)

    def Start(self, tensor: Tensor | None = None) -> WaitHandle:
        """Starts sending ``tensor`` (default: the one it was set up with), whose shape and dtype stay the same."""
        call = _StartSend(self.comm, self.peer, self.tag, self.request, self.memory)
        return WaitHandle(call.transfer, record(call, self.tensor if tensor is None else tensor))


class PersistentRecv(_Persistent):
    """Receives tensors shaped as ``tensor``."""

    def __init__(self, comm: Communicator, tensor: Tensor, source: int, tag: int) -> None:
        super().__init__(comm, tensor, source, tag)
        self.request = comm.mpi.Recv_init(buffer(self.memory), source, tag)

    def Start(self) -> WaitHandle:
        """Starts receiving; ``Wait`` gives a new tensor."""
        call = _StartRecv(self.comm, self.peer, self.tag, self.request, self.memory)
        call.transfer.target = torch.empty_like(self.tensor)
        return WaitHandle(call.transfer, record(call, call.transfer.target))
