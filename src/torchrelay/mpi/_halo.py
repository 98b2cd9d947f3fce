"""Exchange with the neighbours in a grid.

What goes down comes from above, and the other way round. Axes are exchanged in turn, each with the
halos of the previous ones, which fills the corners.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._memory import axis_of
from torchrelay.mpi._point_to_point import Sendrecv
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

    def _exchange(self, dim: int, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Send ``lower`` and ``upper`` to the neighbours along ``dim`` and return theirs."""
        below, above = self.neighbors[dim]
        return self._shift(upper, above, below), self._shift(lower, below, above)

    def _shift(self, x: Tensor, dest: int, source: int) -> Tensor:
        """Send ``x`` to ``dest``, and return what comes from ``source``; zeros from none."""
        faces = self._faces.replace(self.convention, self.unreachable_policy)
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
        x, dims = tensor, len(self.dims)
        axes = [axis_of(axis, x) for axis in (range(dims) if axes is None else axes)]
        widths = [width] * dims if isinstance(width, int) else list(width)
        if len(axes) != dims or len(widths) != dims:
            raise ArgumentError(
                f"a grid of {dims} dimensions needs {dims} axes and widths, not {axes} and {widths}"
            )
        for dim, (axis, each) in enumerate(zip(axes, widths, strict=True)):
            below, above = (each, each) if isinstance(each, int) else each
            length = x.shape[axis]
            if not 0 <= max(below, above) <= length or min(below, above) < 0:
                raise ArgumentError(
                    f"a halo of {(below, above)} needs as much along axis {axis}, which has "
                    f"{length}"
                )
            if below or above:
                lower, upper = self._exchange(
                    dim, x.narrow(axis, 0, above), x.narrow(axis, length - below, below)
                )
                x = torch.cat([lower, x, upper], axis)
        return x
