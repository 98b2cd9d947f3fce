"""The non-blocking collective: started by ``Iallreduce``, completed by ``Wait``.

In a backward pass the steps exchange their roles: ``Wait``'s backward starts the communication of
the derivative, and the start's backward waits for it. MPI matches collectives by the order of their
starts, and ranks may wait in different orders. A cotangent that arrives early is therefore kept
until those of later collectives have been started.

MAX, MIN and PROD are gathered if a derivative is wanted, and ``Wait`` reduces them: their
derivatives need further communication, and ranks may wait in different orders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.errors import ArgumentError
from torchrelay.mpi import _chain, _compiled
from torchrelay.mpi._collectives import allreduce, zeros_with_graph
from torchrelay.mpi._comm import Comm, collective
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._headers import CallSignature, Comparison, on_device
from torchrelay.mpi._memory import packed, placed
from torchrelay.mpi._point_to_point import WaitHandle
from torchrelay.mpi._record import Call, Plan, Started, record, run, transforms_active
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import Testable
from torchrelay.mpi._wait import abandon

__all__ = ["NonBlocking"]


@dataclass(slots=True, eq=False)
class _Start(Call):
    """The start of ``call``, and its state until its end, in both directions."""

    name = "Istart"
    blocking = False
    call: Call
    complete: Callable[[Tensor], Tensor]
    is_recorded: bool = field(default_factory=torch.is_grad_enabled, init=False)
    started: Started | None = field(default=None, init=False)
    like: tuple[list[int], torch.dtype, torch.device] = field(init=False)
    tangent_handle: WaitHandle | None = field(default=None, init=False)  # in forward mode
    answer: _chain.Answer | None = field(default=None, init=False)
    # In the running backward pass: the derivative, and the start of its communication.
    path: Plan | None = field(default=None, init=False)
    back: WaitHandle | None = field(default=None, init=False)

    def __del__(self) -> None:
        if self.started is not None:  # it was never waited for
            abandon(self.started)

    def forward(self, x: Tensor) -> Tensor:
        requests: list[Testable] = []
        x = x.detach()  # what is kept of it has no history, which may lead here
        source = packed(x)
        numbers = [self.call.numbers(source)] * self.comm.size
        if self.comm.size > 1:
            requests.append(Comparison(self, self.fields(source)))
        try:
            started = self.call.start(source, numbers, False)
        except BaseException:
            abandon(requests)
            raise
        requests += started.requests
        # of the result: a backward pass may come before it is waited for
        self.like = (self.call.result_shape(x.shape), x.dtype, x.device)
        self.started = Started(requests, lambda: placed(started.result(), x), (source, started))
        return torch.zeros((), dtype=x.dtype, device=x.device)

    def wait(self, dummy: Tensor) -> Tensor:
        return self.complete(record(_Wait(self.comm, self), dummy))

    def begin(self, grad: Tensor | None) -> None:
        """Start the derivative; of zeros, if the result was not waited for or not used."""
        if grad is None:
            shape, dtype, device = self.like
            grad = torch.zeros(shape, dtype=dtype, device=device)
        self.path = self.call.adjoint(grad)
        self.back = None if self.path.call is None else start(self.path)
        if torch.is_grad_enabled():  # the cotangent has a history, which may lead here
            _torch.after_backward(self._forget)

    def _forget(self) -> None:
        """Drop what holds the cotangent, also where the backward pass has not come to the start."""
        self.path = self.back = None

    def backward(self, grad: Tensor) -> Tensor:
        assert self.answer is not None
        self.answer.force()
        path, back = self.path, self.back
        self._forget()
        assert path is not None
        return path.complete(path.x) if back is None else back.Wait()

    def tangent(self, tangent: Tensor) -> Tensor:
        self.tangent_handle = start(Plan(self.call, tangent))
        return self.tangent_handle.dummy

    def differentiable(self, x: Tensor) -> bool:
        return self.call.differentiable(x)

    def fields(self, x: Tensor) -> CallSignature:
        name, *others = self.call.fields(x)
        fields = (f"I{name.lower()}", *others)
        if not x.is_cpu:
            fields = on_device(fields, x.device)
        if settings.debug:
            fields = (*fields[:4], self.is_recorded and self.differentiable(x))
        return fields

    def describe(self) -> str:
        return f"I{self.call.name.lower()}({self.call.arguments()})"


@dataclass(slots=True, eq=False)
class _Wait(Call):
    name = "Wait"
    is_collective = False  # ranks may wait in different orders
    beginning: _Start

    def forward(self, x: Tensor) -> Tensor:
        started, self.beginning.started = self.beginning.started, None
        if started is None:
            raise ArgumentError(f"{self.beginning.call.describe()} was already waited for")
        return started.finish(self)

    def backward(self, grad: Tensor) -> None:
        if self.beginning.answer is not None:
            self.beginning.answer.give(grad)

    def tangent(self, tangent: Tensor) -> Tensor:
        assert self.beginning.tangent_handle is not None
        return self.beginning.tangent_handle.Wait()

    def describe(self) -> str:
        return f"Wait for {self.beginning.call.describe()}"


@dataclass(slots=True, eq=False)
class _Finished:
    """A communication inside of ``torch.func`` transforms, which know of no state between steps."""

    call: Call
    result: Tensor | None

    def wait(self, dummy: Tensor) -> Tensor:
        result, self.result = self.result, None
        if result is None:
            raise ArgumentError(f"I{self.call.name.lower()} was already waited for")
        return result


@_compiled.eager_only
def start(plan: Plan) -> WaitHandle:
    """Start ``plan``, whose tensor must not change until ``Wait``."""
    call, x, complete = plan
    assert call is not None
    if transforms_active():
        y = run(plan)
        return WaitHandle(_Finished(call, y), zeros_with_graph(y).sum())
    beginning = _Start(call.comm, call, complete)
    dummy = record(beginning, x)
    if dummy.requires_grad:
        place, number = call.comm.reverse.transport, next(_chain.Answer.numbers)
        beginning.answer = _chain.Answer(_chain.current(), place, number, beginning.begin)
    return WaitHandle(beginning, dummy)


class NonBlocking(Comm):
    """The non-blocking collective of a communicator."""

    @collective
    def Iallreduce(self, tensor: Tensor, op: Op) -> WaitHandle:
        """Start :meth:`Allreduce`; ``tensor`` must not change until :meth:`Wait`."""
        return start(allreduce(self, tensor, op))
