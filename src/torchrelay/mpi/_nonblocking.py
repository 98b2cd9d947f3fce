"""Non-blocking collectives: started by ``Iallreduce`` and others, completed by ``Wait``.

In a backward pass the steps exchange their roles: ``Wait``'s backward starts the communication of
the derivative, and the start's backward waits for it. MPI matches collectives by the order of their
starts, and ranks may wait in different orders. A cotangent that arrives early is therefore kept
until those of later collectives have been started.

All ranks pass tensors of one shape, or equal counts, because exchanging them would block. MAX, MIN
and PROD are gathered if a derivative is wanted, and ``Wait`` reduces them: their derivatives need
further communication, and ranks may wait in different orders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.errors import ArgumentError
from torchrelay.mpi import _chain, _compiled
from torchrelay.mpi._headers import Comparison, Fields
from torchrelay.mpi._memory import packed, placed
from torchrelay.mpi._record import Adjoint, Call, Started, record, unchanged
from torchrelay.mpi._transport import Testable
from torchrelay.mpi._wait import abandon

__all__ = ["CollectiveHandle", "start"]

NO_ADJOINT = Adjoint(None, torch.empty(0))


@dataclass(slots=True, eq=False)
class _Operation:
    """State shared by start and wait, forward and in the running backward pass."""

    call: Call
    started: Started | None = None
    shape: torch.Size | None = None  # of the result
    pass_id: int = -1  # the backward pass in which the derivative was started
    grad: tuple[int, Tensor] | None = None  # the pass it came in, and the cotangent
    back: CollectiveHandle | None = None
    adjoint: Adjoint = NO_ADJOINT  # of that pass
    tangent_handle: CollectiveHandle | None = None
    chain: _chain.Chain | None = None  # which holds those started before and after it
    position: int = 0

    def __del__(self) -> None:
        if self.started is not None:  # it was never waited for
            abandon(self.started)

    def issue(self, until: _Operation | None = None, like: Tensor | None = None) -> None:
        """Start the derivatives whose cotangents have arrived, last first.

        Down to ``until``, missing cotangents are zeros: their results were not waited for or not
        used.
        """
        now = _torch.backward_id()
        if self.chain is None:
            return
        for operation in reversed(self.chain.operations):
            if operation.position > self.chain.begun:
                continue  # started since, by this backward pass itself
            if operation.pass_id != now and not operation._issue(
                now, like if until is not None else None
            ):
                return
            if operation is until:
                return

    def _issue(self, now: int, like: Tensor | None) -> bool:
        """Start the derivative; return False if there is no cotangent and no ``like``."""
        if self.grad is None or self.grad[0] != now:
            if like is None:
                return False
            assert self.shape is not None, f"{self.call.describe()} was never waited for"
            self.grad = (now, like.new_zeros(self.shape))
        self.pass_id = now
        self.adjoint = self.call.adjoint(self.grad[1])
        if self.adjoint.call is not None:
            self.back = start(self.adjoint.call, self.adjoint.grad)
        return True


@dataclass(slots=True, eq=False)
class CollectiveHandle:
    """A started collective, to be passed to ``Wait``."""

    operation: _Operation
    dummy: Tensor
    complete: Callable[[Tensor], Tensor]

    @_compiled.eager_only
    def Wait(self) -> Tensor:
        """Return the result of the collective. Blocks."""
        return self.complete(record(_Wait(self.operation.call.comm, self.operation), self.dummy))


@dataclass(slots=True, eq=False)
class _Start(Call):
    name = "Istart"
    operation: _Operation

    def forward(self, x: Tensor) -> Tensor:
        call = self.operation.call
        requests: list[Testable] = []
        source = packed(x, self.comm.transport)
        if self.comm.size > 1:
            requests.append(Comparison(self, self.fields(source)))
        started = call.start(source, call.known_numbers(source), False)
        requests += started.requests
        self.operation.started = Started(
            requests, lambda: placed(started.result(), x), (source, started)
        )
        return torch.zeros((), dtype=x.dtype, device=x.device)

    def backward(self, grad: Tensor, *saved: Tensor) -> Tensor:
        operation = self.operation
        operation.issue(until=operation, like=grad)
        result = operation.adjoint.grad if operation.back is None else operation.back.Wait()
        operation.back, operation.grad = None, None
        return operation.adjoint.complete(result)

    def tangent(self, tangent: Tensor, *saved: Tensor) -> Tensor:
        self.operation.tangent_handle = start(self.operation.call, tangent)
        return self.operation.tangent_handle.dummy

    def differentiable(self, x: Tensor) -> bool:
        return self.operation.call.differentiable(x)

    def fields(self, x: Tensor) -> Fields:
        name, *others = self.operation.call.fields(x)
        return (f"I{name}", *others)

    def describe(self) -> str:
        return f"I{self.operation.call.describe()}"


@dataclass(slots=True, eq=False)
class _Wait(Call):
    name = "Wait"
    everyone = False  # ranks may wait in different orders
    operation: _Operation

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
        assert self.operation.tangent_handle is not None
        return self.operation.tangent_handle.Wait()

    def describe(self) -> str:
        return f"Wait for {self.operation.call.describe()}"


@_compiled.eager_only
def start(
    call: Call,
    x: Tensor,
    complete: Callable[[Tensor], Tensor] = unchanged,
) -> CollectiveHandle:
    """Start ``call`` on ``x``, which must not change until ``Wait``."""
    operation, chain = _Operation(call), _chain.current()
    dummy = record(_Start(call.comm, operation), x)
    if dummy.requires_grad:
        operation.chain, operation.position = chain, len(chain.names)
        chain.operations.append(operation)
    return CollectiveHandle(operation, dummy, complete)
