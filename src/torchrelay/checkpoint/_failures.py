"""Errors that several modules raise, and errors as text, to send them to other processes without
pickles. Imports no torch.
"""

from __future__ import annotations

import errno
import re
from typing import Any

from torchrelay import errors
from torchrelay.errors import PeerLostError, StorageError, TorchRelayError

__all__ = ["describe", "not_shared", "rebuild", "removed_error"]

_NAMES_RANK = re.compile(r"rank \d+: ")


def removed_error(location: str) -> StorageError:
    """Return the error for a checkpoint that was removed while it was read."""
    return StorageError(
        errno.ENOENT,
        f"{location}: the checkpoint was removed by retention (keep=) while it was read; load a "
        "newer one",
    )


def not_shared(location: str) -> str:
    """Return the reason why a rank cannot take part in a save to ``location``."""
    return (
        f"this rank saves to {location}, but does not find the coordinator's save there: "
        "all ranks must save to the same path, on storage that they share"
    )


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
    message = described["message"]
    if not _NAMES_RANK.match(message):
        message = f"rank {rank}: {message}"
    if isinstance(kind, type) and issubclass(kind, TorchRelayError):
        if issubclass(kind, OSError) and described["errno"] is not None:
            return kind(described["errno"], message)
        return kind(message)
    return PeerLostError(f"{message} ({described['type']})", ranks=(rank,))
