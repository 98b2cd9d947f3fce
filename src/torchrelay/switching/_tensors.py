"""Tensors as the Open Inference Protocol v2 writes them: JSON lists, or raw bytes behind the JSON.

The binary form is the protocol's `binary_tensor_data` extension: the header
`Inference-Header-Content-Length` says where the JSON ends, and each tensor's `binary_data_size` how
many bytes it takes behind it, in order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from torchrelay._torch import flat_bytes
from torchrelay.errors import ArgumentError, CapacityError, UnsupportedError

__all__ = [
    "DATATYPES",
    "HEADER",
    "Body",
    "check_tensors",
    "datatype_of",
    "decode",
    "dtype_of",
    "dump",
    "encode",
    "parse_body",
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
_MAX_DIMENSIONS = 32
# What JSON may take: while it is read or written, a server does nothing else.
_JSON_BYTES = 16 << 20
_JSON_VALUES = 1 << 20

Body = tuple[dict[str, Any], memoryview]


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


def check_tensors(inputs: object) -> None:
    """Raise :class:`ArgumentError` unless `inputs` are tensors by name."""
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


def parse_body(body: bytes, header_length: str | None) -> Body:
    """Split a request or response body into its JSON object and the bytes behind it.

    Raises:
        ArgumentError: it is not of the protocol's form.
        CapacityError: its JSON is too large.
    """
    try:
        length = len(body) if header_length is None else int(header_length)
    except ValueError:
        length = -1
    if not 0 <= length <= len(body):
        raise ArgumentError(f"{HEADER} is {header_length!r}, the body has {len(body)} bytes")
    if length > _JSON_BYTES:
        raise CapacityError(
            f"the JSON takes {length} bytes, and at most {_JSON_BYTES} are read; send the tensors "
            "in binary, which is faster"
        )
    try:
        header = _DECODER.decode(body[:length].decode())
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"the body's JSON cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ArgumentError(f"the body's JSON is a {type(header).__name__}, not an object")
    return header, memoryview(body)[length:]


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_ENCODER = json.JSONEncoder(allow_nan=False)


def decode(entries: object, raw: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors that `entries` (the protocol's `inputs` or `outputs`) describe.

    Raises:
        ArgumentError: an entry is malformed, or sizes disagree.
        UnsupportedError: a datatype is not served.
    """
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ArgumentError("inputs must be a list of objects")
    tensors: dict[str, torch.Tensor] = {}
    offset = 0
    for entry in entries:
        name, dtype, shape = _described(entry)
        if name in tensors:
            raise ArgumentError(f"input {name!r} appears twice")
        parameters = entry.get("parameters", {})
        if not isinstance(parameters, dict) or parameters.keys() - {"binary_data_size"}:
            raise UnsupportedError(
                f"input {name!r}: of its parameters {parameters!r} only binary_data_size is "
                "supported"
            )
        size = parameters.get("binary_data_size")
        if size is None:
            tensors[name] = _from_list(name, entry.get("data"), dtype, shape)
            continue
        size_bytes = math.prod(shape) * dtype.itemsize
        if type(size) is not int or size != size_bytes or offset + size > len(raw):
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
            raw.append(flat_bytes(tensor.contiguous()).numpy().data)
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        elif tensor.numel() > _JSON_VALUES:
            raise CapacityError(
                f"{name!r} has {tensor.numel()} values, and JSON takes at most {_JSON_VALUES}; ask "
                "for it with the parameter binary_data"
            )
        else:
            entry["data"] = tensor.flatten().tolist()
        entries.append(entry)
    return entries, raw


def dump(header: dict[str, Any]) -> bytes:
    """Return the JSON of a response or request.

    Raises:
        UnsupportedError: a number in it is infinite or NaN.
    """
    try:
        return _ENCODER.encode(header).encode()
    except ValueError as error:
        raise UnsupportedError(
            "an output has infinite values or NaN, which JSON cannot represent; ask for it with "
            "the parameter binary_data"
        ) from error


def _described(entry: dict[str, Any]) -> tuple[str, torch.dtype, list[int]]:
    name, shape = entry.get("name"), entry.get("shape")
    if not isinstance(name, str):
        raise ArgumentError("an input has no name")
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or len(shape) > _MAX_DIMENSIONS:  # type: ignore[arg-type]
        raise ArgumentError(f"input {name!r} has the shape {shape!r}; it must be a list of sizes")
    return name, dtype_of(entry.get("datatype")), shape  # type: ignore[return-value]


def _from_list(name: str, data: object, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    try:
        values = np.array(data if isinstance(data, list) else None)
        if values.dtype == object:  # integers of more than 64 bits among others
            values = np.array([float(value) for value in values.flat])
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"the data of input {name!r} is not {dtype}: {error}") from error
    if values.size != math.prod(shape):
        raise ArgumentError(f"input {name!r} of shape {shape} comes with {values.size} values")
    if values.size == 0:
        return torch.empty(shape, dtype=dtype)
    kind = _kind(dtype)
    if values.dtype.kind not in _KINDS[kind]:
        raise ArgumentError(f"the data of input {name!r} is not {dtype}: it is {values.dtype}")
    tensor = torch.from_numpy(values).to(dtype).reshape(shape)
    if kind != "b":
        limits = torch.finfo(dtype) if kind == "f" else torch.iinfo(dtype)
        fits = limits.min <= values.min() and values.max() <= limits.max
        # What is a little larger is rounded to the limit.
        if not fits and not (kind == "f" and tensor.isfinite().all()):
            raise ArgumentError(
                f"the data of input {name!r} is not {dtype}, which holds {limits.min:g} to "
                f"{limits.max:g}"
            )
    return tensor


# Kinds of numpy's arrays that hold values of each kind of dtype.
_KINDS = {"b": "b", "i": "iu", "f": "iuf"}


def _kind(dtype: torch.dtype) -> str:
    return "b" if dtype is torch.bool else "f" if dtype.is_floating_point else "i"


def _from_bytes(raw: memoryview, dtype: torch.dtype) -> torch.Tensor:
    if not raw:
        return torch.empty(0, dtype=dtype)
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    # Any other byte than 0 or 1 is no bool.
    return data != 0 if dtype is torch.bool else data.view(dtype)
