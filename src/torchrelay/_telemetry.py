"""What this process reports of itself: its long or rare events, and statistics of what it has open.

:mod:`torchrelay.metrics` exports both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torchrelay import _torch

__all__ = ["EventCounts", "MetricSample", "counts", "event", "publish", "samples"]


class MetricSample(NamedTuple):
    """A statistic at this moment.

    Args:
        name: ``component_statistic``.
        kind: ``counter``, which only grows while its source exists, or ``gauge``.
    """

    name: str
    meaning: str
    kind: str
    value: float
    labels: Mapping[str, str]


@dataclass
class EventCounts:
    """All events of one name since the start of the process, or one in progress."""

    count: int = 0
    seconds: float = 0.0
    size_bytes: int = 0


_lock = threading.Lock()
_counts: dict[tuple[str, str], EventCounts] = {}
_sources: list[Callable[[], Iterable[MetricSample]]] = []


@contextmanager
def event(component: str, name: str, subject: str = "") -> Iterator[EventCounts]:
    """Report what the block does: as a span of torch.profiler, one line at level INFO, and a count.

    A block that raises is shown by the profiler only; one that processes bytes sets ``size_bytes``.

    Args:
        subject: what the event is about, such as a path, for the log.
    """
    running = EventCounts()
    start = time.perf_counter()
    with _torch.span(f"torchrelay.{component}.{name}"):
        yield running
    seconds = time.perf_counter() - start
    with _lock:
        total = _counts.setdefault((component, name), EventCounts())
        total.count += 1
        total.seconds += seconds
        total.size_bytes += running.size_bytes
    size = f", {running.size_bytes:,} bytes" if running.size_bytes else ""
    what = f"{name} of {subject}" if subject else name
    logging.getLogger(f"torchrelay.{component}").info("%s: %.3g s%s", what, seconds, size)


def publish(source: Callable[[], Iterable[MetricSample]]) -> None:
    """Export what ``source`` returns. It is called in any thread."""
    _sources.append(source)


def counts() -> dict[tuple[str, str], EventCounts]:
    """Return the counts of all events so far, by component and name."""
    with _lock:
        return {key: EventCounts(**vars(total)) for key, total in _counts.items()}


def samples() -> list[MetricSample]:
    """Return the statistics of all sources; those of equal name and labels are added up."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], MetricSample] = {}
    for source in _sources:
        for sample in source():
            key = sample.name, tuple(sorted(sample.labels.items()))
            before = found[key].value if key in found else 0.0
            found[key] = sample._replace(value=before + sample.value)
    return list(found.values())
