"""Exchange with the neighbours in a grid.

What goes down comes from above, and the other way round. Axes are exchanged in turn, each with the
halos of the previous ones, which fills the corners.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import check_dtype, check_tensor, integers, is_integer
from torchrelay.mpi._memory import axis_of, check_memory
from torchrelay.mpi._point_to_point import Sendrecv, pass_over
from torchrelay.mpi._record import record
from torchrelay.mpi._transport import PROC_NULL, Transport

__all__ = ["Neighbors"]


class Neighbors(Comm):
    """A grid of ranks and its functions."""

    def __init__(self, transport: Transport, dims: list[int], periods: list[bool]) -> None:
        super().__init__(transport, is_owned=True)
        self.dims, self.periods = dims, periods
        self.coords = [int(coord) for coord in np.unravel_index(self.rank, dims)]
        self.neighbors = [(self._at(d, -1), self._at(d, 1)) for d in range(len(dims))]
        self._faces = self._copy()
        self._faces.announces = False  # they share control messages with those of the grid
        self._faces._use(self.lease.duplicate(transport, for_messages=True))

    def _at(self, dim: int, step: int) -> int:
        """Return the rank ``step`` away along ``dim``; PROC_NULL beyond a border."""
        coords = [coord + step * (d == dim) for d, coord in enumerate(self.coords)]
        if not (self.periods[dim] or 0 <= coords[dim] < self.dims[dim]):
            return PROC_NULL
        return int(np.ravel_multi_index(coords, self.dims, mode="wrap"))

    def _shift(self, x: Tensor, steps: Steps) -> Tensor:
        """Take the next step: send ``x``, and return what comes; zeros from no neighbour."""
        faces = self._faces.replace(self.convention, self.unreachable_policy)
        dest, source = steps.pop(0)
        return record(Sendrecv(faces, dest, 0, source, 0, tuple(x.shape), dtype=x.dtype), x)

    def Halo_exchange(
        self,
        tensor: Tensor,
        width: int | Sequence[int | tuple[int, int]] = 1,
        axes: Sequence[int] | None = None,
    ) -> Tensor:
        """Extend ``tensor`` by values of the neighbours. Blocking.

        Args:
            width: of the halo for each dimension of the grid: one number for both sides, or
                ``(lower, upper)``.
            axes: the axis of ``tensor`` along each dimension of the grid; default: 0, 1, ...

        Returns:
            A tensor that is longer by the widths along these axes; zeros beyond a border.

        Raises:
            ArgumentError: the tensor is shorter than the halo, or widths and axes do not fit the
                grid.
        """
        steps = [
            step for below, above in self.neighbors for step in ((above, below), (below, above))
        ]
        if is_compiling():
            return self._extended(tensor, width, axes, steps)
        try:
            return self._extended(tensor, width, axes, steps)
        except (ArgumentError, MismatchError):
            # The neighbours take these steps, and learn of it.
            for dest, source in steps:
                pass_over(self._faces, dest, 0, source, 0)
            raise

    def _extended(
        self,
        x: Tensor,
        width: int | Sequence[int | tuple[int, int]],
        axes: Sequence[int] | None,
        steps: Steps,
    ) -> Tensor:
        """Return the result of :meth:`Halo_exchange`, taking all ``steps``."""
        check_tensor(x)
        check_memory(x)
        check_dtype(x.dtype)
        dims = len(self.dims)
        axes = integers("axes", range(dims) if axes is None else axes)
        axes = [axis_of(axis, x) for axis in axes]
        widths = _sides(width, dims)
        if len(axes) != dims or len(widths) != dims:
            raise ArgumentError(
                f"a grid of {dims} dimensions needs {dims} axes and widths, not {axes} and {widths}"
            )
        for axis, (below, above) in zip(axes, widths, strict=True):
            length = x.shape[axis]
            if not 0 <= min(below, above) <= max(below, above) <= length:
                raise ArgumentError(
                    f"a halo of {(below, above)} needs as much along axis {axis}, which has "
                    f"{length}"
                )
        for axis, (below, above) in zip(axes, widths, strict=True):
            lower = self._shift(x.narrow(axis, x.shape[axis] - below, below), steps)
            upper = self._shift(x.narrow(axis, 0, above), steps)
            x = torch.cat([lower, x, upper], axis)
        return x


Steps = list[tuple[int, int]]
"""Where each message of an exchange goes, and where that comes from which is received with it."""


def _sides(widths: object, dims: int) -> list[tuple[int, int]]:
    """Return the widths of a halo on both sides, for each dimension of a grid."""
    given = [widths] * dims if is_integer(widths) else widths
    if not isinstance(given, Iterable):
        raise ArgumentError(f"width must be integers or pairs of them, not {given}")
    sides = [integers("width", [each] * 2 if is_integer(each) else each) for each in given]
    for each in sides:
        if len(each) != 2:
            raise ArgumentError(
                f"width must be an integer or one for each of two sides, not {each}"
            )
    return [(below, above) for below, above in sides]
