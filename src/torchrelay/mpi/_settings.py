"""Settings of ``mpi``, read when it is imported; tests replace them with :func:`changed`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torchrelay import config

__all__ = ["changed", "settings"]

settings = config.load(config.Mpi)


@contextlib.contextmanager
def changed(**values: Any) -> Iterator[None]:
    """Change settings within the block; equally on all ranks."""
    before = vars(settings).copy()
    vars(settings).update(values)
    try:
        yield
    finally:
        vars(settings).update(before)
