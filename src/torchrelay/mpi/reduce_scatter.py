"""Reduce_scatter: every rank gets its part of the reduction of all ranks' tensors, cut along an axis.

The derivative of a sum hands every part's cotangent to all ranks: Allgather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._dtypes import Op, buffer, is_differentiable, mpi_op
from torchrelay.mpi._exchange import Blocks, axis_of, fresh, packed, placed
from torchrelay.mpi._meeting import MEETING_BYTES, Header, agree, described, exchange_headers
from torchrelay.mpi._record import Adjoint, Call, Started, is_differentiated, record
from torchrelay.mpi._settings import settings
from torchrelay.mpi.allreduce import DIFFERENTIABLE, Allreduce, reduce_locally

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["reduce_scatter"]


class ReduceScatter(Call):
    __slots__ = ("axis", "known", "length", "op")
    name = "Reduce_scatter"

    def __init__(
        self, comm: Communicator, op: Op, axis: int, length: int, known: Sequence[int] | None = None
    ) -> None:
        self.comm = comm
        self.op = op
        self.axis = axis
        self.length = length
        self.known = known  # what each rank gets along the axis, if none need be told

    def start(self, x: Tensor) -> Started:
        if self.known:
            headers = [Header(length, x.dtype, tuple(x.shape)) for length in self.known]
        else:
            headers = exchange_headers(self, x, self.length)
        agree(self, headers)
        lengths = [h.number for h in headers]
        if min(lengths) < 0 or sum(lengths) != x.shape[self.axis]:
            raise ArgumentError(
                f"{self.describe()}: the ranks ask for {lengths}, together {sum(lengths)}, but the tensors "
                f"have {x.shape[self.axis]} along axis {self.axis}"
            )
        if x.numel() > settings.max_count:
            total, before = Allreduce(self.comm, self.op).start(x), sum(lengths[: self.comm.rank])
            return Started(
                total.requests, lambda: total.result().narrow(self.axis, before, self.length).clone(), total
            )
        blocks = Blocks.cut(packed(x), lengths, self.axis)
        result = fresh(headers[0].block(self.axis, self.length), x.dtype)
        op, start = mpi_op(x.dtype, self.op), self.comm.mpi.Ireduce_scatter
        if self.known is None and x.nbytes >= MEETING_BYTES:  # all ranks are there
            self.comm.mpi.Reduce_scatter(buffer(blocks.memory), buffer(result), blocks.layout.counts, op)
            return Started([], lambda: placed(result, x))
        return Started(
            [start(buffer(blocks.memory), buffer(result), blocks.layout.counts, op)],
            lambda: placed(result, x),
            blocks,
        )

    def adjoint(self, grad: Tensor) -> Adjoint:
        from torchrelay.mpi.allgather import Allgather  # noqa: PLC0415 - each is the other's derivative

        return Adjoint(Allgather(self.comm.reverse.replace(convention="sum"), self.axis, self.known), grad)

    def differentiable(self, x: Tensor) -> bool:
        return is_differentiable(x.dtype) and self.op in DIFFERENTIABLE

    def batched(self) -> ReduceScatter:
        return ReduceScatter(self.comm, self.op, self.axis + 1, self.length, self.known)

    def signature(self, x: Tensor) -> str:
        if self.known:
            return f"{self.terms()} of {described(x, self.axis, self.known)}"
        return super().signature(x)

    def arguments(self) -> str:
        return f"{self.op.value}, axis={self.axis}"


def reduce_scatter(comm: Communicator, x: Tensor, op: Op, axis: int, numelem: int) -> Tensor:
    """This rank's ``numelem`` along ``axis`` of the reduction of all ranks' ``x``, which have one shape and dtype.

    MAX, MIN and PROD are reduced locally, after an Alltoall, where a derivative is wanted.
    """
    axis = axis_of(axis, x.ndim)
    call = ReduceScatter(comm, op, axis, numelem)
    if op is Op.SUM or not (is_differentiated() and call.differentiable(x)):
        return record(call, x)
    from torchrelay.mpi.alltoall import alltoall  # noqa: PLC0415 - its derivative needs this module

    parts = alltoall(comm, x.unsqueeze(0), 0, axis + 1, numelem)
    return reduce_locally(parts, op)
