"""Keys and values of callers: torch tensors and numpy arrays, checked before any access."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchrelay import _native
from torchrelay.errors import ArgumentError

__all__ = ["DTYPES", "address_of_keys", "address_of_values", "check_finite", "describe", "sum_rows"]

# Those that a table can have, as the native core names them.
DTYPES: dict[torch.dtype, _native.Dtype] = {
    getattr(torch, dtype.name): dtype for dtype in _native.table_dtypes()
}

# numpy has no bfloat16.
_NUMPY = {
    dtype: np.dtype(native.name) for dtype, native in DTYPES.items() if hasattr(np, native.name)
}


def describe(array: Any) -> str:
    """Describe what was passed, for messages."""
    if isinstance(array, torch.Tensor | np.ndarray):
        return f"{type(array).__name__} of {array.dtype} and shape {tuple(array.shape)}"
    return type(array).__name__


def _check(array: Any, dtype: torch.dtype, what: str) -> tuple[int, int]:
    """Return address and number of elements of a contiguous CPU array of ``dtype``."""
    is_tensor = isinstance(array, torch.Tensor)
    if not (is_tensor or isinstance(array, np.ndarray)):
        raise ArgumentError(
            f"{what} must be a torch tensor or a numpy array, not {describe(array)}"
        )
    wanted = dtype if is_tensor else _NUMPY.get(dtype)
    if wanted is None or array.dtype != wanted:  # for numpy, None equals float64
        raise ArgumentError(
            f"{what} must be {dtype}, not a {describe(array)}; nothing was read or written"
        )
    if is_tensor and not (
        array.is_cpu
        and array.layout is torch.strided
        and not array.is_neg()
        and not array.is_conj()
    ):
        raise ArgumentError(
            f"{what} must be a plain tensor in CPU memory, not on {array.device} ({array.layout})"
        )
    if not (array.is_contiguous() if is_tensor else array.flags.c_contiguous):
        strides = array.stride() if is_tensor else array.strides
        raise ArgumentError(
            f"{what} must be contiguous, but its strides are {strides}: use "
            f"{'.contiguous()' if is_tensor else 'numpy.ascontiguousarray'}"
        )
    return (array.data_ptr(), array.numel()) if is_tensor else (array.ctypes.data, array.size)


def address_of_keys(keys: Any) -> tuple[int, int]:
    """Return address and number of int64 keys, one-dimensional, contiguous, on the CPU."""
    address, count = _check(keys, torch.int64, "keys")
    if keys.ndim != 1:
        raise ArgumentError(f"keys must be one-dimensional, not a {describe(keys)}")
    return address, count


def address_of_values(values: Any, dtype: torch.dtype, *, written: bool) -> tuple[int, int]:
    """Return address and size in bytes of contiguous values on the CPU, of ``dtype``, of any
    shape.
    """
    address, count = _check(values, dtype, "values")
    if written and isinstance(values, np.ndarray) and not values.flags.writeable:
        raise ArgumentError("values is a read-only array, and would be written")
    if (
        written
        and isinstance(values, torch.Tensor)
        and values.requires_grad
        and torch.is_grad_enabled()
    ):
        raise ArgumentError("values requires grad and would be overwritten: pass values.detach()")
    return address, count * dtype.itemsize


def sum_rows(index: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``(count, dim)``: at each index, the sum of its ``rows``, ``(n, dim)``, in order."""
    return rows.new_zeros(count, rows.shape[1]).index_add_(0, index, rows)


def check_finite(keys: torch.Tensor | None, values: torch.Tensor, where: str) -> None:
    """Raise ArgumentError if a gradient is NaN or infinite: it would spoil rows that all processes
    share.

    Args:
        keys: of the rows that ``values``, ``(n, ...)``, are for, if each has one.
    """
    if values.sum().isfinite():  # cheaper than a mask; a sum that overflows is looked at again
        return
    bad = ~values.isfinite()
    if not bad.any():
        return
    which = "some gradients"
    if keys is not None:
        spoiled = keys[bad.reshape(len(keys), -1).any(dim=1).to(keys.device)]
        which = f"the gradients of {len(spoiled)} rows, the first that of key {int(spoiled[0])},"
    raise ArgumentError(
        f"{where}: {which} are NaN or infinite; nothing was applied. A torch.amp.GradScaler skips "
        "such steps"
    )
