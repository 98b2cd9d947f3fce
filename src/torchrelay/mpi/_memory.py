"""Memory for MPI: contiguous, on this host, in pieces that one call can count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._settings import settings

__all__ = ["fresh", "packed", "pieces", "placed"]

HUGE_BYTES = 1 << 22  # from here on numpy asks for huge pages


def packed(x: Tensor) -> Tensor:
    """Return ``x``, or a copy of it, as contiguous memory of this host.

    Raises:
        ArgumentError: it is sparse, or has no values.
    """
    if is_plain(x):
        return x
    if x.layout is not torch.strided or x.is_meta:
        raise ArgumentError(
            f"a tensor of layout {x.layout} on device {x.device} cannot be communicated"
        )
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.device.type != "cpu":
        x = x.cpu()
    return x.contiguous()


def is_plain(x: Tensor) -> bool:
    """Return whether ``x`` is contiguous memory of this host."""
    return (
        x.layout is torch.strided
        and x.is_cpu
        and x.is_contiguous()
        and not (x.is_neg() or x.is_conj())
    )


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate memory; large blocks by numpy, with huge pages, whose first touch is cheaper."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(size_bytes, np.uint8)).view(dtype).view(*shape)


def placed(y: Tensor, x: Tensor) -> Tensor:
    """Return ``y`` on the device of ``x``."""
    return y if x.is_cpu else y.to(x.device)


def pieces(*tensors: Tensor) -> Sequence[tuple[Tensor, ...]]:
    """Split flat tensors of equal length into parts that fit one MPI call."""
    count, most = tensors[0].numel(), settings.max_count
    if count <= most:
        return (tensors,)
    flat = [tensor.view(-1) for tensor in tensors]
    return [
        tuple(tensor[start : start + most] for tensor in flat) for start in range(0, count, most)
    ]
