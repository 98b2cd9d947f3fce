"""Plain values as JSON: what JSON cannot distinguish is tagged, what it cannot hold is refused.

``None``, booleans, integers, floats, strings, lists and dictionaries with string keys are stored as
they are. Other values are dictionaries of one item, whose key is a tag:

==============  ==============================================  ================================
tag             content                                         for
==============  ==============================================  ================================
``$tuple``      items                                           tuples
``$named``      module, class, pairs of field and value         named tuples
``$set``        items, sorted                                   sets
``$frozenset``  items, sorted                                   frozen sets
``$deque``      largest length, items                           ``collections.deque``
``$items``      pairs of key and value                          dictionaries with other keys, or
                                                                with one that starts with ``$``
``$ordered``    pairs                                           ``collections.OrderedDict``
``$counter``    pairs                                           ``collections.Counter``
``$default``    name of a builtin type or null, pairs           ``collections.defaultdict``
``$float``      ``nan``, ``inf`` or ``-inf``                    such floats
``$complex``    real and imaginary part                         complex numbers
``$range``      start, stop, step                               ranges
``$slice``      start, stop, step                               slices
``$bytes``      base64                                          bytes
``$bytearray``  base64                                          bytearrays
``$stream``     base64, position                                ``io.BytesIO``
``$array``      dtype, shape, base64 of the elements            NumPy arrays
``$scalar``     dtype, base64                                   NumPy scalars
``$npdtype``    ``<f4``                                         NumPy dtypes
``$dtype``      ``float32``                                     ``torch.dtype``
``$layout``     ``strided``                                     ``torch.layout``
``$device``     ``cuda:0``                                      ``torch.device``
``$size``       integers                                        ``torch.Size``
``$version``    ``2.13.0+cpu``                                  ``torch.__version__``
``$enum``       module, class, member (integer for some flags)  members of an ``enum.Enum``
``$path``       text                                            ``pathlib.Path``
``$datetime``   in the format of ISO 8601                       ``datetime.datetime``
``$date``       in the format of ISO 8601                       ``datetime.date``
``$time``       in the format of ISO 8601                       ``datetime.time``
``$timedelta``  days, seconds, microseconds                     ``datetime.timedelta``
``$decimal``    text                                            ``decimal.Decimal``
``$fraction``   numerator, denominator                          ``fractions.Fraction``
``$uuid``       text                                            ``uuid.UUID``
==============  ==============================================  ================================

Nothing is run or imported to decode one: the class of an enum or a named tuple must be in an
imported module.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import math
import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from torchrelay.checkpoint._types import MAX_DEPTH
from torchrelay.checkpoint.format._kinds import KINDS, MAX_VALUE_BYTES, kind_of
from torchrelay.checkpoint.format._manifest import PARSING_ERRORS
from torchrelay.errors import (
    ArgumentError,
    CorruptionError,
    MismatchError,
    UnsupportedError,
)

__all__ = ["MAX_VALUE_BYTES", "PICKLE", "Encoded", "decode", "encode"]

PICKLE = "$pickle"  # the tag of a value that DCP pickled; its content says what is in it
_MAX_BITS = 1024  # Python limits the digits of an integer that it reads, at 4,300
# What to save instead of a value of a type that is refused.
_INSTEAD: list[tuple[Any, str]] = [
    (torch.Tensor, "a list of tensors rather than a set or a deque"),
    (torch.Generator, "its get_state()"),
    (np.random.Generator, "its bit_generator.state"),
    (np.random.RandomState, "its get_state()"),
    (random.Random, "its getstate()"),
    (np.ma.MaskedArray, "its data and its mask"),
    (np.ndarray, "numpy.asarray(value)"),
    (datetime.datetime | datetime.time, "its isoformat()"),
    (io.IOBase, "its content"),
    (type | datetime.tzinfo, "its name"),
    (torch.memory_format, "str(value)"),
    (Mapping, "dict(value)"),
    (int, "int(value)"),
    (float, "float(value)"),
    (complex, "complex(value)"),
    (str, "str(value)"),
    (bytes | bytearray | memoryview, "bytes(value)"),
    (tuple, "tuple(value)"),
    (set, "set(value)"),
    (frozenset, "frozenset(value)"),
    (Collection, "list(value)"),
]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A value that is encoded already."""

    content: Any


def encode(key: str, value: Any, depth: int = 0) -> Any:
    """Return ``value`` as JSON.

    Raises:
        ArgumentError: JSON cannot hold it; the message begins with its full path, from ``key``.
    """
    if depth > MAX_DEPTH:
        raise ArgumentError(f"{key[:80]}...: the value is nested more than {MAX_DEPTH} levels deep")

    def inner(key: str, item: Any) -> Any:
        return encode(key, item, depth + 1)

    kind = type(value)
    if value is None or kind in (bool, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is int:
        return _checked_int(key, value)
    if kind is list:
        return [inner(f"{key}.{index}", item) for index, item in enumerate(value)]
    if kind is dict and all(type(name) is str and not name.startswith("$") for name in value):
        return {name: inner(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, Encoded):
        return value.content
    found = kind_of(value)
    if found is not None:
        tag, stored = found
        return {tag: stored.encode(key, value, inner)}
    raise ArgumentError(
        f"{key}: a checkpoint holds tensors and plain values, not "
        f"{kind.__module__}.{kind.__qualname__}; save {_instead(value)}"
    )


def _checked_int(key: str, value: int) -> int:
    if value.bit_length() > _MAX_BITS:
        raise ArgumentError(
            f"{key}: the integer has {value.bit_length()} bits, more than {_MAX_BITS}; save its "
            "bytes or hex()"
        )
    return value


def _instead(value: Any) -> str:
    """Return what to save instead of a value that is refused."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclasses.asdict(value)"
    found = (what for kind, what in _INSTEAD if isinstance(value, kind))
    otherwise = "vars(value)" if getattr(value, "__dict__", None) else "what it is made of"
    return next(found, otherwise)


def decode(key: str, value: Any) -> Any:
    """Return the value that :func:`encode` encoded.

    Raises:
        CorruptionError: ``value`` is not from :func:`encode`.
        MismatchError: the class of an enum or of a named tuple is not imported here, or is another.
        UnsupportedError: it is of a kind that this version does not know, or pickled.
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
    if tag in KINDS or len(value) > 1:
        return _decode_tagged(key, tag, value)
    if tag == PICKLE:
        raise UnsupportedError(
            f"{key}: DCP stored it as a pickle that is not run ({value[tag]}); leave the key out "
            "of the state, or read the checkpoint with DCP's own reader"
        )
    raise UnsupportedError(
        f"{key}: the checkpoint has a value of a kind that this version of TorchRelay does not "
        f"know, {tag!r}; leave the key out of the state, or use a newer version"
    )


def _decode_tagged(key: str, tag: str, value: dict[str, Any]) -> Any:
    try:
        (content,) = value.values()
        return KINDS[tag].decode(key, content, _decode)
    except (CorruptionError, MismatchError, UnsupportedError, RecursionError):
        raise
    except (*PARSING_ERRORS, RuntimeError):
        raise CorruptionError(f"{key}: the manifest holds a damaged value ({tag})") from None
