"""Send, Recv and Sendrecv, blocking and non-blocking.

The derivative sends the cotangent the other way: a received tensor's cotangent is sent to its
source, a sent tensor's is received. In a backward pass, a cotangent is sent without waiting for its
receiver, and the send completes at the end of the pass. A forward pass that relied on MPI's buffers
could deadlock in its backward pass otherwise.

A receiver raises if a message has another length than its memory. A call that is refused takes part
in its messages all the same, with nothing, so that later ones are not taken for them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from torchrelay import _torch
from torchrelay.errors import ArgumentError, MismatchError, TorchRelayError, UnsupportedError
from torchrelay.mpi import _compiled
from torchrelay.mpi._chain import Answer, Chain
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import check_dtype, check_tensor, is_differentiable
from torchrelay.mpi._inplace import can_overwrite, overwrite
from torchrelay.mpi._memory import check_memory, fresh, packed, placed
from torchrelay.mpi._record import Call, Plan, Started, record
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG, PROC_NULL, Message
from torchrelay.mpi._wait import Waiting, abandon, finish

__all__ = ["JoinDummies", "JoinDummiesHandle", "Messages", "Sendrecv", "WaitHandle", "pass_over"]

_C = TypeVar("_C", bound=Comm)
_P = ParamSpec("_P")
_R = TypeVar("_R")

# In debug mode, each message is announced to its receiver, which compares shape and dtype.
ANNOUNCEMENT_BYTES = 256
ANNOUNCEMENTS = 16  # on the control communicator: the first of the tags for announcements
MOST_TAGS = 1 << 13  # MPI promises 32767; messages whose tags are that far apart share one


def memory_for(shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
    """Allocate memory for a message of ``source``; zeros, if nobody sends it."""
    memory = fresh(shape, dtype)
    return memory.zero_() if source == PROC_NULL else memory


class Receiving:
    """A message in transit into ``memory``; ``source`` and ``tag`` may be wildcards."""

    __slots__ = ("announced", "is_done", "memory", "number", "parts", "requests", "source", "tag")

    def __init__(self, comm: Comm, memory: Tensor, source: int, tag: int) -> None:
        self.is_done = False
        self.requests: list[Message] = []
        self.announced: tuple[Message, Tensor] | None = None
        self.memory, self.source, self.tag = memory, source, tag
        self.number = next(Answer.numbers)
        check_dtype(memory.dtype)
        self.parts = comm.transport.cut(memory)
        self.requests.append(comm.transport.irecv(self.parts[0], source, tag))
        if source not in (ANY_SOURCE, PROC_NULL) and tag != ANY_TAG:
            self._start_rest(comm)

    def _start_rest(self, comm: Comm) -> None:
        """Start to receive a long message's other pieces, and in debug mode the announcement."""
        for part in self.parts[1:]:
            self.requests.append(comm.transport.irecv(part, self.source, self.tag))
        if settings.debug and comm.announces:
            text = torch.zeros(ANNOUNCEMENT_BYTES, dtype=torch.uint8, device="cpu")
            tag = _announcement_tag(comm, self.tag)
            self.announced = (comm.lease.control.irecv(text, self.source, tag), text)

    def finish(self, call: Waiting) -> None:
        """Wait until the message has arrived.

        Raises:
            MismatchError: its length, or in debug mode its shape or dtype, differs from the memory.
        """
        if self.announced is not None:
            self._compare(call, *self.announced)
        first = self._finish_part(call, 0)
        if self.source != PROC_NULL:
            if (self.source, self.tag) != (first.source, first.tag):
                self.source, self.tag = first.source, first.tag
                self._start_rest(call.comm)
                if self.announced is not None:
                    self._compare(call, *self.announced)
            for index in range(1, len(self.parts)):
                self._finish_part(call, index)
        self.is_done = True

    def __del__(self) -> None:
        if not self.is_done:  # it was never waited for, or it failed
            abandon((self.requests, self.memory))

    def _finish_part(self, call: Waiting, index: int) -> Message:
        message, part = self.requests[index], self.parts[index]
        finish(message, call, part)
        if message.source != PROC_NULL and message.size_bytes != part.nbytes:
            is_refused = not message.size_bytes and len(self.parts) == 1
            error = MismatchError(
                f"rank {call.comm.rank}: {call.describe()} on {call.comm.name} got "
                f"{message.size_bytes} bytes from rank {message.source}, "
                f"{'whose call failed or was of an empty tensor, ' if is_refused else ''}and "
                f"expected {part.nbytes}: {part.numel()} elements of {part.dtype}"
            )
            raise error if is_refused else call.comm.job.failed(error)
        return message

    def _compare(self, call: Waiting, request: Message, text: Tensor) -> None:
        """Wait for the announcement, and compare it with the memory.

        Raises:
            MismatchError: it has another shape or dtype; on the sender, too.
        """
        finish(request, call, text)
        contents = _contents(self.memory)
        theirs = text.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        if not theirs.startswith(f"{contents} in "):
            raise call.comm.job.failed(
                MismatchError(
                    f"rank {call.comm.rank} of {call.comm.name} receives {contents} in "
                    f"{call.describe()}, and rank {self.source} sends it {theirs}"
                )
            )


def _contents(memory: Tensor) -> str:
    return f"{memory.dtype} {tuple(memory.shape)}"


def _announcement_tag(comm: Comm, tag: int) -> int:
    return ANNOUNCEMENTS + 2 * (tag % MOST_TAGS) + comm.is_reverse


@dataclass(slots=True, eq=False)
class _PeerCall(Call):
    """A call between two ranks, which debug mode cannot compare collectively."""

    is_collective = False
    transformable = False
    peer: int
    tag: int

    def arguments(self) -> str:
        return f"rank {self.peer}, tag {self.tag}"

    def peers(self) -> Iterable[int]:
        return range(self.comm.size) if self.peer == ANY_SOURCE else (self.peer,)

    def send(self, memory: Tensor) -> Started:
        """Start to send ``memory``, which is packed and must not change until done, to the peer."""
        transport = self.comm.transport
        requests = [transport.isend(part, self.peer, self.tag) for part in transport.cut(memory)]
        kept = [memory]
        if settings.debug and self.comm.announces and self.peer != PROC_NULL:
            text = f"{_contents(memory)} in {self.describe()}".encode()[:ANNOUNCEMENT_BYTES]
            padded = bytearray(text.ljust(ANNOUNCEMENT_BYTES, b"\0"))
            kept.append(torch.frombuffer(padded, dtype=torch.uint8))
            tag = _announcement_tag(self.comm, self.tag)
            requests.append(self.comm.lease.control.isend(kept[1], self.peer, tag))
        return Started(requests, lambda: memory, kept)


@dataclass(slots=True, eq=False)
class Send(_PeerCall):
    name = "Send"
    shape: Sequence[int] = ()  # of the tensor, once it is known

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        self.complete(self.send(packed(x.detach())))  # what is kept of it has no history
        return torch.zeros((), dtype=x.dtype, device=x.device)

    def complete(self, started: Started) -> None:
        started.finish(self)

    def adjoint(self, grad: Tensor) -> Plan:
        return Plan(Recv(self.comm.reverse, self.peer, self.tag), grad.new_empty(self.shape))

    def in_graph(self, x: Tensor) -> Send:
        return type(self)(self.comm, self.peer, self.tag, x.shape)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return []


_posted: set[Started] = set()
"""Sends in transit, also after a backward pass that failed and does not complete them."""


class Post(Send):
    """A send that completes at the end of its backward pass."""

    __slots__ = ()
    name = "Send"

    def complete(self, started: Started) -> None:
        if not all(request.Test() for request in started.requests):
            _posted.add(started)
            _torch.after_backward(partial(self._complete_posted, started))

    def _complete_posted(self, started: Started) -> None:
        started.finish(self)
        _posted.remove(started)


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

    def backward(self, grad: Tensor) -> None:
        self.answer.give(grad)

    def _post(self, grad: Tensor | None) -> None:
        assert grad is not None
        record(Post(self.comm.reverse, self.peer, _sendable(self.tag)), grad)

    def tangent(self, tangent: Tensor) -> Tensor:
        if self.started is None:
            return record(Recv(self.comm, self.peer, self.tag), tangent)
        assert self.started.tangent_handle is not None
        return self.started.tangent_handle.Wait()

    def adjoint(self, grad: Tensor) -> Plan:
        """Return that of a compiled graph, whose receives are answered in their order."""
        shape = self.shape
        post = Post(self.comm.reverse, self.peer, _sendable(self.tag), shape)
        return Plan(post, grad, lambda sent: sent.new_zeros(shape))

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
    sent: tuple[Sequence[int], torch.dtype | None] | None = field(default=None, init=False)

    def forward(self, x: Tensor) -> Tensor:
        self.sent, source = (x.shape, x.dtype), packed(x)
        received = Recv(self.comm, self.source, self.source_tag)
        memory = memory_for(self.shape, self.dtype or x.dtype, self.source)
        receiving = Receiving(self.comm, memory, self.source, self.source_tag)
        sent = self.send(source)
        try:
            receiving.finish(received)
        except BaseException:
            abandon(sent)
            raise
        self.source, self.source_tag = receiving.source, receiving.tag
        sent.finish(self)
        return placed(memory, x)

    def adjoint(self, grad: Tensor) -> Plan:
        back = (self.comm.reverse, self.source, _sendable(self.source_tag))
        shape, dtype = self.sent or (self.shape, self.dtype)
        return Plan(Sendrecv(*back, self.peer, self.tag, shape, dtype=dtype), grad)

    def in_graph(self, x: Tensor) -> Sendrecv | None:
        if self.source == ANY_SOURCE or (*self.shape, self.dtype) != (*x.shape, x.dtype):
            return None
        tag = self.tag if self.source_tag == ANY_TAG else self.source_tag
        return Sendrecv(self.comm, self.peer, self.tag, self.source, tag, self.shape)

    def batched(self, size: int) -> Sendrecv:
        return replace(self, shape=(size, *self.shape))

    def learn(self, batched: Sendrecv) -> None:
        assert batched.sent is not None
        shape, dtype = batched.sent
        self.sent = (shape[1:], dtype)
        self.source, self.source_tag = batched.source, batched.source_tag

    def peers(self) -> Iterable[int]:
        return (self.peer, self.source)


class Waitable(Protocol):
    """A started communication."""

    def wait(self, dummy: Tensor) -> Tensor:
        """Complete it, after what ``dummy`` depends on, and return its result."""


@dataclass(slots=True, eq=False)
class WaitHandle:
    """A started communication, to be passed to ``Wait``.

    Attributes:
        dummy: a 0-dim tensor that depends on the start.
    """

    started: Waitable
    dummy: Tensor

    @_compiled.eager_only
    def Wait(self) -> Tensor:
        """Return the result; for a send, a 0-dim tensor. Blocks."""
        return self.started.wait(self.dummy)


@dataclass(slots=True, eq=False)
class Isend(Send):
    name = "Isend"
    started: Started | None = field(default=None, init=False)
    tangent_handle: WaitHandle | None = field(default=None, init=False)  # in forward mode

    def begin(self, x: Tensor) -> WaitHandle:
        return WaitHandle(self, record(self, x))

    def complete(self, started: Started) -> None:
        self.started = started

    def wait(self, dummy: Tensor) -> Tensor:
        started, self.started = self.started, None
        if started is not None:
            started.finish(self)
        if self.tangent_handle is not None:
            self.tangent_handle.Wait()
        return dummy

    def tangent(self, tangent: Tensor) -> Tensor:
        self.tangent_handle = Isend(self.comm, self.peer, self.tag).begin(tangent)
        return self.tangent_handle.dummy

    def __del__(self) -> None:
        if self.started is not None:  # it was never waited for
            abandon(self.started)


@dataclass(slots=True, eq=False)
class Irecv(_PeerCall):
    name = "Irecv"
    target: Tensor
    in_place: bool
    receiving: Receiving | None = field(default=None, init=False)
    tangent_handle: WaitHandle | None = field(default=None, init=False)  # in forward mode

    def begin(self) -> WaitHandle:
        if torch.is_grad_enabled():  # the derivative is that of Wait
            self.begins_recorded = is_differentiable(self.target.dtype)
            with torch.no_grad():
                return self.begin()
        return WaitHandle(self, record(self, self.target))

    def forward(self, x: Tensor) -> Tensor:
        memory = x.detach() if self.in_place else memory_for(x.shape, x.dtype, self.peer)
        self.receiving = Receiving(self.comm, memory, self.peer, self.tag)
        return torch.zeros((), dtype=x.dtype, device=x.device)

    def wait(self, dummy: Tensor) -> Tensor:
        call, target = Recv(self.comm, self.peer, self.tag, started=self), self.target
        if not is_compiling():
            self.target = target.detach()  # its history will hold this call: else a cycle
        return overwrite(call, target, None if self.in_place else partial(record, call))

    def take(self) -> Receiving:
        """Return the message in transit, once."""
        receiving, self.receiving = self.receiving, None
        if receiving is None:
            raise ArgumentError(f"{self.describe()} was already waited for")
        return receiving

    def tangent(self, tangent: Tensor) -> Tensor:
        memory = torch.zeros_like(tangent)
        self.tangent_handle = Irecv(self.comm, self.peer, self.tag, memory, False).begin()
        return self.tangent_handle.dummy


_TAGS = ("sendtag", "recvtag")


def pass_over(comm: Comm, dest: Any, sendtag: Any, source: Any, recvtag: Any) -> None:
    """Send nothing to ``dest``, and drop what comes from ``source``, where these exist.

    What is dropped may come later.
    """
    if comm.lease.is_freed or comm.job.broken is not None:
        return
    with _torch.outside_transforms():
        nothing = torch.empty(0, device="cpu")
        with contextlib.suppress(TorchRelayError):
            abandon(Send(comm, *comm.check_peer("dest", dest, sendtag)).send(nothing))
        with contextlib.suppress(TorchRelayError):
            Receiving(comm, nothing, *comm.check_peer("source", source, recvtag, True))


def _in_step(
    method: Callable[Concatenate[_C, _P], _R],
) -> Callable[Concatenate[_C, _P], _R]:
    """Let a refused call pass over its messages; a decorator."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: _C, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_compiling():
            return method(self, *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except (ArgumentError, UnsupportedError):
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            sendtag, recvtag = (given.get(name, given.get("tag")) for name in _TAGS)
            pass_over(self, given.get("dest"), sendtag, given.get("source"), recvtag)
            raise

    return call


class Messages(Comm):
    """The point-to-point functions of a communicator."""

    @_in_step
    def Send(self, tensor: Tensor, dest: int, tag: int = 0) -> Tensor:
        """Send ``tensor`` to ``dest``. Blocks until ``tensor`` may be changed.

        Returns:
            A 0-dim tensor that depends on the send.
        """
        return record(Send(self, *self.check_peer("dest", dest, tag)), tensor)

    @_in_step
    def Recv(self, tensor: Tensor, source: int, tag: int = 0) -> Tensor:
        """Overwrite ``tensor`` with a message from ``source``. Blocks until it has arrived.

        Returns:
            ``tensor``; a new tensor if it is a leaf that requires grad.

        Raises:
            MismatchError: the message has another length.
        """
        return overwrite(Recv(self, *self.check_peer("source", source, tag, True)), tensor)

    @_in_step
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
        to = self.check_peer("dest", dest, sendtag)
        back = self.check_peer("source", source, recvtag, True)
        call = Sendrecv(self, *to, *back, tuple(like.shape), dtype=like.dtype)
        return record(call, tensor)

    @_compiled.eager_only
    @_in_step
    def Isend(self, tensor: Tensor, dest: int, tag: int = 0) -> WaitHandle:
        """Start :meth:`Send`; ``tensor`` must not change until :meth:`Wait`."""
        return Isend(self, *self.check_peer("dest", dest, tag)).begin(tensor)

    @_compiled.eager_only
    @_in_step
    def Irecv(self, tensor: Tensor, source: int, tag: int = 0) -> WaitHandle:
        """Start :meth:`Recv`; :meth:`Wait` returns the result."""
        check_tensor(tensor)
        check_memory(tensor)
        peer = self.check_peer("source", source, tag, True)
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
