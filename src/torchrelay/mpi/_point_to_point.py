"""Send, Recv and Sendrecv, blocking and non-blocking.

The derivative sends the cotangent the other way: a received tensor's cotangent is sent to its
source, a sent tensor's is received. In a backward pass, a cotangent is sent without waiting for its
receiver, and the send completes at the end of the pass. A forward pass that relied on MPI's buffers
could deadlock in its backward pass otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.errors import ArgumentError
from torchrelay.mpi import _compiled
from torchrelay.mpi._chain import Answer, Chain
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import check_tensor, is_differentiable
from torchrelay.mpi._inplace import can_overwrite, overwrite
from torchrelay.mpi._memory import check_memory, packed, placed
from torchrelay.mpi._message import Receiving, Sending, finish_all, memory_for, start_send
from torchrelay.mpi._record import Adjoint, Call, record
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG
from torchrelay.mpi._wait import abandon

__all__ = ["JoinDummies", "JoinDummiesHandle", "Messages", "Sendrecv", "WaitHandle"]


@dataclass(slots=True, eq=False)
class _PeerCall(Call):
    """A call between two ranks, which debug mode cannot compare collectively."""

    everyone = False
    transformable = False
    peer: int
    tag: int

    def arguments(self) -> str:
        return f"rank {self.peer}, tag {self.tag}"

    def peers(self) -> Iterable[int]:
        return range(self.comm.size) if self.peer == ANY_SOURCE else (self.peer,)


@dataclass(slots=True, eq=False)
class Send(_PeerCall):
    name = "Send"
    shape: Sequence[int] = ()  # of the tensor, once it is known

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        self.complete(start_send(self, packed(x), self.peer, self.tag))
        return torch.zeros((), dtype=x.dtype, device=x.device)

    def complete(self, started: Sending) -> None:
        finish_all(started, self)

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(Recv(self.comm.reverse, self.peer, self.tag), grad.new_empty(self.shape))

    def in_graph(self, x: Tensor) -> Send:
        return type(self)(self.comm, self.peer, self.tag, x.shape)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return []


class Post(Send):
    """A send that completes at the end of its backward pass."""

    __slots__ = ()
    name = "Send"

    def complete(self, started: Sending) -> None:
        if not all(request.Test() for request, _ in started):
            _torch.after_backward(lambda: finish_all(started, self))


def _sendable(tag: int) -> int:
    """Return the tag of the answer to a message with ``tag``."""
    return 0 if tag == ANY_TAG else tag


@dataclass(slots=True, eq=False)
class Recv(_PeerCall):
    """A receive, or the end of one that was ``started``.

    Its backward sends the cotangent to the source of the message.
    """

    name = "Recv"
    shape: Sequence[int] = ()  # for a compiled graph's backward pass
    started: Irecv | None = field(default=None, kw_only=True)
    number: int = field(default=0, init=False)
    answer: Answer = field(init=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.started is None:
            memory = x if self.overwrites else memory_for(x.shape, x.dtype, self.peer)
            receiving = Receiving(self.comm, memory, self.peer, self.tag)
        else:
            receiving = self.started.take()
        receiving.finish(self)
        self.peer, self.tag, self.number = receiving.source, receiving.tag, receiving.number
        return x if self.overwrites else placed(receiving.memory, x)

    def joined(self, chain: Chain) -> None:
        place = (self.comm.reverse.transport, self.peer, self.tag)
        self.answer = Answer(chain, place, self.number, self._post)

    def backward(self, grad: Tensor, *saved: Tensor) -> None:
        self.answer.give(grad)

    def _post(self, grad: Tensor | None) -> None:
        assert grad is not None
        record(Post(self.comm.reverse, self.peer, _sendable(self.tag)), grad)

    def tangent(self, tangent: Tensor, *saved: Tensor) -> Tensor:
        if self.started is None:
            return record(self, tangent)
        assert self.started.tangent_handle is not None
        return self.started.tangent_handle.Wait()

    def adjoint(self, grad: Tensor) -> Adjoint:
        """In a compiled graph, whose receives are answered in their order."""
        shape = self.shape
        post = Post(self.comm.reverse, self.peer, _sendable(self.tag), shape)
        return Adjoint(post, grad, lambda sent: sent.new_zeros(shape))

    def in_graph(self, x: Tensor) -> Recv | None:
        if self.peer == ANY_SOURCE or self.tag == ANY_TAG:
            return None
        return Recv(self.comm, self.peer, self.tag, x.shape)


@dataclass(slots=True, eq=False)
class Sendrecv(_PeerCall):
    name = "Sendrecv"
    transformable = True
    source: int
    source_tag: int
    shape: Sequence[int]  # of what comes
    dtype: torch.dtype | None = field(default=None, kw_only=True)  # None: of what is sent
    batch_dims: int = field(default=0, kw_only=True)
    sent: tuple[Sequence[int], torch.dtype | None] | None = field(default=None, init=False)

    def forward(self, x: Tensor) -> Tensor:
        self.sent = (x.shape, x.dtype)
        received = Recv(self.comm, self.source, self.source_tag)
        shape = (*x.shape[: self.batch_dims], *self.shape)
        memory = memory_for(shape, self.dtype or x.dtype, self.source)
        receiving = Receiving(self.comm, memory, self.source, self.source_tag)
        sent = start_send(self, packed(x), self.peer, self.tag)
        try:
            receiving.finish(received)
        except BaseException:
            abandon(sent)
            raise
        self.source, self.source_tag = receiving.source, receiving.tag
        finish_all(sent, self)
        return placed(memory, x)

    def adjoint(self, grad: Tensor) -> Adjoint:
        back = (self.comm.reverse, self.source, _sendable(self.source_tag))
        shape, dtype = self.sent or (self.shape, self.dtype)
        return Adjoint(Sendrecv(*back, self.peer, self.tag, shape, dtype=dtype), grad)

    def in_graph(self, x: Tensor) -> Sendrecv | None:
        if self.source == ANY_SOURCE or (*self.shape, self.dtype) != (*x.shape, x.dtype):
            return None
        tag = self.tag if self.source_tag == ANY_TAG else self.source_tag
        return Sendrecv(self.comm, self.peer, self.tag, self.source, tag, self.shape)

    def batched(self) -> Sendrecv:
        return replace(self, batch_dims=self.batch_dims + 1)

    def peers(self) -> Iterable[int]:
        return (self.peer, self.source)


@dataclass(slots=True, eq=False)
class WaitHandle:
    """A started point-to-point communication, to be passed to ``Wait``.

    Attributes:
        dummy: a 0-dim tensor that depends on the start.
    """

    started: Isend | Irecv
    dummy: Tensor

    @_compiled.eager_only
    def Wait(self) -> Tensor:
        """Return the received tensor; for a send, a 0-dim tensor. Blocks."""
        started = self.started
        if isinstance(started, Isend):
            finish_all(started.sending, started)
            started.sending = ()
            if started.tangent_handle is not None:
                started.tangent_handle.Wait()
            return self.dummy
        call = Recv(started.comm, started.peer, started.tag, started=started)
        if started.in_place:
            call.overwrites = True
            return record(call, started.target)
        return overwrite(call, started.target, partial(record, call))


@dataclass(slots=True, eq=False)
class Isend(Send):
    name = "Isend"
    sending: Sending = field(default=(), init=False)
    tangent_handle: WaitHandle | None = field(default=None, init=False)  # in forward mode

    def begin(self, x: Tensor) -> WaitHandle:
        return WaitHandle(self, record(self, x))

    def complete(self, started: Sending) -> None:
        self.sending = started

    def tangent(self, tangent: Tensor, *saved: Tensor) -> Tensor:
        self.tangent_handle = Isend(self.comm, self.peer, self.tag).begin(tangent)
        return self.tangent_handle.dummy

    def __del__(self) -> None:
        if self.sending:  # it was never waited for
            abandon(self.sending)


@dataclass(slots=True, eq=False)
class Irecv(_PeerCall):
    name = "Irecv"
    passive = True
    target: Tensor
    in_place: bool
    receiving: Receiving | None = field(default=None, init=False)
    tangent_handle: WaitHandle | None = field(default=None, init=False)  # in forward mode

    def begin(self) -> WaitHandle:
        return WaitHandle(self, record(self, self.target))

    def forward(self, x: Tensor) -> Tensor:
        memory = x.detach() if self.in_place else torch.zeros(x.shape, dtype=x.dtype)
        self.receiving = Receiving(self.comm, memory, self.peer, self.tag)
        return torch.zeros((), dtype=x.dtype, device=x.device)

    def take(self) -> Receiving:
        """Return the message in transit, once."""
        receiving, self.receiving = self.receiving, None
        if receiving is None:
            raise ArgumentError(f"{self.describe()} was already waited for")
        return receiving

    def backward(self, grad: Tensor, *saved: Tensor) -> None:
        return None  # what Wait's backward posted completes at the end of the backward pass

    def tangent(self, tangent: Tensor, *saved: Tensor) -> Tensor:
        memory = torch.zeros_like(tangent)
        self.tangent_handle = Irecv(self.comm, self.peer, self.tag, memory, False).begin()
        return self.tangent_handle.dummy


class Messages(Comm):
    """The point-to-point functions of a communicator."""

    def Send(self, tensor: Tensor, dest: int, tag: int = 0) -> Tensor:
        """Send ``tensor`` to ``dest``. Blocks until ``tensor`` may be changed.

        Returns:
            A 0-dim tensor that depends on the send.
        """
        return record(Send(self, *self.check_dest(dest, tag)), tensor)

    def Recv(self, tensor: Tensor, source: int, tag: int = 0) -> Tensor:
        """Overwrite ``tensor`` with a message from ``source``. Blocks until it has arrived.

        Returns:
            ``tensor``; a new tensor if it is a leaf that requires grad.

        Raises:
            MismatchError: the message has another length.
        """
        return overwrite(Recv(self, *self.check_source(source, tag)), tensor)

    def Sendrecv(
        self,
        tensor: Tensor,
        dest: int,
        source: int,
        like: Tensor | None = None,
        sendtag: int = 0,
        recvtag: int = ANY_TAG,
    ) -> Tensor:
        """Send ``tensor`` to ``dest`` and receive from ``source``. Blocks until both are done.

        Args:
            like: gives the shape and dtype of the result; default: ``tensor``.
        """
        like = tensor if like is None else like
        check_tensor(tensor)
        check_tensor(like)
        if is_differentiable(like.dtype) != is_differentiable(tensor.dtype):
            raise ArgumentError(
                f"Sendrecv of {tensor.dtype}, with like of {like.dtype}: autograd records one and "
                "not the other; use Isend and Recv"
            )
        to, back = self.check_dest(dest, sendtag), self.check_source(source, recvtag)
        call = Sendrecv(self, *to, *back, tuple(like.shape), dtype=like.dtype)
        return record(call, tensor)

    @_compiled.eager_only
    def Isend(self, tensor: Tensor, dest: int, tag: int = 0) -> WaitHandle:
        """Start :meth:`Send`; ``tensor`` must not change until :meth:`Wait`."""
        return Isend(self, *self.check_dest(dest, tag)).begin(tensor)

    @_compiled.eager_only
    def Irecv(self, tensor: Tensor, source: int, tag: int = 0) -> WaitHandle:
        """Start :meth:`Recv`; :meth:`Wait` returns the result."""
        check_tensor(tensor)
        check_memory(tensor)
        peer = self.check_source(source, tag)
        return Irecv(self, *peer, tensor, can_overwrite(tensor)).begin()


def JoinDummies(x: Tensor, dummies: Sequence[Tensor]) -> Tensor:
    """Return ``x`` with an autograd dependency on ``dummies``. Communicates nothing."""
    return _join(x, *dummies)  # type: ignore[no-any-return]


def JoinDummiesHandle(handle: WaitHandle, dummies: Sequence[Tensor]) -> WaitHandle:
    """Return ``handle`` with an autograd dependency of its ``dummy`` on ``dummies``."""
    return WaitHandle(handle.started, JoinDummies(handle.dummy, dummies))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *dummies: Tensor) -> Tensor:
        return x.data  # not a view of x for autograd, so that it may be received into

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.dummies = [(d.shape, d.dtype, d.device) for d in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros((), dtype=d, device=v).expand(s) for s, d, v in ctx.dummies)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, *dummies: Tensor
    ) -> tuple[Tensor, Any]:
        return x.view_as(x), in_dims[0]


_join: Any = _Join.apply
