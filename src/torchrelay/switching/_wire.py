"""Tensors by name in a block of shared memory, with a description for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from torchrelay.switching._contract import align

__all__ = ["pack", "unpack"]


def pack(
    block: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int
) -> list[dict[str, Any]]:
    """Write `tensors` into the uint8 `block` from the aligned byte `start` and return where they
    are.

    The caller has checked that they fit.
    """
    described, offset = [], start
    for name, tensor in tensors.items():
        target = block.narrow(0, offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor)
        described.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": offset,
            }
        )
        offset += align(tensor.nbytes)
    return described


def unpack(block: torch.Tensor, described: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that `described` lists."""
    tensors = {}
    for one in described:
        dtype: torch.dtype = getattr(torch, one["dtype"])
        size_bytes = math.prod(one["shape"]) * dtype.itemsize
        raw = block.narrow(0, one["offset"], size_bytes)
        tensors[one["name"]] = raw.view(dtype).view(one["shape"]).clone()
    return tensors
