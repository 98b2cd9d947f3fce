"""Scatter: cut root's tensor along an axis into one part per rank.

The derivative gathers the cotangents of the parts on root. Tensors of other ranks have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import CODES, DTYPES, check_dtype
from torchrelay.mpi._headers import MAX_NUMBERS, Fields
from torchrelay.mpi._layout import Blocks, any_length, axis_of, parts, with_length
from torchrelay.mpi._memory import fresh
from torchrelay.mpi._record import Adjoint, Call, Started, conjugate, record

__all__ = ["scatter"]

MAX_DIMS = MAX_NUMBERS - 3


@dataclass(slots=True, eq=False)
class Scatter(Call):
    name = "Scatter"
    axis: int
    length: int
    root: int
    known: Sequence[int] | None = None
    input_shape: Sequence[int] = field(default=(), init=False)

    def numbers(self, x: Tensor) -> Sequence[int]:
        """Return the length of this rank's part, and dtype and shape, which count on root."""
        self.input_shape = tuple(x.shape)
        if x.ndim > MAX_DIMS:
            raise ArgumentError(f"{self.describe()}: {x.ndim} axes are more than {MAX_DIMS}")
        check_dtype(x.dtype)
        rest = [0] * (MAX_DIMS - x.ndim)
        return (self.length, CODES[x.dtype], x.ndim, *x.shape, *rest)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        _, code, ndim, *shape = numbers[self.root]
        whole, lengths = tuple(shape[:ndim]), [length for length, *_ in numbers]
        axis = self._check(whole, lengths)
        blocks = Blocks.cut(x, lengths, axis) if self.comm.rank == self.root else None
        layout = parts(whole, tuple(lengths), axis)
        mine = layout.shapes[self.comm.rank]
        received = fresh(mine, DTYPES[code], x.device)
        requests = self.comm.transport.scatter(blocks, received, self.root, layout.total, arrived)
        return Started(requests, lambda: received, blocks)

    def _check(self, whole: tuple[int, ...], lengths: list[int]) -> int:
        """Return the axis, counted from the front, or raise on all ranks alike."""
        ndim = len(whole)
        if not -ndim <= self.axis < ndim:
            raise ArgumentError(f"{self.describe()}: root's tensor has {ndim} axes")
        axis = self.axis % ndim
        if min(lengths) < 0 or sum(lengths) != whole[axis]:
            raise ArgumentError(
                f"{self.describe()}: the ranks ask for {lengths}, together {sum(lengths)}, but "
                f"root's tensor of shape {whole} has {whole[axis]} along axis {axis}"
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
        return replace(self, axis=self.axis + (self.axis >= 0))

    def in_graph(self, x: Tensor) -> Scatter | None:
        if self.known:
            return self
        axis, size = axis_of(self.axis, x.ndim), self.comm.size
        if self.length * size != x.shape[axis]:
            return None
        return Scatter(self.comm, axis, self.length, self.root, [self.length] * size)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, self.length)

    def fields(self, x: Tensor) -> Fields:
        if not self.known:
            return (self.function, self.arguments())
        return (self.function, self.arguments(), x.dtype, any_length(x, self.axis, self.known))

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


def scatter(comm: Comm, x: Tensor, axis: int, numelem: int, root: int) -> Tensor:
    """Return ``numelem`` of root's ``x`` along ``axis``. Other ranks' tensors are not read."""
    return record(Scatter(comm, axis, numelem, comm.check_rank(root)), x)
