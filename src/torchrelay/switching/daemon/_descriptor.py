"""A file descriptor with an owner."""

from __future__ import annotations

import os
import weakref

__all__ = ["Descriptor"]


class Descriptor:
    """A file descriptor that is open as long as this lives."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False
