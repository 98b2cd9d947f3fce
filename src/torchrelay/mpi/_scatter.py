"""Scatter: cut root's tensor along an axis into one part per rank.

The derivative gathers the cotangents of the parts on root. Tensors of other ranks have none.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._exchange import scatter_blocks
from torchrelay.mpi._layout import Blocks, axis_of, parts, with_length
from torchrelay.mpi._meeting import Header, described, exchange_headers
from torchrelay.mpi._memory import packed, placed
from torchrelay.mpi._record import Adjoint, Call, Started, conjugate, record

__all__ = ["scatter"]


class Scatter(Call):
    __slots__ = ("axis", "input_shape", "known", "length", "root")
    name = "Scatter"
    parameters = ("axis", "length", "root", "known")

    def __init__(
        self, comm: Comm, axis: int, length: int, root: int, known: Sequence[int] | None = None
    ) -> None:
        self.comm = comm
        self.axis = axis
        self.length = length
        self.root = root
        self.known = known  # what each rank gets along the axis, if that needs no exchange
        self.input_shape: Sequence[int] = ()

    def start(self, x: Tensor) -> Started:
        self.input_shape = tuple(x.shape)
        if self.known:
            headers = [Header(length, x.dtype, tuple(x.shape)) for length in self.known]
        else:
            headers = exchange_headers(self, x, self.length)
        whole, lengths = headers[self.root], [h.number for h in headers]
        axis = self._check(whole, lengths)
        blocks = Blocks.cut(packed(x), lengths, axis) if self.comm.rank == self.root else None
        layout = parts(whole.shape, tuple(lengths), axis)
        mine = layout.shapes[self.comm.rank]
        moving = scatter_blocks(self, blocks, whole.dtype, layout, self.root, self.known is None)
        return Started(
            moving.requests, lambda: placed(moving.received.memory.view(mine), x), moving
        )

    def _check(self, whole: Header, lengths: list[int]) -> int:
        ndim = len(whole.shape)
        if not -ndim <= self.axis < ndim:
            raise ArgumentError(f"{self.describe()}: root's tensor has {ndim} axes")
        axis = self.axis % ndim
        if min(lengths) < 0 or sum(lengths) != whole.shape[axis]:
            raise ArgumentError(
                f"{self.describe()}: the ranks ask for {lengths}, together {sum(lengths)}, but "
                f"root's tensor of shape {whole.shape} has {whole.shape[axis]} along axis {axis}"
            )
        return axis

    def adjoint(self, grad: Tensor) -> Adjoint:
        axis = self.axis % grad.ndim
        call = conjugate("Gather")(self.comm.reverse, axis, grad.shape[axis], self.root, self.known)
        is_root = self.comm.rank == self.root
        shape = with_length(grad.shape, axis, sum(self.known)) if self.known else self.input_shape
        # An empty tensor's sum is zero, and depends on it: differentiated again, all ranks reach
        # the Gather.
        return Adjoint(
            call, grad, lambda gathered: gathered if is_root else gathered.sum().expand(shape)
        )

    def batched(self) -> Scatter:
        return Scatter(
            self.comm,
            self.axis + 1 if self.axis >= 0 else self.axis,
            self.length,
            self.root,
            self.known,
        )

    def in_graph(self, x: Tensor) -> Scatter | None:
        if self.known:
            return self
        axis, size = axis_of(self.axis, x.ndim), self.comm.size
        if self.length * size != x.shape[axis]:
            return None
        return Scatter(self.comm, axis, self.length, self.root, [self.length] * size)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, self.length)

    def signature(self, x: Tensor) -> str:
        return f"{self.terms()} of {described(x, self.axis, self.known) if self.known else x.dtype}"

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


def scatter(comm: Comm, x: Tensor, axis: int, numelem: int, root: int) -> Tensor:
    """Return ``numelem`` of root's ``x`` along ``axis``. Other ranks' tensors are not read."""
    return record(Scatter(comm, axis, numelem, comm.check_rank(root)), x)
