"""Exchange with the neighbours in a grid: Neighbor_alltoall and Halo_exchange.

What one rank sends down, its lower neighbour receives from above, so the derivative is the same
exchange of the cotangents. Axes are exchanged in turn, each with the halos of the previous ones,
which fills the corners.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.mpi._comm import CartComm
from torchrelay.mpi._layout import axis_of
from torchrelay.mpi._memory import packed, pieces, placed
from torchrelay.mpi._message import Incoming
from torchrelay.mpi._record import Adjoint, Call, Started, record
from torchrelay.mpi._transport import PROC_NULL, Testable

__all__ = ["Neighbors"]

TO_LOWER, TO_UPPER = 1, 2


@dataclass(slots=True, eq=False)
class Faces(Call):
    """A flat tensor: ``lower`` elements for the lower neighbour, the rest for the upper."""

    name = "Neighbor_exchange"
    comm: CartComm
    dim: int
    lower: int

    def forward(self, x: Tensor) -> Tensor:
        """Exchange messages, which only their two ranks compare."""
        source = packed(x)
        return placed(self.start(source, (), False).finish(self), x)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        result = torch.zeros_like(x)  # stays zero beyond the border of the grid
        faces, (below, above) = self.comm.faces, self.comm.neighbors[self.dim]
        sent, received = (
            x.split_with_sizes(self._cut(x, self.lower)),
            result.split_with_sizes(self._cut(x, x.numel() - self.lower)),
        )
        requests: list[Testable] = []
        for part, peer, tag in ((received[0], below, TO_UPPER), (received[1], above, TO_LOWER)):
            requests += [
                Incoming(faces.irecv(piece, peer, tag), piece, self)
                for (piece,) in pieces(part, most_bytes=faces.most_bytes)
            ]
        for part, peer, tag in ((sent[0], below, TO_LOWER), (sent[1], above, TO_UPPER)):
            requests += [
                faces.isend(piece, peer, tag)
                for (piece,) in pieces(part, most_bytes=faces.most_bytes)
            ]
        return Started(requests, lambda: result, x)

    @staticmethod
    def _cut(x: Tensor, first: int) -> list[int]:
        return [first, x.numel() - first]

    def adjoint(self, grad: Tensor) -> Adjoint:
        reverse: CartComm = self.comm.reverse  # type: ignore[assignment]
        return Adjoint(Faces(reverse, self.dim, grad.numel() - self.lower), grad)

    def batched(self) -> Call:
        raise UnsupportedError("exchange with neighbours under torch.vmap")

    def arguments(self) -> str:
        return f"dim={self.dim}"

    def peers(self) -> Iterable[int]:
        return [peer for peer in self.comm.neighbors[self.dim] if peer != PROC_NULL]


def exchange(comm: CartComm, dim: int, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Send ``lower`` and ``upper`` to the neighbours along ``dim`` and return theirs."""
    flat = torch.cat([lower.reshape(-1), upper.reshape(-1)])
    got = record(Faces(comm, dim, lower.numel()), flat)
    from_lower, from_upper = got.split_with_sizes([upper.numel(), lower.numel()])
    return from_lower.view(upper.shape), from_upper.view(lower.shape)


class Neighbors(CartComm):
    """The functions of a grid of ranks."""

    def Neighbor_alltoall(self, tensor: Tensor) -> Tensor:
        """Exchange with all neighbours. Blocking.

        Args:
            tensor: of shape ``(2 * len(dims), ...)``; parts ``2 * d`` and ``2 * d + 1`` go to the
                lower and the upper neighbour along dimension d.

        Returns:
            The neighbours' parts in the same places; zeros at a border.
        """
        dims = len(self.dims)
        if tensor.ndim == 0 or tensor.shape[0] != 2 * dims:
            raise ArgumentError(
                f"Neighbor_alltoall: the first axis has a part for each of {2 * dims} neighbours, "
                f"not {tuple(tensor.shape)}"
            )
        pairs = [(d, tensor[2 * d], tensor[2 * d + 1]) for d in range(dims)]
        return torch.stack([part for pair in pairs for part in exchange(self, *pair)])

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
        axes = list(range(dims)) if axes is None else [axis_of(axis, x.ndim) for axis in axes]
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
                lower, upper = exchange(
                    self, dim, x.narrow(axis, 0, above), x.narrow(axis, length - below, below)
                )
                x = torch.cat([lower, x, upper], axis)
        return x
