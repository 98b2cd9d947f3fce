"""Plain values as JSON: what JSON cannot distinguish is tagged, what it cannot hold is refused.

``None``, booleans, integers, floats, strings, lists and dictionaries with string keys are stored as
they are. A tuple is ``{"$tuple": [...]}``, an infinite or undefined float ``{"$float": "nan"}``, a
dtype of torch ``{"$dtype": "float32"}``, a dictionary with other keys, or with one that starts with
``$``, ``{"$items": [[key, value], ...]}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchrelay.errors import ArgumentError, CorruptionError

__all__ = ["decode", "encode"]

_MAX_DEPTH = 100


def encode(key: str, value: Any, depth: int = 0) -> Any:
    """Return ``value`` as JSON.

    Raises:
        ArgumentError: JSON cannot hold it; the message names ``key``.
    """
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"{key}: the value is nested more than {_MAX_DEPTH} levels deep")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [encode(key, item, depth + 1) for item in value]
    if kind is tuple:
        return {"$tuple": [encode(key, item, depth + 1) for item in value]}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return _encode_dict(key, value, depth)
    raise ArgumentError(
        f"{key}: a checkpoint holds tensors and plain values (None, bool, int, float, str, list, "
        f"tuple, dict, torch.dtype), not {kind.__module__}.{kind.__qualname__}; save what it is "
        "made of"
    )


def _encode_dict(key: str, value: dict[Any, Any], depth: int) -> Any:
    if all(type(name) is str and not name.startswith("$") for name in value):
        return {name: encode(f"{key}.{name}", item, depth + 1) for name, item in value.items()}
    return {
        "$items": [
            [encode(f"{key}: a key", name, depth + 1), encode(f"{key}.{name}", item, depth + 1)]
            for name, item in value.items()
        ]
    }


def decode(key: str, value: Any) -> Any:
    """Return the value that :func:`encode` encoded.

    Raises:
        CorruptionError: ``value`` is not from :func:`encode`.
    """
    if isinstance(value, list):
        return [decode(key, item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((name for name in value if name.startswith("$")), None)
    if tag is None:
        return {name: decode(key, item) for name, item in value.items()}
    try:
        (content,) = value.values()
        return _DECODERS[tag](key, content)
    except (KeyError, TypeError, ValueError):
        pass
    raise CorruptionError(f"{key}: the manifest holds a value of an unknown kind, {tag!r}")


def _dtype(key: str, name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(name)
    return found


def _float(key: str, text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(text)
    return float(text)


_DECODERS: Mapping[str, Callable[[str, Any], Any]] = {
    "$tuple": lambda key, items: tuple(decode(key, item) for item in items),
    "$items": lambda key, items: {decode(key, name): decode(key, item) for name, item in items},
    "$float": _float,
    "$dtype": _dtype,
}
