"""Memory for transports: contiguous, on a device they take, in pieces that one call can count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torchrelay._torch import is_host_memory
from torchrelay.errors import ArgumentError
from torchrelay.mpi._settings import settings

if TYPE_CHECKING:
    from torchrelay.mpi._transport import Transport

__all__ = ["fresh", "fresh_like", "packed", "pieces", "placed"]

HUGE_BYTES = 1 << 22  # from here on numpy asks for huge pages


def packed(x: Tensor, transport: Transport | None = None) -> Tensor:
    """Return ``x``, or a copy of it, as contiguous memory that ``transport`` takes.

    Without one, on this host.

    Raises:
        ArgumentError: it is sparse, or has no values.
    """
    if is_host_memory(x):
        return x
    if x.layout is not torch.strided or x.is_meta:
        raise ArgumentError(
            f"a tensor of layout {x.layout} on device {x.device} cannot be communicated"
        )
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if not (x.is_cpu or (transport is not None and transport.takes(x.device))):
        x = x.cpu()
    return x.contiguous()


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Allocate memory; large blocks by numpy, with huge pages, whose first touch is cheaper."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < HUGE_BYTES or not (device is None or device.type == "cpu"):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(size_bytes, np.uint8)).view(dtype).view(*shape)


def fresh_like(x: Tensor) -> Tensor:
    """Allocate memory like contiguous ``x``."""
    return torch.empty_like(x) if x.nbytes < HUGE_BYTES else fresh(x.shape, x.dtype, x.device)


def placed(y: Tensor, x: Tensor) -> Tensor:
    """Return ``y`` on the device of ``x``."""
    return y if y.device == x.device else y.to(x.device)


def pieces(*tensors: Tensor, most_bytes: int = 1 << 62) -> Sequence[tuple[Tensor, ...]]:
    """Split flat tensors of equal length into parts of ``max_count`` elements and so many bytes."""
    count, itemsize = tensors[0].numel(), tensors[0].itemsize
    if count <= settings.max_count and count * itemsize <= most_bytes:
        return (tensors,)
    most = min(settings.max_count, most_bytes // itemsize)
    flat = [tensor.view(-1) for tensor in tensors]
    return [
        tuple(tensor[start : start + most] for tensor in flat) for start in range(0, count, most)
    ]
