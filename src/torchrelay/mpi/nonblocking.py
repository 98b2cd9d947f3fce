"""Collectives in two steps: started by ``Iallreduce`` and its kin, ended by ``Wait``.

Backward the steps change places: ``Wait``'s backward starts the derivative's communication, and the start's
backward waits for it. MPI matches collectives by the order in which they are started, and ranks may wait in
different orders, so a cotangent that comes early is kept until those of later collectives have been started.

All ranks give tensors of one shape, since telling lengths would have to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.errors import ArgumentError
from torchrelay.mpi import _chain
from torchrelay.mpi._record import Adjoint, Call, Started, record

if TYPE_CHECKING:
    pass

__all__ = ["CollectiveHandle", "start"]


class _Operation:
    """What start and wait share: the communication forward, and that of the running backward pass."""

    __slots__ = ("adjoint", "back", "call", "grad", "pass_id", "recorded", "shape", "started", "twin")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.started: Started | None = None
        self.shape: torch.Size | None = None  # of the result
        self.pass_id = -1  # the backward pass in which the derivative was started
        self.grad: tuple[int, Tensor] | None = None  # the pass it came in, and the cotangent
        self.back: CollectiveHandle | None = None
        self.adjoint = Adjoint(None, torch.empty(0))
        self.twin: CollectiveHandle | None = None
        self.recorded: list[_Operation] = []  # those of the same chain, in the order of their starts

    def issue(self, until: _Operation | None = None, like: Tensor | None = None) -> None:
        """Starts the derivatives of those whose cotangent is there, last first, down to one that lacks it.

        Down to ``until``, missing cotangents are zeros: their results were not waited for, or not used.
        """
        now = _torch.backward_id()
        for operation in reversed(self.recorded):
            if operation.pass_id == now:
                continue
            if operation.grad is None or operation.grad[0] != now:
                if until is None or like is None:
                    return
                assert operation.shape is not None, f"{operation.call.describe()} was never waited for"
                operation.grad = (now, like.new_zeros(operation.shape))
            operation.pass_id = now
            operation.adjoint = operation.call.adjoint(operation.grad[1])
            if operation.adjoint.call is not None:
                operation.back = start(operation.adjoint.call, operation.adjoint.grad)
            if operation is until:
                return


class CollectiveHandle:
    """A collective under way: give it to ``Wait``."""

    __slots__ = ("dummy", "operation")

    def __init__(self, operation: _Operation, dummy: Tensor) -> None:
        self.operation = operation
        self.dummy = dummy

    def Wait(self) -> Tensor:
        """The collective's result."""
        return record(_Wait(self.operation), self.dummy)


class _Start(Call):
    __slots__ = ("operation",)
    name = "Istart"

    def __init__(self, operation: _Operation) -> None:
        self.comm = operation.call.comm
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        self.operation.started = self.operation.call.start(x)
        return torch.zeros((), dtype=x.dtype, device=x.device)

    def backward(self, grad: Tensor, *saved: Tensor) -> Tensor:
        operation = self.operation
        operation.issue(until=operation, like=grad)
        result = operation.adjoint.grad if operation.back is None else operation.back.Wait()
        operation.back, operation.grad = None, None
        return operation.adjoint.complete(result)

    def tangent(self, tangent: Tensor, *saved: Tensor) -> Tensor:
        self.operation.twin = start(self.operation.call, tangent)
        return self.operation.twin.dummy

    def differentiable(self, x: Tensor) -> bool:
        return self.operation.call.differentiable(x)

    def signature(self, x: Tensor) -> str:
        return f"I{self.operation.call.signature(x)}"

    def describe(self) -> str:
        return f"I{self.operation.call.describe()}"


class _Wait(Call):
    __slots__ = ("operation",)
    name = "Wait"
    everyone = False  # ranks may wait in different orders

    def __init__(self, operation: _Operation) -> None:
        self.comm = operation.call.comm
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        started, self.operation.started = self.operation.started, None
        if started is None:
            raise ArgumentError(f"{self.operation.call.describe()} was already waited for")
        result = started.finish(self)
        self.operation.shape = result.shape
        return result

    def backward(self, grad: Tensor, *saved: Tensor) -> None:
        self.operation.grad = (_torch.backward_id(), grad)
        self.operation.issue()

    def tangent(self, tangent: Tensor, *saved: Tensor) -> Tensor:
        assert self.operation.twin is not None
        return self.operation.twin.Wait()

    def describe(self) -> str:
        return f"Wait for {self.operation.call.describe()}"


def start(call: Call, x: Tensor) -> CollectiveHandle:
    """Starts ``call`` on ``x``, which must not be changed until ``Wait``."""
    operation, chain = _Operation(call), _chain.current()
    dummy = record(_Start(operation), x)
    if dummy.requires_grad:
        operation.recorded = chain.operations
        chain.operations.append(operation)
    return CollectiveHandle(operation, dummy)
