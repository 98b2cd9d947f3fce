"""Counters, spans and events, for handlers that users install.

Components call :func:`count`, :func:`span` and :func:`event`, which do nothing without a handler.
Handlers have the methods of :class:`Handler`; :func:`handling` installs one within a ``with``
block.
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
    """Receives counters, spans and events. Called from any thread; must not raise."""

    def count(self, name: str, value: float, labels: dict[str, Label]) -> None: ...
    def span(self, name: str, start_ns: int, end_ns: int, labels: dict[str, Label]) -> None: ...
    def event(self, name: str, labels: dict[str, Label]) -> None: ...


_handlers: tuple[Handler, ...] = ()


def install(handler: Handler) -> None:
    """Pass everything reported from now on to ``handler`` too."""
    global _handlers  # noqa: PLW0603 - the one registry; replaced, never changed, so readers need no lock
    _handlers = (*_handlers, handler)


def uninstall(handler: Handler) -> None:
    """Remove ``handler``."""
    global _handlers  # noqa: PLW0603
    _handlers = tuple(h for h in _handlers if h is not handler)


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Install ``handler`` within the block."""
    install(handler)
    try:
        yield
    finally:
        uninstall(handler)


def listening() -> bool:
    """Return whether a handler is installed, to skip even creating a :class:`span`."""
    return bool(_handlers)


def count(name: str, value: float = 1, **labels: Label) -> None:
    """Add ``value`` to the counter ``name``."""
    for handler in _handlers:
        handler.count(name, value, labels)


def event(name: str, **labels: Label) -> None:
    """Report a single event: a retry, a fallback, a lost peer."""
    for handler in _handlers:
        handler.event(name, labels)


class span:  # noqa: N801 - used as a function; a class is cheaper than a generator
    """Report the duration of a block: ``with span("aggregation.all_reduce", size_bytes=n):``."""

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
    """Handler that keeps counters, span seconds and events in memory."""

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
    """Handler that writes Chrome's trace format (open in ``chrome://tracing``)."""

    def __init__(self) -> None:
        self._records: list[dict[str, object]] = []
        self._lock = threading.Lock()

    def _add(self, record: dict[str, object], labels: dict[str, Label]) -> None:
        with self._lock:
            self._records.append(
                {"pid": os.getpid(), "tid": threading.get_ident(), "args": labels, **record}
            )

    def count(self, name: str, value: float, labels: dict[str, Label]) -> None:
        self._add(
            {"ph": "i", "s": "t", "name": name, "ts": time.perf_counter_ns() / 1e3},
            {**labels, "value": value},
        )

    def span(self, name: str, start_ns: int, end_ns: int, labels: dict[str, Label]) -> None:
        self._add(
            {"ph": "X", "name": name, "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3},
            labels,
        )

    def event(self, name: str, labels: dict[str, Label]) -> None:
        self._add({"ph": "i", "s": "p", "name": name, "ts": time.perf_counter_ns() / 1e3}, labels)

    def write(self, path: str | Path) -> None:
        """Write what was collected so far."""
        with self._lock:
            Path(path).write_text(json.dumps({"traceEvents": self._records}))
