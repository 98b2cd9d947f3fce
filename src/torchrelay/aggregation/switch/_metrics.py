"""A switch's statistics as plain values, and as samples for Prometheus."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torchrelay import _native
from torchrelay._telemetry import MetricSample
from torchrelay.aggregation.switch._data_plane import SwitchStats

__all__ = ["as_dict", "samples"]


def as_dict(stats: SwitchStats) -> dict[str, Any]:
    """Return the statistics as plain values; without session ids, because they are
    secrets that admit to sessions.
    """
    values = dataclasses.asdict(stats)
    values |= values.pop("counts")
    for index, session in enumerate(values["sessions"]):
        session |= {"index": index, "idle_s": stats.sessions[index].idle_s, **session.pop("counts")}
        session["workers"] = dict(enumerate(session["workers"]))
        del session["session_id"]
    return values


def samples(stats: SwitchStats) -> Iterator[MetricSample]:
    """Yield the statistics for Prometheus."""
    labels = {"data_plane": stats.data_plane}
    for name, meaning in _native.switch_stats().items():
        yield MetricSample(f"switch_{name}", meaning, "counter", stats.counts[name], labels)
    sessions = "Sessions that are open"
    yield MetricSample("switch_sessions", sessions, "gauge", len(stats.sessions), labels)
    again = "Packets that a worker of an open session sent again"
    for index, session in enumerate(stats.sessions):
        for rank, worker in enumerate(session.workers):
            place = {"session": str(index), "worker": str(rank)}
            count = worker.retransmissions
            yield MetricSample("switch_worker_retransmissions", again, "gauge", count, place)
