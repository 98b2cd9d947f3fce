"""Plain values as JSON: what JSON cannot distinguish is tagged, what it cannot hold is refused.

``None``, booleans, integers, floats, strings, lists and dictionaries with string keys are stored as
they are. Other values are dictionaries of one item, whose key is a tag:

=============  ===============================================  ================================
tag            content                                          for
=============  ===============================================  ================================
``$tuple``     items                                            tuples
``$items``     pairs of key and value                           dictionaries with other keys, or
                                                                with one that starts with ``$``
``$ordered``   pairs                                            ``collections.OrderedDict``
``$counter``   pairs                                            ``collections.Counter``
``$float``     ``nan``, ``inf`` or ``-inf``                     such floats
``$bytes``     base64                                           bytes
``$array``     dtype, shape, base64 of the elements             NumPy arrays
``$scalar``    dtype, base64                                    NumPy scalars
``$dtype``     ``float32``                                      ``torch.dtype``
``$device``    ``cuda:0``                                       ``torch.device``
``$size``      integers                                         ``torch.Size``
``$enum``      module, class, member (integer for some flags)   members of an ``enum.Enum``
=============  ===============================================  ================================

Nothing is run or imported to decode one: the class of an enum must be in an imported module.
"""

from __future__ import annotations

import base64
import binascii
import enum
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.checkpoint._state import MAX_DEPTH
from torchrelay.errors import ArgumentError, CorruptionError, MismatchError

__all__ = ["MAX_VALUE_BYTES", "decode", "encode"]

MAX_VALUE_BYTES = 64 << 20  # of an array or bytes: the manifest is read whole by every rank
_MAX_BITS = 1024  # Python limits the digits of an integer that it reads, at 4,300
_ARRAY_KINDS = "biufcmMSU"  # of NumPy dtypes: those whose elements are nothing but bytes


def encode(key: str, value: Any, depth: int = 0) -> Any:
    """Return ``value`` as JSON.

    Raises:
        ArgumentError: JSON cannot hold it; the message begins with its full path, from ``key``.
    """
    if depth > MAX_DEPTH:
        raise ArgumentError(f"{key[:80]}...: the value is nested more than {MAX_DEPTH} levels deep")
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is int:
        return _checked_int(key, value)
    if kind is list:
        return _encode_items(key, value, depth)
    if kind is dict and all(type(name) is str and not name.startswith("$") for name in value):
        return {name: encode(f"{key}.{name}", item, depth + 1) for name, item in value.items()}
    of = next((base for base in (enum.Enum, np.generic) if isinstance(value, base)), kind)
    if of in _TAGS:
        return {_TAGS[of]: _KINDS[_TAGS[of]].encode(key, value, depth)}
    raise ArgumentError(
        f"{key}: a checkpoint holds tensors and plain values (None, bool, int, float, str, bytes, "
        "list, tuple, dict, OrderedDict, Counter, NumPy arrays and scalars, enum members, "
        f"torch.dtype, torch.device, torch.Size), not {kind.__module__}.{kind.__qualname__}; save "
        "what it is made of"
    )


def _encode_items(key: str, items: Iterable[Any], depth: int) -> list[Any]:
    return [encode(f"{key}.{index}", item, depth + 1) for index, item in enumerate(items)]


def _encode_pairs(key: str, value: dict[Any, Any], depth: int) -> list[Any]:
    return [
        [encode(f"{key}: a key", name, depth + 1), encode(f"{key}.{name}", item, depth + 1)]
        for name, item in value.items()
    ]


def _checked_int(key: str, value: int) -> int:
    if value.bit_length() > _MAX_BITS:
        raise ArgumentError(
            f"{key}: the integer has {value.bit_length()} bits, more than {_MAX_BITS}; save its "
            "bytes or hex()"
        )
    return value


def _encode_bytes(key: str, value: bytes, depth: int = 0) -> str:
    _check_size(key, len(value))
    return base64.b64encode(value).decode()


def _encode_array(key: str, value: np.ndarray[Any, Any], depth: int) -> list[Any]:
    if value.dtype.kind not in _ARRAY_KINDS or not value.itemsize:
        raise ArgumentError(
            f"{key}: a checkpoint cannot hold NumPy arrays of {value.dtype}; save their fields, or "
            "lists"
        )
    _check_size(key, value.nbytes)
    return [value.dtype.str, list(value.shape), _encode_bytes(key, value.tobytes())]


def _encode_scalar(key: str, value: np.generic, depth: int) -> list[Any]:
    dtype, _, text = _encode_array(key, np.asarray(value), depth)
    return [dtype, text]


def _check_size(key: str, size_bytes: int) -> None:
    if size_bytes > MAX_VALUE_BYTES:
        raise ArgumentError(
            f"{key}: the value has {size_bytes} bytes, more than {MAX_VALUE_BYTES}; save "
            "it as a tensor, such as torch.from_numpy(array)"
        )


def _encode_enum(key: str, value: enum.Enum, depth: int) -> list[Any]:
    kind = type(value)
    members = kind.__members__
    name = value.name
    content = name if name in members else value.value  # the latter of flags that are combined
    if type(content) not in (str, int) or _enum_class(kind.__module__, kind.__qualname__) != kind:
        raise ArgumentError(
            f"{key}: {value!r} cannot be found again: {kind.__module__}.{kind.__qualname__} is not "
            "the name of its class; define the class at the top of a module"
        )
    return [kind.__module__, kind.__qualname__, content]


def _enum_class(module: str, name: str) -> Any:
    """Return the class of that name in an imported module; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, enum.EnumMeta) else None


def decode(key: str, value: Any) -> Any:
    """Return the value that :func:`encode` encoded.

    Raises:
        CorruptionError: ``value`` is not from :func:`encode`.
        MismatchError: the class of an enum member is not imported here, or lacks the member.
    """
    try:
        return _decode(key, value)
    except RecursionError:
        raise CorruptionError(f"{key}: the manifest holds a value nested too deep") from None


def _decode(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(key, item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((name for name in value if name.startswith("$")), None)
    if tag is None:
        return {name: _decode(key, item) for name, item in value.items()}
    try:
        (content,) = value.values()
        return _KINDS[tag].decode(key, content)
    except MismatchError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        pass
    raise CorruptionError(f"{key}: the manifest holds a value of an unknown kind, {tag!r}")


def _decode_dtype(key: str, name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(name)
    return found


def _decode_float(key: str, text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(text)
    return float(text)


def _decode_array(key: str, content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, text = content
    found = np.dtype(str(dtype))
    if found.kind not in _ARRAY_KINDS:
        raise ValueError(dtype)
    array: np.ndarray[Any, Any] = np.frombuffer(binascii.a2b_base64(text), found)
    shaped: np.ndarray[Any, Any] = array.reshape(shape).copy()
    return shaped


def _decode_scalar(key: str, content: Any) -> Any:
    dtype, text = content
    return _decode_array(key, (dtype, (), text))[()]


def _decode_enum(key: str, content: Any) -> Any:
    module, name, member = content
    found = _enum_class(module, name)
    if found is None:
        raise MismatchError(
            f"{key}: the value is a {module}.{name}, an enum that is not imported here; import "
            f"{module} before load()"
        )
    try:
        return found[member] if isinstance(member, str) else found(int(member))
    except (KeyError, ValueError):
        raise MismatchError(f"{key}: the enum {module}.{name} has no member {member!r}") from None


class _Kind(NamedTuple):
    """How values of a type are stored under a tag."""

    of: type
    encode: Callable[[str, Any, int], Any]
    decode: Callable[[str, Any], Any]


def _pairs(of: type) -> _Kind:
    """Return how dictionaries of a type are stored."""

    def decode_pairs(key: str, pairs: Any) -> Any:
        return of({_decode(key, name): _decode(key, item) for name, item in pairs})

    return _Kind(of, _encode_pairs, decode_pairs)


_KINDS: Mapping[str, _Kind] = {
    "$tuple": _Kind(tuple, _encode_items, lambda key, items: tuple(_decode(key, [*items]))),
    "$items": _pairs(dict),
    "$ordered": _pairs(OrderedDict),
    "$counter": _pairs(Counter),
    "$float": _Kind(float, lambda key, value, depth: str(value), _decode_float),
    "$bytes": _Kind(bytes, _encode_bytes, lambda key, text: binascii.a2b_base64(text)),
    "$array": _Kind(np.ndarray, _encode_array, _decode_array),
    "$scalar": _Kind(np.generic, _encode_scalar, _decode_scalar),
    "$dtype": _Kind(torch.dtype, lambda key, value, depth: str(value).split(".")[1], _decode_dtype),
    "$device": _Kind(
        torch.device, lambda key, value, depth: str(value), lambda key, name: torch.device(name)
    ),
    "$size": _Kind(
        torch.Size, lambda key, value, depth: list(value), lambda key, sizes: torch.Size(sizes)
    ),
    "$enum": _Kind(enum.Enum, _encode_enum, _decode_enum),
}
_TAGS = {kind.of: tag for tag, kind in _KINDS.items()}
