"""The kinds of plain values that are stored under a tag, and how: see :mod:`._values`.

An encoder gets the value's key, for errors, the value, and a function that encodes what is inside
of it; a decoder gets the same for what is stored.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import decimal
import enum
import fractions
import io
import json
import pathlib
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.torch_version import TorchVersion

from torchrelay.errors import ArgumentError, MismatchError

__all__ = ["KINDS", "MAX_VALUE_BYTES", "Kind", "imported_class", "kind_of"]

MAX_VALUE_BYTES = 64 << 20  # of an array or bytes: the manifest is read whole by every rank
_ARRAY_KINDS = "biufcmMSU"  # of NumPy dtypes: those whose elements are nothing but bytes
_FACTORIES = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
Inner = Callable[[str, Any], Any]


class Kind(NamedTuple):
    """How values of a type are stored under a tag."""

    of: type
    encode: Callable[[str, Any, Inner], Any]
    decode: Callable[[str, Any, Inner], Any]


class _Named:
    """Stands for the types of named tuples."""


def kind_of(value: Any) -> tuple[str, Kind] | None:
    """Return the tag and the kind of a value; None if there is none."""
    kind = next((base for base in _BASES if isinstance(value, base)), type(value))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        kind = _Named
    tag = _TAGS.get(kind)
    return None if tag is None else (tag, KINDS[tag])


# Collections.


def _encode_items(key: str, items: Iterable[Any], inner: Inner) -> list[Any]:
    return [inner(f"{key}.{index}", item) for index, item in enumerate(items)]


def _encode_set(key: str, items: Iterable[Any], inner: Inner) -> list[Any]:
    """Return items in an order that is equal on all ranks."""
    return sorted((inner(f"{key}: an item", item) for item in items), key=json.dumps)


def _items(of: type, encode: Callable[[str, Any, Inner], Any] = _encode_items) -> Kind:
    """Return how collections of a type are stored."""
    return Kind(of, encode, lambda key, items, inner: of(inner(key, [*items])))


def _encode_pairs(key: str, value: Mapping[Any, Any], inner: Inner) -> list[Any]:
    return [
        [inner(f"{key}: a key", name), inner(f"{key}.{name}", item)] for name, item in value.items()
    ]


def _decode_pairs(key: str, pairs: Any, inner: Inner) -> dict[Any, Any]:
    return {inner(key, name): inner(key, item) for name, item in pairs}


def _pairs(of: type) -> Kind:
    """Return how dictionaries of a type are stored."""
    return Kind(of, _encode_pairs, lambda key, pairs, inner: of(_decode_pairs(key, pairs, inner)))


def _encode_default(key: str, value: defaultdict[Any, Any], inner: Inner) -> list[Any]:
    factory = value.default_factory
    name = getattr(factory, "__name__", None)
    if factory is not None and _FACTORIES.get(str(name)) is not factory:
        raise ArgumentError(
            f"{key}: a checkpoint holds no functions, such as the default factory of this "
            "defaultdict; save dict(value)"
        )
    return [name, _encode_pairs(key, value, inner)]


def _decode_default(key: str, content: Any, inner: Inner) -> defaultdict[Any, Any]:
    name, pairs = content
    return defaultdict(None if name is None else _FACTORIES[name], _decode_pairs(key, pairs, inner))


def _encode_deque(key: str, value: deque[Any], inner: Inner) -> list[Any]:
    return [value.maxlen, _encode_items(key, value, inner)]


def _decode_deque(key: str, content: Any, inner: Inner) -> deque[Any]:
    limit, items = content
    return deque(inner(key, [*items]), limit)


# Bytes and arrays.


def _base64(key: str, value: bytes | bytearray | memoryview, inner: Inner | None = None) -> str:
    if len(value) > MAX_VALUE_BYTES:
        raise ArgumentError(
            f"{key}: the value has {len(value)} bytes, more than {MAX_VALUE_BYTES}; save it as a "
            "tensor: torch.frombuffer(bytearray(value), dtype=torch.uint8) of bytes, "
            "torch.from_numpy(value) of an array"
        )
    return base64.b64encode(value).decode()


def _encode_stream(key: str, value: io.BytesIO, inner: Inner) -> list[Any]:
    if value.closed:
        raise ArgumentError(f"{key}: the stream is closed; save it before")
    return [_base64(key, value.getvalue()), value.tell()]


def _decode_stream(key: str, content: Any, inner: Inner) -> io.BytesIO:
    text, position = content
    stream = io.BytesIO(binascii.a2b_base64(text))
    stream.seek(position)
    return stream


def _encode_array(key: str, value: np.ndarray[Any, Any], inner: Inner) -> list[Any]:
    if value.dtype.kind not in _ARRAY_KINDS or not value.itemsize:
        raise ArgumentError(
            f"{key}: a checkpoint cannot hold NumPy arrays of {value.dtype}; save "
            + ("its tolist()" if value.dtype.kind in "OTUS" else "its fields, or its view('u1')")
        )
    return [value.dtype.str, list(value.shape), _base64(key, value.tobytes())]


def _decode_array(key: str, content: Any, inner: Inner) -> np.ndarray[Any, Any]:
    dtype, shape, text = content
    found = np.dtype(_str(dtype))
    if found.kind not in _ARRAY_KINDS:
        raise ValueError(dtype)
    array: np.ndarray[Any, Any] = np.frombuffer(binascii.a2b_base64(text), found)
    shaped: np.ndarray[Any, Any] = array.reshape(shape).copy()
    return shaped


def _encode_scalar(key: str, value: np.generic, inner: Inner) -> list[Any]:
    dtype, _, text = _encode_array(key, np.asarray(value), inner)
    return [dtype, text]


def _decode_scalar(key: str, content: Any, inner: Inner) -> Any:
    dtype, text = content
    return _decode_array(key, (dtype, (), text), inner)[()]


def _encode_npdtype(key: str, value: np.dtype[Any], inner: Inner) -> str:
    if np.dtype(value.str) != value:
        raise ArgumentError(f"{key}: {value!r} has more than one field; save its descr")
    return str(value.str)


# Members and instances of classes that must be found again.


def _encode_enum(key: str, value: enum.Enum, inner: Inner) -> list[Any]:
    name = value.name
    # The latter of flags that are combined.
    content = name if name in type(value).__members__ else value.value
    if type(content) not in (str, int):
        raise ArgumentError(f"{key}: {value!r} has neither a name nor a number; save its value")
    return [*_findable(key, value), content]


def _decode_enum(key: str, content: Any, inner: Inner) -> Any:
    module, name, member = content
    found = _imported(key, module, name, enum.Enum, "an enum")
    try:
        return found[member] if isinstance(member, str) else found(int(member))
    except (KeyError, ValueError):
        raise MismatchError(f"{key}: the enum {module}.{name} has no member {member!r}") from None


def _encode_named(key: str, value: Any, inner: Inner) -> list[Any]:
    if getattr(value, "__dict__", None):
        raise ArgumentError(
            f"{key}: {type(value).__qualname__} has attributes beside its fields; save tuple(value)"
            " and vars(value)"
        )
    fields = dict(zip(value._fields, value, strict=True))
    return [*_findable(key, value), _encode_pairs(key, fields, inner)]


def _decode_named(key: str, content: Any, inner: Inner) -> Any:
    module, name, pairs = content
    found = _imported(key, module, name, tuple, "a named tuple")
    fields = _decode_pairs(key, pairs, inner)
    if tuple(fields) != getattr(found, "_fields", None):
        raise MismatchError(
            f"{key}: the value is a {module}.{name} with the fields {', '.join(map(str, fields))}, "
            "and the class of that name has others here"
        )
    return tuple.__new__(found, fields.values())  # the class runs nothing


def _findable(key: str, value: Any) -> tuple[str, str]:
    """Return the module and the name of a value's class, by which it is found again."""
    kind = type(value)
    if imported_class(kind.__module__, kind.__qualname__) is not kind:
        raise ArgumentError(
            f"{key}: {value!r} cannot be found again: {kind.__module__}.{kind.__qualname__} is not "
            "the name of its class; define the class at the top of a module"
        )
    return kind.__module__, kind.__qualname__


def imported_class(module: str, name: str) -> type[Any] | None:
    """Return the class of that name in an imported module; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def _imported(key: str, module: str, name: str, base: type, what: str) -> Any:
    """Return a class that a value needs.

    Raises:
        MismatchError: it is not imported here.
    """
    found = imported_class(module, name)
    if found is None or not issubclass(found, base):
        raise MismatchError(
            f"{key}: the value is a {module}.{name}, {what} that is not imported here; import "
            f"{module} first"
        )
    return found


# Other values, made from a few parts or from a text.


def _parts(of: type, split: Callable[[Any], Iterable[Any]]) -> Kind:
    """Return how values are stored that are made from a few others."""
    return Kind(
        of,
        lambda key, value, inner: _encode_items(key, split(value), inner),
        lambda key, parts, inner: of(*inner(key, [*parts])),
    )


def _text(of: type, make: Callable[[str], Any] | None = None) -> Kind:
    """Return how values are stored that are made from their text."""
    return Kind(
        of,
        lambda key, value, inner: str(value),
        lambda key, text, inner: (make or of)(_str(text)),
    )


def _str(text: Any) -> str:
    if type(text) is not str:
        raise TypeError(text)
    return text


def _constant(of: type) -> Kind:
    """Return how constants of torch are stored."""

    def decode(key: str, name: str, inner: Inner) -> Any:
        found = getattr(torch, name)
        if not isinstance(found, of):
            raise ValueError(name)
        return found

    return Kind(of, lambda key, value, inner: str(value).removeprefix("torch."), decode)


def _time(of: type[datetime.datetime | datetime.time]) -> Kind:
    """Return how times are stored, which may have a zone."""

    def encode(key: str, value: Any, inner: Inner) -> str:
        text: str = value.isoformat()
        if repr(of.fromisoformat(text)) != repr(value):  # a zone with a name, or fold=1
            raise ArgumentError(f"{key}: {value!r} has more than its text; save its isoformat()")
        return text

    return Kind(of, encode, lambda key, text, inner: of.fromisoformat(text))


def _decode_float(key: str, text: str, inner: Inner) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(text)
    return float(text)


def _three(value: Any) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


KINDS: Mapping[str, Kind] = {
    "$tuple": _items(tuple),
    "$named": Kind(_Named, _encode_named, _decode_named),
    "$set": _items(set, _encode_set),
    "$frozenset": _items(frozenset, _encode_set),
    "$deque": Kind(deque, _encode_deque, _decode_deque),
    "$items": _pairs(dict),
    "$ordered": _pairs(OrderedDict),
    "$counter": _pairs(Counter),
    "$default": Kind(defaultdict, _encode_default, _decode_default),
    "$float": Kind(float, lambda key, value, inner: str(value), _decode_float),
    "$complex": _parts(complex, lambda value: (value.real, value.imag)),
    "$range": _parts(range, _three),
    "$slice": _parts(slice, _three),
    "$bytes": Kind(bytes, _base64, lambda key, text, inner: binascii.a2b_base64(text)),
    "$bytearray": Kind(
        bytearray, _base64, lambda key, text, inner: bytearray(binascii.a2b_base64(text))
    ),
    "$stream": Kind(io.BytesIO, _encode_stream, _decode_stream),
    "$array": Kind(np.ndarray, _encode_array, _decode_array),
    "$scalar": Kind(np.generic, _encode_scalar, _decode_scalar),
    "$npdtype": Kind(np.dtype, _encode_npdtype, lambda key, text, inner: np.dtype(_str(text))),
    "$dtype": _constant(torch.dtype),
    "$layout": _constant(torch.layout),
    "$device": _text(torch.device),
    "$size": _items(torch.Size),
    "$version": _text(TorchVersion),
    "$enum": Kind(enum.Enum, _encode_enum, _decode_enum),
    "$path": _text(pathlib.PosixPath),
    "$datetime": _time(datetime.datetime),
    "$date": _text(datetime.date, datetime.date.fromisoformat),
    "$time": _time(datetime.time),
    "$timedelta": _parts(
        datetime.timedelta, lambda value: (value.days, value.seconds, value.microseconds)
    ),
    "$decimal": _text(decimal.Decimal),
    "$fraction": _parts(fractions.Fraction, fractions.Fraction.as_integer_ratio),
    "$uuid": _text(uuid.UUID),
}
_TAGS = {kind.of: tag for tag, kind in KINDS.items()}
_BASES = (enum.Enum, np.generic, np.dtype)  # whose subclasses are stored as they are
