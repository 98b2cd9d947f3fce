"""What the command's processes end with after an error of ours."""

from __future__ import annotations

from torchrelay.errors import ArgumentError, ConfigError, DataError, TorchRelayError

__all__ = ["exit_code"]


def exit_code(error: TorchRelayError) -> int:
    """2 if the caller's input caused it, else 1."""
    return 2 if isinstance(error, ArgumentError | ConfigError | DataError) else 1
