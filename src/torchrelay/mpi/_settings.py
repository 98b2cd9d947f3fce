"""Settings of ``mpi``, read when it is imported; tests replace them with :func:`changed`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torchrelay import config

__all__ = ["changed", "settings"]


class _Settings:
    """Attribute access to the loaded :class:`torchrelay.config.Mpi`."""

    __slots__ = tuple(field.name for field in dataclasses.fields(config.Mpi))

    timeout_s: float
    grace_s: float
    debug: bool
    convention: str
    unreachable_policy: str
    chain_warning: int
    max_count: int

    def __init__(self) -> None:
        loaded = config.load(config.Mpi)
        for name in self.__slots__:
            setattr(self, name, getattr(loaded, name))


settings = _Settings()


@contextlib.contextmanager
def changed(**values: Any) -> Iterator[None]:
    """Change settings within the block; equally on all ranks."""
    before = {name: getattr(settings, name) for name in values}
    try:
        for name, value in values.items():
            setattr(settings, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
