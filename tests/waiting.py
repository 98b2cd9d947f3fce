"""For tests that wait for what other threads or processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["eventually"]


def eventually(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Return when ``condition`` is true; fail if it is not within ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition was not true within {timeout_s:g} s"
        time.sleep(0.005)
