"""What this process's groups have done."""

from __future__ import annotations

from collections.abc import Iterator

from torchrelay import _telemetry
from torchrelay.aggregation._group import LIVING
from torchrelay.aggregation._plane import PlaneStats

__all__ = ["samples", "stats"]


def stats() -> dict[str, PlaneStats]:
    """Return the statistics of this process's existing groups, added up for each data plane."""
    totals: dict[str, PlaneStats] = {}
    for group in list(LIVING):
        mine = group.stats()
        totals[mine.plane] = totals.get(mine.plane, PlaneStats(mine.plane, 0, 0, 0.0)) + mine
    return totals


def samples() -> Iterator[_telemetry.MetricSample]:
    def sample(name: str, meaning: str, value: float, **labels: str) -> _telemetry.MetricSample:
        return _telemetry.MetricSample(f"aggregation_{name}", meaning, "counter", value, labels)

    for name, of in stats().items():
        yield sample("collectives", "Collectives that were run", of.jobs, plane=name)
        yield sample("payload_bytes", "Bytes of their tensors", of.payload_bytes, plane=name)
        waiting = "Time in which they waited for others"
        yield sample("waiting_seconds", waiting, of.waiting_s, plane=name)
        for link in of.links:
            where = {"plane": name, "transport": link.transport}
            yield sample("sent_bytes", "Bytes that this rank sent", link.sent_bytes, **where)
            busy = "Time of collectives in a transport"
            yield sample("busy_seconds", busy, link.busy_s, **where)
