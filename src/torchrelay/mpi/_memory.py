"""Memory for transports: contiguous, on a device they take, in parts.

Tensors are cut and joined along an axis, and into pieces that one call can count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrelay._torch import is_host_memory
from torchrelay.errors import ArgumentError
from torchrelay.mpi._dtypes import check_dtype, check_integer, check_tensor, integers
from torchrelay.mpi._settings import settings

if TYPE_CHECKING:
    from torchrelay.mpi._transport import Transport

__all__ = [
    "Blocks",
    "Layout",
    "any_length",
    "axis_of",
    "check_counts",
    "check_memory",
    "equal_part",
    "fresh",
    "fresh_like",
    "layout",
    "packed",
    "parts",
    "pieces",
    "placed",
    "with_length",
]

HUGE_BYTES = 1 << 22  # from here on numpy asks for huge pages
HOST = torch.device("cpu")  # also where torch's default device is another


def check_memory(x: Tensor) -> None:
    """Raise :class:`ArgumentError` if ``x`` is sparse, or has no values."""
    if x.layout is not torch.strided or x.is_meta:
        raise ArgumentError(
            f"a tensor of layout {x.layout} on device {x.device} cannot be communicated; pass a "
            "dense one that has values"
        )


def packed(x: Tensor, transport: Transport | None = None) -> Tensor:
    """Return ``x``, or a copy of it, as contiguous memory that ``transport`` takes.

    Without one, on this host.

    Raises:
        ArgumentError: it is sparse, has no values, or none of ``DTYPES``.
    """
    check_dtype(x.dtype)
    if is_host_memory(x):
        return x
    check_memory(x)
    if x._is_zerotensor():  # of which even a clone has no memory
        x = torch.zeros_like(x)
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if not (x.is_cpu or (transport is not None and transport.takes(x.device))):
        x = x.cpu()
    return x.contiguous()


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> Tensor:
    """Allocate memory; large blocks by numpy, with huge pages, whose first touch is cheaper."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < HUGE_BYTES or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    memory = torch.from_numpy(np.empty(size_bytes, np.uint8)).view(dtype).view(*shape)
    return memory.data  # no view for autograd, so that results may be changed in place


def fresh_like(x: Tensor) -> Tensor:
    """Allocate memory like contiguous ``x``."""
    return torch.empty_like(x) if x.nbytes < HUGE_BYTES else fresh(x.shape, x.dtype, x.device)


def placed(y: Tensor, x: Tensor) -> Tensor:
    """Return ``y`` on the device of ``x``."""
    return y if y.device == x.device else y.to(x.device)


def pieces(*tensors: Tensor) -> Sequence[tuple[Tensor, ...]]:
    """Split flat tensors of equal length into parts of ``max_count`` elements."""
    count, most = tensors[0].numel(), settings.max_count
    if count <= most:
        return (tensors,)
    flat = [tensor.view(-1) for tensor in tensors]
    return [
        tuple(tensor[start : start + most] for tensor in flat) for start in range(0, count, most)
    ]


def axis_of(axis: int, x: Tensor) -> int:
    """Return ``axis`` of ``x`` counted from the front.

    Raises:
        ArgumentError: there is no such axis, or ``x`` is no tensor.
    """
    check_tensor(x)
    check_integer("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ArgumentError(f"axis {axis} of a tensor that has {x.ndim} axes")
    return axis % x.ndim


def check_counts(counts: Sequence[int], size: int, total: int | None = None) -> list[int]:
    """Return ``counts``, one for each of ``size`` ranks, together ``total`` if it is given.

    Raises:
        ArgumentError: they are not.
    """
    found = integers("counts", counts)
    if len(found) != size or min(found) < 0 or total not in (None, sum(found)):
        together = "" if total is None else f", together {total}"
        raise ArgumentError(f"{found} must be {size} numbers{together}")
    return found


def with_length(shape: Sequence[int], axis: int, length: int) -> list[int]:
    """Return ``shape`` with ``length`` along ``axis``."""
    result = list(shape)
    result[axis] = length
    return result


def any_length(x: Tensor, axis: int) -> tuple[object, ...]:
    """Return the shape of ``x`` with "any" at ``axis``."""
    shape: list[object] = list(x.shape)
    shape[axis] = "any"
    return tuple(shape)


def equal_part(x: Tensor, axis: int, size: int) -> int:
    """Return the length along ``axis`` of each of ``size`` equal parts of ``x``.

    Raises:
        ArgumentError: it cannot be cut into equal parts.
    """
    axis = axis_of(axis, x)
    length = x.shape[axis]
    if length % size:
        raise ArgumentError(f"{length} along axis {axis} cannot be cut into {size} equal parts")
    return length // size


class Layout(NamedTuple):
    """Positions of the consecutive parts of a tensor."""

    shapes: tuple[tuple[int, ...], ...]
    axis: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    total: int
    whole: tuple[int, ...]  # the tensor's shape
    is_whole: bool  # whether that is how the tensor itself lies


@functools.lru_cache(maxsize=128)
def layout(shapes: tuple[tuple[int, ...], ...], axis: int) -> Layout:
    """Return the layout of parts of these ``shapes``. Cached."""
    first, counts = shapes[0], tuple(math.prod(shape) for shape in shapes)
    whole = (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])
    starts = (0, *accumulate(counts[:-1]))
    return Layout(shapes, axis, counts, starts, sum(counts), whole, math.prod(first[:axis]) == 1)


@functools.lru_cache(maxsize=128)
def parts(shape: tuple[int, ...], lengths: tuple[int, ...], axis: int) -> Layout:
    """Return the layout of parts like ``shape`` with ``lengths`` along ``axis``."""
    return layout(tuple((*shape[:axis], length, *shape[axis + 1 :]) for length in lengths), axis)


class Blocks(NamedTuple):
    """Contiguous memory that holds parts of a tensor."""

    memory: Tensor
    layout: Layout

    @classmethod
    def empty(cls, dtype: torch.dtype, layout: Layout, device: torch.device = HOST) -> Blocks:
        """Allocate memory for the parts."""
        shape = layout.whole if layout.is_whole else (layout.total,)
        return cls(fresh(shape, dtype, device), layout)

    @classmethod
    def cut(cls, x: Tensor, lengths: Sequence[int], axis: int) -> Blocks:
        """Cut contiguous ``x`` along ``axis``, without a copy if the parts are consecutive."""
        layout = parts(tuple(x.shape), tuple(lengths), axis)
        if layout.is_whole:
            return cls(x, layout)
        blocks = cls.empty(x.dtype, layout, x.device)
        for part, given in zip(
            blocks.tensors(), x.split_with_sizes(list(lengths), axis), strict=True
        ):
            part.copy_(given)
        return blocks

    def tensors(self) -> list[Tensor]:
        flat = self.memory.view(-1).split_with_sizes(self.layout.counts)
        return [part.view(shape) for part, shape in zip(flat, self.layout.shapes, strict=True)]

    def joined(self) -> Tensor:
        """Return the tensor, without a copy if possible."""
        return self.memory if self.layout.is_whole else torch.cat(self.tensors(), self.layout.axis)
