"""Every error TorchRelay raises.

::

    TorchRelayError
    ├── ArgumentError (ValueError)           a call's argument is wrong: its range, shape, dtype, device
    ├── ConfigError (ValueError)             a setting is unknown or has a bad value
    ├── DataError (ValueError)               input data does not have the form it must have
    ├── CapacityError (MemoryError)          something does not fit a memory of fixed size
    ├── DeferredError (RuntimeError)         a fake or deferred tensor is used in a way that needs its values
    ├── GraphError (RuntimeError)            a backward pass cannot be run as asked; its communications would not match
    ├── ModelError (RuntimeError)            the code of a served model failed
    ├── NotFoundError (LookupError)          no model, version or task has that name
    ├── OverloadedError (RuntimeError)       too many requests are waiting; try again later
    ├── UnsupportedError (NotImplementedError)   valid, but not done by this version or this torch
    ├── UnavailableError (RuntimeError)      a package, a device or a permission is missing here
    ├── MismatchError (ValueError)           ranks made different calls: op, shape or dtype
    ├── OperationTimeoutError (TimeoutError) an operation did not end in time; names who is missing
    ├── PeerLostError (ConnectionError)      a rank or node has died or closed its connection
    ├── ProtocolError (ConnectionError)      a peer speaks another version, or nonsense
    ├── SegmentError (OSError)               shared memory cannot be created, attached or mapped
    ├── StorageError (OSError)               a file cannot be read or written: a full disk, no permission, in use
    └── CorruptionError (OSError)            stored data is damaged, cut short or foreign

A message says what failed, where (rank, peer, operation), how long it took, and what to try.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

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
]


class TorchRelayError(Exception):
    """The root: ``except TorchRelayError`` catches everything TorchRelay raises on purpose."""

    exit_code: ClassVar[int] = 1
    """What a command ends with after such an error: 2 if its input caused it."""


class ArgumentError(TorchRelayError, ValueError):
    """A call's argument is wrong: its range, shape, dtype, layout or device. Nothing has been changed."""

    exit_code = 2


class ConfigError(TorchRelayError, ValueError):
    """A setting is unknown or has a bad value; the message names where it came from and what is allowed."""

    exit_code = 2


class DataError(TorchRelayError, ValueError):
    """Input data does not have the form it must have; the message names file and line."""

    exit_code = 2


class DeferredError(TorchRelayError, RuntimeError):
    """A fake or deferred tensor is used in a way that needs values it does not have."""


class GraphError(TorchRelayError, RuntimeError):
    """A backward pass cannot be run as asked: communications out of its reach, or an overwritten input reused."""


class CapacityError(TorchRelayError, MemoryError):
    """Something does not fit a memory of fixed size: an arena, a region, a request buffer."""


class ModelError(TorchRelayError, RuntimeError):
    """The code of a served model or training task failed; the message carries its own error."""


class NotFoundError(TorchRelayError, LookupError):
    """No model, version or task has that name; the message lists those that exist."""


class OverloadedError(TorchRelayError, RuntimeError):
    """A queue or quota is full. Nothing was started; the same request can succeed later."""


class UnsupportedError(TorchRelayError, NotImplementedError):
    """A valid request that this version, or this version of torch, does not serve."""


class UnavailableError(TorchRelayError, RuntimeError):
    """A package, a device or a permission is missing on this machine; the message says how to get it."""


class MismatchError(TorchRelayError, ValueError):
    """Ranks that must make the same call made different ones. Raised on every rank."""


class _PeersError(TorchRelayError):
    """An error that concerns certain ranks or nodes, listed in ``ranks``."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)


class OperationTimeoutError(_PeersError, TimeoutError):
    """An operation did not end in time. ``ranks`` holds those that had not arrived, where that is known."""


class PeerLostError(_PeersError, ConnectionError):
    """A rank or node has died or closed its connection. ``ranks`` holds who."""


class ProtocolError(TorchRelayError, ConnectionError):
    """A peer speaks another version of a protocol, or sends what the protocol does not allow."""


class SegmentError(TorchRelayError, OSError):
    """Shared memory cannot be created, attached or mapped."""


class StorageError(TorchRelayError, OSError):
    """A file or folder cannot be read or written: a full disk, no permission, not there, or used by another."""


class CorruptionError(TorchRelayError, OSError):
    """Stored data is damaged, cut short or was not written by TorchRelay."""
