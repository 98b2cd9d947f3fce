"""Errors that several modules raise, and errors in a form for other processes. Imports no torch."""

from __future__ import annotations

import errno
import re
from typing import Any

from torchrelay.errors import StorageError, TorchRelayError, to_json

__all__ = ["described", "not_shared", "removed_error"]

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


def described(error: Exception, rank: int) -> dict[str, Any]:
    """Return an error as JSON values, with a message that names the rank it happened on."""
    found = to_json(error)
    if not _NAMES_RANK.match(found["message"]):
        found["message"] = f"rank {rank}: {found['message']}"
    if not isinstance(error, TorchRelayError):
        found["ranks"] = [rank]
    return found
