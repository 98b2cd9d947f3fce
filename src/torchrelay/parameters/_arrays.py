"""Keys and values of callers: torch tensors and numpy arrays, checked before any access."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchrelay import _native, _torch
from torchrelay.deferred import is_deferred, materialize_tensor
from torchrelay.errors import ArgumentError

__all__ = [
    "DTYPES",
    "Keys",
    "address_of_keys",
    "address_of_values",
    "check_finite",
    "check_integers",
    "check_range",
    "check_shape",
    "describe",
    "empty",
    "is_dense",
    "keys_of",
    "sum_rows",
    "values_of",
    "whole_number",
]

Keys = torch.Tensor | np.ndarray[Any, Any] | Sequence[Any] | int

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


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """Return ``value`` as an int of at least ``least``. Raises ArgumentError if it is none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ArgumentError(f"{name} = {value!r}: it must be a whole number of at least {least}")
    return number


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has memory with its elements: it is not sparse, on meta, fake, ..."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not _torch.dispatches_itself(tensor)
    )


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return CPU memory, also inside ``deferred_init``."""
    with _torch.plain_torch():
        return torch.empty(shape, dtype=dtype, device="cpu")


def _plain(what: str, given: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return ``given``, as a contiguous tensor in CPU memory.

    Args:
        dtype: of the tensor, if ``given`` is made of lists.

    Raises:
        ArgumentError: it is not a dense tensor with values, an array, or made of lists of numbers.
    """
    if isinstance(given, torch.Tensor):
        if not is_dense(given) and is_deferred(given):
            given = materialize_tensor(given)
        if not is_dense(given):
            raise ArgumentError(
                f"{what} must be a dense tensor with values of its own, not a {describe(given)} "
                f"on {given.device} ({given.layout})"
            )
        found: torch.Tensor = given
        return found.detach().cpu().contiguous().resolve_conj().resolve_neg()
    try:
        array = np.asarray(given)
        if not isinstance(given, np.ndarray) and not array.size and dtype is None:
            array = array.astype(np.int64)  # of lists without numbers
        native = array.dtype.newbyteorder("=")
        with _torch.plain_torch():  # it is real, also inside deferred_init
            tensor: torch.Tensor = torch.from_numpy(np.require(array, native, ["C", "W"]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{what} must be a tensor, an array, or lists of numbers, not a {describe(given)}: "
            f"{error}"
        ) from None
    return tensor.to(dtype) if dtype and not isinstance(given, np.ndarray) else tensor


def check_integers(keys: torch.Tensor) -> None:
    """Raise ArgumentError unless ``keys`` are integers."""
    if keys.is_floating_point() or keys.is_complex() or keys.dtype is torch.bool:
        raise ArgumentError(f"keys are {keys.dtype}; they must be integers")


def keys_of(keys: Keys) -> torch.Tensor:
    """Return the keys of a caller as int64, contiguous, on the CPU. Raises ArgumentError."""
    found = _plain("keys", keys)
    check_integers(found)
    if found.dtype is torch.uint64 and (found.view(torch.int64) < 0).any():
        raise ArgumentError("keys are uint64, and one is larger than any int64")
    return found.to(torch.int64)


def values_of(values: Any, keys: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a caller for ``keys``, ``(n, dim)``, on the CPU. Raises
    ArgumentError.
    """
    found = _plain("values", values, dtype)
    check_shape(keys, found, dim)
    return found.reshape(-1, dim)


def check_shape(keys: torch.Tensor, values: torch.Tensor | np.ndarray[Any, Any], dim: int) -> None:
    """Raise ArgumentError unless ``values`` has a row for each key."""
    if not isinstance(values, torch.Tensor | np.ndarray):
        raise ArgumentError(f"out must be a tensor, not {describe(values)}")
    if tuple(values.shape) != (*keys.shape, dim):
        raise ArgumentError(
            f"values of shape {tuple(values.shape)} for keys of shape {tuple(keys.shape)}: they "
            f"must have the shape {(*keys.shape, dim)}"
        )


def check_range(keys: torch.Tensor, num_keys: int) -> None:
    """Raise ArgumentError if a key is out of range, with its index in ``keys``.

    Args:
        num_keys: 0 if keys are created at first use, from any range.
    """
    bad = ((keys < 0) | (keys >= num_keys)).nonzero()
    if num_keys and len(bad):
        index = tuple(bad[0].tolist())
        where = f"keys[{', '.join(map(str, index))}]" if index else "key"
        raise ArgumentError(
            f"{where} = {int(keys[index])} is out of range: this table has the keys 0 to "
            f"{num_keys - 1}; nothing was read or written"
        )


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
        array.is_cpu and is_dense(array) and not array.is_neg() and not array.is_conj()
    ):
        raise ArgumentError(
            f"{what} must be a plain tensor in CPU memory, not a {describe(array)} on "
            f"{array.device} ({array.layout})"
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
