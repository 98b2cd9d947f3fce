"""Tensors as the Open Inference Protocol v2 writes them: JSON lists, or raw bytes behind the JSON.

The binary form is the protocol's `binary_tensor_data` extension: the header
`Inference-Header-Content-Length` says where the JSON ends, and each tensor's `binary_data_size` how
many bytes it takes behind it, in order.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torchrelay import _torch
from torchrelay.errors import ArgumentError, CapacityError, UnsupportedError

__all__ = [
    "DATATYPES",
    "HEADER",
    "TensorEntry",
    "check_mode",
    "check_tensors",
    "datatype_of",
    "decode",
    "dtype_of",
    "encode",
    "split_body",
]

HEADER = "Inference-Header-Content-Length"

DATATYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
# The codes of `array` that hold the values of each of them.
_CODES = dict(zip(_NAMES, "BBHIQbhiqddfd", strict=True))
_MAX_DIMENSIONS = 32
_MAX_SIZE = 1 << 48  # in values; torch computes sizes in bytes in 64 bits
# What JSON may take: while it is read or written, a server does nothing else.
_JSON_BYTES = 16 << 20
_JSON_VALUES = 1 << 20


class TensorEntry(NamedTuple):
    """A tensor as the protocol describes it."""

    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    binary_data_size: int | None = None


def dtype_of(datatype: object) -> torch.dtype:
    """Return torch's dtype for the protocol's `datatype`."""
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise UnsupportedError(
            f"datatype {datatype!r} is not served; the choices are {', '.join(DATATYPES)}"
        )
    return DATATYPES[datatype]


def datatype_of(dtype: torch.dtype) -> str:
    """Return the protocol's name of `dtype`."""
    if dtype not in _NAMES:
        raise UnsupportedError(f"the protocol has no datatype for {dtype}")
    return _NAMES[dtype]


def check_mode() -> None:
    """Raise :class:`ArgumentError` where torch makes tensors without memory."""
    if _torch.fake_mode_active():
        raise ArgumentError("call outside of FakeTensorMode: tensors have no memory within it")


def check_tensors(inputs: object) -> None:
    """Raise :class:`ArgumentError` unless `inputs` are dense tensors by name."""
    check_mode()
    if not isinstance(inputs, Mapping):
        raise ArgumentError(
            f"the inputs are a {type(inputs).__name__}; pass a dict of tensors by name, such as "
            '{"x": tensor}'
        )
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"input {name!r} is a {type(value).__name__}, not a tensor; pass "
                "torch.as_tensor(value)"
            )
        if (
            value.layout is not torch.strided
            or value.is_meta
            or _torch.is_transformed(value)
            or _torch.dispatches_itself(value)
        ):
            raise ArgumentError(
                f"input {name!r}, a {type(value).__name__} of layout {value.layout} on device "
                f"{value.device}, has no memory of its own; pass a dense tensor that has values, "
                "and call outside of torch.func's transforms"
            )


def split_body(body: bytes | bytearray, header_length: str | None) -> tuple[memoryview, memoryview]:
    """Return the JSON of a request's or response's body, and the bytes behind it.

    Raises:
        ArgumentError: `header_length`, the value of :data:`HEADER`, is not that of its JSON.
        CapacityError: its JSON is too large.
    """
    try:
        length = len(body) if header_length is None else int(header_length)
    except ValueError:
        length = -1
    if not 0 <= length <= len(body):
        raise ArgumentError(f"{HEADER} is {header_length!r}; the body has {len(body)} bytes")
    if length > _JSON_BYTES:
        raise CapacityError(
            f"the JSON takes {length} bytes, and at most {_JSON_BYTES} are read; send the tensors "
            "in binary, which is faster"
        )
    view = memoryview(body)
    return view[:length], view[length:]


def decode(entries: Iterable[TensorEntry], raw: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors that `entries` (the protocol's `inputs` or `outputs`) describe.

    Raises:
        ArgumentError: a shape is malformed, or sizes disagree.
        UnsupportedError: a datatype is not served.
    """
    tensors: dict[str, torch.Tensor] = {}
    offset = 0
    for name, datatype, shape, data, size in entries:
        dtype = _dtype_for(name, datatype, shape)
        if name in tensors:
            raise ArgumentError(f"input {name!r} appears twice")
        if size is None:
            tensors[name] = _from_list(name, data, dtype, shape)
            continue
        if data is not None:
            raise ArgumentError(f"input {name!r} has both data and binary_data_size; send one")
        size_bytes = math.prod(shape) * dtype.itemsize
        if size != size_bytes or offset + size > len(raw):
            raise ArgumentError(
                f"input {name!r} of shape {shape} takes {size_bytes} bytes; binary_data_size is "
                f"{size!r} and {len(raw) - offset} bytes are left"
            )
        tensors[name] = _from_bytes(raw[offset : offset + size], dtype).reshape(shape)
        offset += size
    if offset != len(raw):
        raise ArgumentError(f"{len(raw) - offset} bytes behind the JSON belong to no input")
    return tensors


def encode(
    tensors: Mapping[str, torch.Tensor], binary: Iterable[str] | bool
) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """Return the protocol's entries for `tensors` and the bytes of those that are `binary`.

    Raises:
        CapacityError: one of the others is too large for JSON.
        UnsupportedError: a number in one of them is infinite or NaN.
    """
    names = set(tensors) if binary is True else set(binary or ())
    entries, raw = [], []
    for name, tensor in tensors.items():
        entry: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(tensor.dtype),
            "shape": list(tensor.shape),
        }
        if name in names:
            # A view: whoever joins the parts copies them, once.
            plain = tensor.resolve_neg().cpu().contiguous()
            raw.append(_torch.flat_bytes(plain).numpy().data)
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        elif tensor.numel() > _JSON_VALUES:
            raise CapacityError(
                f"{name!r} has {tensor.numel()} values, and JSON takes at most {_JSON_VALUES}; ask "
                "for it with the parameter binary_data"
            )
        else:
            entry["data"] = data = tensor.flatten().tolist()
            # The sum is the faster way to see that nothing is infinite.
            is_finite = not tensor.is_floating_point() or math.isfinite(sum(data))
            if not is_finite and not tensor.isfinite().all():
                raise UnsupportedError(
                    f"{name!r} has infinite values or NaN, which JSON cannot represent; ask for "
                    "it with the parameter binary_data"
                )
        entries.append(entry)
    return entries, raw


def _dtype_for(name: str, datatype: str, shape: list[int]) -> torch.dtype:
    """Return the dtype of a tensor whose shape is one."""
    if (
        len(shape) > _MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape)
        or math.prod(max(1, size) for size in shape) > _MAX_SIZE
    ):
        raise ArgumentError(
            f"input {name!r} has the shape {shape!r}; it must be a list of at most "
            f"{_MAX_DIMENSIONS} sizes, and their product at most {_MAX_SIZE}"
        )
    try:
        return dtype_of(datatype)
    except UnsupportedError as error:
        raise UnsupportedError(f"input {name!r}: {error}") from error


def _from_list(name: str, data: object, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if data is None:
        raise ArgumentError(f"input {name!r} has neither data nor the parameter binary_data_size")
    values: list[Any] = data if isinstance(data, list) else [data]
    while (types := set(map(type, values))) == {list}:
        values = list(itertools.chain.from_iterable(values))
    kinds = {bool} if dtype is torch.bool else {int, float} if dtype.is_floating_point else {int}
    if not types <= kinds:
        found = ", ".join(sorted(one.__name__ for one in types - kinds))
        raise ArgumentError(f"the data of input {name!r} is not {dtype}: it has values of {found}")
    if len(values) != math.prod(shape):
        raise ArgumentError(f"input {name!r} of shape {shape} comes with {len(values)} values")
    if not values:
        return torch.empty(shape, dtype=dtype, device="cpu")
    code = _CODES[dtype]
    with contextlib.suppress(OverflowError):
        packed = array.array(code, values)
        tensor = torch.frombuffer(packed, dtype=torch.float64 if code == "d" else dtype)
        tensor = tensor.view(shape).to(dtype)
        # The sum is the faster way to see that nothing is infinite.
        is_finite = code == "f" and math.isfinite(sum(packed))
        if not dtype.is_floating_point or is_finite or tensor.isfinite().all():
            return tensor
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    raise ArgumentError(
        f"the data of input {name!r} is not {dtype}, which holds {limits.min:g} to {limits.max:g}"
    )


def _from_bytes(raw: memoryview, dtype: torch.dtype) -> torch.Tensor:
    if not raw:
        return torch.empty(0, dtype=dtype, device="cpu")
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    # Any other byte than 0 or 1 is no bool.
    return data != 0 if dtype is torch.bool else data.view(dtype)
