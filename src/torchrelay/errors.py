"""Every error TorchRelay raises.

::

    TorchRelayError
    ├── ArgumentError (ValueError)           an argument is invalid: its range, shape, dtype, device
    ├── ConfigError (ValueError)             a setting is unknown or invalid
    ├── DataError (ValueError)               input data is malformed
    ├── CapacityError (MemoryError)          something does not fit a memory of fixed size
    ├── DeferredError (RuntimeError)         an operation needs values that a fake tensor lacks
    ├── GraphError (RuntimeError)            a backward pass would leave communications unmatched
    ├── ModelError (RuntimeError)            the code of a served model failed
    ├── NotFoundError (LookupError)          no model, version or task of that name
    ├── OverloadedError (RuntimeError)       a queue or quota is full; retry later
    ├── UnsupportedError (NotImplementedError)   not supported by this version or this torch
    ├── UnavailableError (RuntimeError)      a package, device or permission is missing
    ├── MismatchError (ValueError)           ranks made different calls: op, shape or dtype
    ├── OperationTimeoutError (TimeoutError) an operation timed out; names who is missing
    ├── PeerLostError (ConnectionError)      a rank or node has died or closed its connection
    ├── ProtocolError (ConnectionError)      a peer violates the protocol
    ├── SegmentError (OSError)               shared memory cannot be created or attached
    ├── StorageError (OSError)               a file cannot be read or written
    └── CorruptionError (OSError)            stored data is damaged, truncated or foreign

A message names what failed, where (rank, peer, operation), after what time, and what to try.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

__all__ = [
    "ArgumentError",
    "CapacityError",
    "ConfigError",
    "CorruptionError",
    "DataError",
    "DeferredError",
    "GraphError",
    "MismatchError",
    "ModelError",
    "NotFoundError",
    "OperationTimeoutError",
    "OverloadedError",
    "PeerLostError",
    "ProtocolError",
    "SegmentError",
    "StorageError",
    "TorchRelayError",
    "UnavailableError",
    "UnsupportedError",
    "describe",
    "from_json",
    "to_json",
]

_MAX_MESSAGE = 16384  # characters of a foreign error's message


class TorchRelayError(Exception):
    """Base of all errors that TorchRelay raises deliberately."""

    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error: 2 if its input is the cause."""


class ArgumentError(TorchRelayError, ValueError):
    """An argument is invalid: its range, shape, dtype, layout or device. Nothing was changed."""

    exit_code = 2


class ConfigError(TorchRelayError, ValueError):
    """A setting is unknown or invalid. The message names its origin and the allowed values."""

    exit_code = 2


class DataError(TorchRelayError, ValueError):
    """Input data is malformed. The message names file and line."""

    exit_code = 2


class DeferredError(TorchRelayError, RuntimeError):
    """An operation needs the values of a fake or deferred tensor, which has none."""


class GraphError(TorchRelayError, RuntimeError):
    """A backward pass cannot run: it would leave communications out, or needs an overwritten
    input.
    """


class CapacityError(TorchRelayError, MemoryError):
    """Something does not fit a memory of fixed size: an arena, a region, a request buffer."""


class ModelError(TorchRelayError, RuntimeError):
    """The code of a served model or training task raised. The message contains its error."""


class NotFoundError(TorchRelayError, LookupError):
    """No model, version or task has that name. The message lists those that exist."""


class OverloadedError(TorchRelayError, RuntimeError):
    """A queue or quota is full. Nothing was started; retry later."""


class UnsupportedError(TorchRelayError, NotImplementedError):
    """A valid request that this version of TorchRelay or torch does not support."""


class UnavailableError(TorchRelayError, RuntimeError):
    """A package, device or permission is missing on this machine. The message names the remedy."""


class MismatchError(TorchRelayError, ValueError):
    """Ranks made different calls where they must make the same. Raised on every rank."""


class _PeersError(TorchRelayError):
    """An error about certain ranks or nodes.

    Attributes:
        ranks: those ranks or nodes.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)


class OperationTimeoutError(_PeersError, TimeoutError):
    """An operation timed out. ``ranks`` are those that had not arrived, if known."""


class PeerLostError(_PeersError, ConnectionError):
    """A rank or node has died or closed its connection. ``ranks`` are those lost."""


class ProtocolError(TorchRelayError, ConnectionError):
    """A peer uses another version of the protocol, or violates it."""


class SegmentError(TorchRelayError, OSError):
    """Shared memory cannot be created, attached or mapped."""


class StorageError(TorchRelayError, OSError):
    """A file or folder cannot be read or written: disk full, permission denied, missing or in
    use.
    """


class CorruptionError(TorchRelayError, OSError):
    """Stored data is damaged, truncated, or was not written by TorchRelay."""


def to_json(error: BaseException) -> dict[str, Any]:
    """Return the type, message, ``errno`` and ranks of ``error`` as JSON values, to send it to
    another process. Of an error of foreign code, only type and message are read.
    """
    name = type(error).__name__
    if not isinstance(error, TorchRelayError):
        name = f"{type(error).__module__}.{name}" if name in __all__ else name
        return {"type": name, "message": _message(error), "errno": None, "ranks": []}
    return {
        "type": name,
        "message": str(getattr(error, "strerror", None) or error),
        "errno": getattr(error, "errno", None),
        "ranks": list(getattr(error, "ranks", ())),
    }


def describe(error: BaseException) -> str:
    """Return the type and the message of an error of foreign code, and those of a group's errors,
    as text of bounded length, whatever the error's own methods do.
    """
    return f"{type(error).__name__}: {_message(error)}"


def _message(error: BaseException) -> str:
    try:
        text = str(error)
        if sys.version_info >= (3, 11) and isinstance(error, BaseExceptionGroup):  # noqa: F821
            text += f": {'; '.join(map(describe, error.exceptions))}"
    except BaseException as failed:
        text = f"(its message cannot be read: {type(failed).__name__})"
    if len(text) > _MAX_MESSAGE:
        text = f"{text[:_MAX_MESSAGE]}... ({len(text)} characters)"
    # Plain: of no class of the foreign code's, without lone surrogates, which JSON cannot have.
    return str.encode(text, "utf-8", "backslashreplace").decode()


def from_json(
    value: Mapping[str, Any], foreign: type[TorchRelayError] = PeerLostError
) -> TorchRelayError:
    """Return the error that :func:`to_json` described, of the same type.

    Only ``type`` and ``message`` are required. An error that is not one of this module becomes a
    ``foreign``, whose message begins with the name of its type.

    Raises:
        KeyError: ``value`` has no type or no message.
    """
    name, message = str(value["type"]), str(value["message"])
    kind = globals().get(name) if name in __all__ else None
    if not (isinstance(kind, type) and issubclass(kind, TorchRelayError)):
        kind, message = foreign, f"{name}: {message}"
    if issubclass(kind, _PeersError):
        return kind(message, value.get("ranks") or ())
    if issubclass(kind, OSError) and value.get("errno") is not None:
        return kind(value["errno"], message)
    return kind(message)
