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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi import _chain, _compiled
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._copies import Bcast, allgather, gather, scatter
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._exchanges import alltoall, alltoallv
from torchrelay.mpi._headers import Comparison, Fields
from torchrelay.mpi._memory import axis_of, equal_part, packed, placed
from torchrelay.mpi._record import Adjoint, Call, Started, record, unchanged
from torchrelay.mpi._reductions import (
    Exscan,
    Scan,
    linear_allreduce,
    reduce,
    reduce_scatter,
    scan,
)
from torchrelay.mpi._transport import Testable
from torchrelay.mpi._wait import abandon

__all__ = ["CollectiveHandle", "NonBlocking"]

NO_ADJOINT = Adjoint(None, torch.empty(0))


@dataclass(slots=True, eq=False)
class _Operation:
    """State shared by start and wait, forward and in the running backward pass."""

    call: Call
    started: Started | None = None
    like: tuple[torch.Size, torch.dtype, torch.device] | None = None  # of the result
    back: CollectiveHandle | None = None
    adjoint: Adjoint = NO_ADJOINT  # of that pass
    tangent_handle: CollectiveHandle | None = None
    answer: _chain.Answer | None = None

    def __del__(self) -> None:
        if self.started is not None:  # it was never waited for
            abandon(self.started)

    def begin(self, grad: Tensor | None) -> None:
        """Start the derivative; of zeros, if the result was not waited for or not used."""
        if grad is None:
            assert self.like is not None, f"{self.call.describe()} was never waited for"
            shape, dtype, device = self.like
            grad = torch.zeros(shape, dtype=dtype, device=device)
        self.adjoint = self.call.adjoint(grad)
        if self.adjoint.call is not None:
            self.back = start(self.adjoint.call, self.adjoint.grad)


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
        assert operation.answer is not None
        operation.answer.force()
        result = operation.adjoint.grad if operation.back is None else operation.back.Wait()
        operation.back = None
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
        self.operation.like = (result.shape, result.dtype, result.device)
        return result

    def backward(self, grad: Tensor, *saved: Tensor) -> None:
        if self.operation.answer is not None:
            self.operation.answer.give(grad)

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
        place, number = call.comm.reverse.transport, next(_chain.Answer.numbers)
        operation.answer = _chain.Answer(chain, place, number, operation.begin)
    return CollectiveHandle(operation, dummy, complete)


class NonBlocking(Comm):
    """The non-blocking collectives of a communicator.

    Do not change tensors before Wait. All ranks pass tensors of one shape, or the same counts.
    """

    def Iallreduce(self, tensor: Tensor, op: Op) -> CollectiveHandle:
        """Start :meth:`Allreduce`."""
        return start(*linear_allreduce(self, tensor, op))

    def Ibcast(self, tensor: Tensor, root: int) -> CollectiveHandle:
        """Start a broadcast of root's tensor into new memory."""
        return start(Bcast(self, self.check_rank(root)), tensor)

    def Ireduce(self, tensor: Tensor, op: Op, root: int) -> CollectiveHandle:
        """Start a reduction to root into new memory, with zeros elsewhere."""
        return start(*reduce(self, tensor, op, root))

    def Iscan(self, tensor: Tensor, op: Op) -> CollectiveHandle:
        """Start :meth:`Scan`."""
        return start(*scan(Scan, self, tensor, op))

    def Iexscan(self, tensor: Tensor, op: Op) -> CollectiveHandle:
        """Start :meth:`Exscan`."""
        return start(*scan(Exscan, self, tensor, op))

    def Igather(self, tensor: Tensor, gatheraxis: int, root: int) -> CollectiveHandle:
        """Start :meth:`Gather` of equal shapes."""
        return self.Igatherv(tensor, self._equal(tensor, gatheraxis), root, gatheraxis)

    def Igatherv(
        self, tensor: Tensor, counts: Sequence[int], root: int, axis: int = 0
    ) -> CollectiveHandle:
        """Start :meth:`Gatherv`; rank r sends ``counts[r]``."""
        return start(*gather(self, tensor, axis, root, counts))

    def Iallgather(self, tensor: Tensor, gatheraxis: int) -> CollectiveHandle:
        """Start :meth:`Allgather` of equal shapes."""
        return self.Iallgatherv(tensor, self._equal(tensor, gatheraxis), gatheraxis)

    def Iallgatherv(self, tensor: Tensor, counts: Sequence[int], axis: int = 0) -> CollectiveHandle:
        """Start :meth:`Allgatherv`; rank r sends ``counts[r]``."""
        return start(*allgather(self, tensor, axis, counts))

    def Iscatter(self, tensor: Tensor, scatteraxis: int, root: int) -> CollectiveHandle:
        """Start :meth:`Scatter` in equal parts; all ranks pass a tensor of root's shape."""
        return self.Iscatterv(tensor, self._parts(tensor, scatteraxis), root, scatteraxis)

    def Iscatterv(
        self, tensor: Tensor, counts: Sequence[int], root: int, axis: int = 0
    ) -> CollectiveHandle:
        """Start :meth:`Scatterv`; all ranks pass a tensor of root's shape."""
        return start(*scatter(self, tensor, axis, root, list(counts)))

    def Ialltoall(self, tensor: Tensor, gatheraxis: int, scatteraxis: int) -> CollectiveHandle:
        """Start :meth:`Alltoall` in equal parts."""
        g, s = axis_of(gatheraxis, tensor), axis_of(scatteraxis, tensor)
        numelem = tensor.shape[s] if g == s else equal_part(tensor, s, self.size)
        return start(*alltoall(self, tensor, g, s, numelem, True))

    def Ialltoallv(
        self, tensor: Tensor, sendcounts: Sequence[int], recvcounts: Sequence[int], axis: int = 0
    ) -> CollectiveHandle:
        """Start :meth:`Alltoallv`; rank r sends ``recvcounts[r]``."""
        return start(*alltoallv(self, tensor, sendcounts, axis, recvcounts))

    def Ireduce_scatter(self, tensor: Tensor, op: Op, scatteraxis: int = 0) -> CollectiveHandle:
        """Start :meth:`Reduce_scatter_block`."""
        return self.Ireduce_scatterv(tensor, op, self._parts(tensor, scatteraxis), scatteraxis)

    def Ireduce_scatterv(
        self, tensor: Tensor, op: Op, counts: Sequence[int], axis: int = 0
    ) -> CollectiveHandle:
        """Start :meth:`Reduce_scatter`; rank r gets ``counts[r]``."""
        return start(*reduce_scatter(self, tensor, op, axis, list(counts)))

    def _equal(self, x: Tensor, axis: int) -> list[int]:
        axis = axis_of(axis, x)
        return [x.shape[axis]] * self.size

    def _parts(self, x: Tensor, axis: int) -> list[int]:
        return [equal_part(x, axis, self.size)] * self.size
