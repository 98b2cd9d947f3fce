"""What happens inside, told to whoever wants to know: counters, spans and events.

Rooms call :func:`count`, :func:`span` and :func:`event`; nothing is done unless a handler is installed. Handlers are plain objects with the methods of
:class:`Handler`; :func:`handling` installs one for the length of a ``with`` block.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

__all__ = [
    "ChromeTrace",
    "Collector",
    "Handler",
    "count",
    "event",
    "handling",
    "install",
    "listening",
    "span",
    "uninstall",
]

Label = str | int | float


class Handler(Protocol):
    """Receives what rooms report. Called from any thread; must not raise."""

    def count(self, name: str, value: float, labels: dict[str, Label]) -> None: ...
    def span(self, name: str, start_ns: int, end_ns: int, labels: dict[str, Label]) -> None: ...
    def event(self, name: str, labels: dict[str, Label]) -> None: ...


_handlers: tuple[Handler, ...] = ()


def install(handler: Handler) -> None:
    """Sends everything reported from now on to ``handler`` too."""
    global _handlers  # noqa: PLW0603 - the one registry; replaced, never changed, so readers need no lock
    _handlers = (*_handlers, handler)


def uninstall(handler: Handler) -> None:
    """Takes ``handler`` back out."""
    global _handlers  # noqa: PLW0603
    _handlers = tuple(h for h in _handlers if h is not handler)


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Installs ``handler`` for the length of the block."""
    install(handler)
    try:
        yield
    finally:
        uninstall(handler)


def listening() -> bool:
    """Whether a handler is installed: for callers to whom even making a :class:`span` is too slow."""
    return bool(_handlers)


def count(name: str, value: float = 1, **labels: Label) -> None:
    """Adds ``value`` to the counter ``name``."""
    for handler in _handlers:
        handler.count(name, value, labels)


def event(name: str, **labels: Label) -> None:
    """Reports something that happened once: a retry, a fallback, a lost peer."""
    for handler in _handlers:
        handler.event(name, labels)


class span:  # noqa: N801 - used as a function; a class is cheaper than a generator
    """``with span("aggregation.all_reduce", size_bytes=n):`` reports how long the block took."""

    __slots__ = ("_labels", "_name", "_start_ns")

    def __init__(self, name: str, **labels: Label) -> None:
        self._name = name
        self._labels = labels

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns() if _handlers else 0

    def __exit__(self, *_: object) -> None:
        if self._start_ns:
            end_ns = time.perf_counter_ns()
            for handler in _handlers:
                handler.span(self._name, self._start_ns, end_ns, self._labels)


class Collector:
    """Keeps counters, total span seconds and events in memory; for tests and for printed summaries."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.events: list[tuple[str, dict[str, Label]]] = []
        self._lock = threading.Lock()

    def count(self, name: str, value: float, labels: dict[str, Label]) -> None:
        with self._lock:
            self.counts[name] += value  # type: ignore[assignment]

    def span(self, name: str, start_ns: int, end_ns: int, labels: dict[str, Label]) -> None:
        with self._lock:
            self.seconds[name] += (end_ns - start_ns) * 1e-9  # type: ignore[assignment]

    def event(self, name: str, labels: dict[str, Label]) -> None:
        with self._lock:
            self.events.append((name, labels))


class ChromeTrace:
    """Collects spans and events and writes them in Chrome's trace format (open in ``chrome://tracing``)."""

    def __init__(self) -> None:
        self._records: list[dict[str, object]] = []
        self._lock = threading.Lock()

    def _add(self, record: dict[str, object], labels: dict[str, Label]) -> None:
        with self._lock:
            self._records.append({"pid": os.getpid(), "tid": threading.get_ident(), "args": labels, **record})

    def count(self, name: str, value: float, labels: dict[str, Label]) -> None:
        self._add(
            {"ph": "i", "s": "t", "name": name, "ts": time.perf_counter_ns() / 1e3},
            {**labels, "value": value},
        )

    def span(self, name: str, start_ns: int, end_ns: int, labels: dict[str, Label]) -> None:
        self._add({"ph": "X", "name": name, "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}, labels)

    def event(self, name: str, labels: dict[str, Label]) -> None:
        self._add({"ph": "i", "s": "p", "name": name, "ts": time.perf_counter_ns() / 1e3}, labels)

    def write(self, path: str | Path) -> None:
        """Writes what was collected so far."""
        with self._lock:
            Path(path).write_text(json.dumps({"traceEvents": self._records}))
