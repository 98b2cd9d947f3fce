"""Errors as text, to send them to other processes without pickles. Imports no torch."""

from __future__ import annotations

from typing import Any

from torchrelay import errors
from torchrelay.errors import PeerLostError, TorchRelayError

__all__ = ["describe", "rebuild"]


def describe(error: Exception) -> dict[str, Any]:
    """Return type, ``errno`` and message of ``error`` as JSON values."""
    return {
        "type": type(error).__name__,
        "errno": getattr(error, "errno", None),
        "message": str(getattr(error, "strerror", None) or error),
    }


def rebuild(described: dict[str, Any], rank: int) -> Exception:
    """Return an error of the same type that names the rank it happened on.

    Errors that are not of this package become PeerLostError.
    """
    kind = getattr(errors, described["type"], None)
    message = f"rank {rank}: {described['message']}"
    if isinstance(kind, type) and issubclass(kind, TorchRelayError):
        if issubclass(kind, OSError) and described["errno"] is not None:
            return kind(described["errno"], message)
        return kind(message)
    return PeerLostError(f"{message} ({described['type']})", ranks=(rank,))
