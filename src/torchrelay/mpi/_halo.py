"""Exchange with the neighbours in a grid: Neighbor_alltoall and Halo_exchange.

What one rank sends down, its lower neighbour receives from above, so the derivative is the same
exchange of the cotangents. Axes are exchanged in turn, each with the halos of the previous ones,
which fills the corners.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.mpi._comm import CartComm
from torchrelay.mpi._layout import axis_of
from torchrelay.mpi._memory import packed, pieces, placed
from torchrelay.mpi._message import Incoming
from torchrelay.mpi._record import Adjoint, Call, Started, record
from torchrelay.mpi._transport import PROC_NULL, Testable

__all__ = ["halo_exchange", "neighbor_alltoall"]

TO_LOWER, TO_UPPER = 1, 2


class Faces(Call):
    """A flat tensor: ``lower`` elements for the lower neighbour, the rest for the upper."""

    __slots__ = ("dim", "lower")
    name = "Neighbor_exchange"
    parameters = ("dim", "lower")
    comm: CartComm

    def __init__(self, comm: CartComm, dim: int, lower: int) -> None:
        self.comm = comm
        self.dim = dim
        self.lower = lower

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


def neighbor_alltoall(comm: CartComm, x: Tensor) -> Tensor:
    """Send ``x[2 * d]`` and ``x[2 * d + 1]`` to the lower and upper neighbour along d.

    Returns:
        The neighbours' parts in the same places.
    """
    count = 2 * len(comm.dims)
    if x.ndim == 0 or x.shape[0] != count:
        raise ArgumentError(
            f"Neighbor_alltoall: the first axis has a part for each of {count} neighbours, not "
            f"{tuple(x.shape)}"
        )
    parts = [part for d in range(count // 2) for part in exchange(comm, d, x[2 * d], x[2 * d + 1])]
    return torch.stack(parts)


def halo_exchange(
    comm: CartComm,
    x: Tensor,
    width: int | Sequence[int | tuple[int, int]],
    axes: Sequence[int] | None = None,
) -> Tensor:
    """Return ``x`` with a halo of the neighbours' values; see ``Halo_exchange``.

    Raises:
        ArgumentError: the tensor is shorter than the halo, or widths and axes do not fit the grid.
    """
    dims = len(comm.dims)
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
                f"a halo of {(below, above)} needs as much along axis {axis}, which has {length}"
            )
        if below or above:
            lower, upper = exchange(
                comm, dim, x.narrow(axis, 0, above), x.narrow(axis, length - below, below)
            )
            x = torch.cat([lower, x, upper], axis)
    return x
