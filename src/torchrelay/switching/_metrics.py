"""Prometheus metrics of the server."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from torchrelay.switching._queue import Reply
from torchrelay.switching._statistics import COUNTERS
from torchrelay.switching._switcher import Switcher
from torchrelay.switching._tensors import datatype_of

__all__ = ["Metrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BOUNDS = [*map(floatToGoString, _SECONDS), "+Inf"]
_PARTS = {
    "queue": "waiting for a worker",
    "switch": "until the model's first group is in place",
    "compute": "the forward pass, waiting for later groups included",
}


class Metrics(Collector):
    """The metrics of one server: the switcher's status at the time of the scrape, and the times of
    its replies.
    """

    def __init__(self, switcher: Switcher) -> None:
        self._switcher = switcher
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._outputs: dict[tuple[str, int], list[dict[str, Any]]] = {}
        # How many took at most so many seconds, and longer; and their sum, by model, kind and part.
        self._counts: dict[tuple[str, str, str], list[int]] = {}
        self._sums: defaultdict[tuple[str, str, str], float] = defaultdict(float)

    def collect(self) -> Iterator[Metric]:
        status = self._switcher.status()
        free = sum(block["bytes"] for block in status["blocks"] if not block["model"])
        for name, text, value in (
            ("arena_bytes", "Size of the arena", status["arena_bytes"]),
            ("arena_free_bytes", "Bytes no model holds", free),
            ("queue_length", "Requests waiting", len(status["queue"])),
        ):
            yield GaugeMetricFamily(f"torchrelay_{name}", text, value=value)
        yield CounterMetricFamily(
            "torchrelay_worker_deaths", "Workers that ended unasked", value=status["worker_deaths"]
        )
        workers = GaugeMetricFamily("torchrelay_workers", "Worker processes", labels=["state"])
        for state in ("starting", "loading", "running", "training", "standby"):
            count = sum(worker["state"] == state for worker in status["workers"])
            workers.add_metric([state], count)
        yield workers
        resident = GaugeMetricFamily(
            "torchrelay_model_resident", "1 if all in the arena", labels=["model"]
        )
        for model in status["models"]:
            resident.add_metric([model["name"]], int(model["resident"]))
        yield resident
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"torchrelay_{name}", text, value=status["counts"][name])
        for part, text in _PARTS.items():
            times = HistogramMetricFamily(
                f"torchrelay_{part}_seconds", f"Time of a request: {text}", labels=["model", "kind"]
            )
            for (model, kind, one), counts in list(self._counts.items()):
                if one == part:
                    buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
                    times.add_metric([model, kind], buckets, self._sums[model, kind, one])
            yield times

    def observe(self, reply: Reply) -> None:
        """Count one reply."""
        times = (reply.queue_s, reply.switch_s, reply.compute_s)
        for part, seconds in zip(_PARTS, times, strict=True):
            key = reply.model, reply.kind, part
            if key not in self._counts:
                self._counts[key] = [0] * len(_BOUNDS)
            self._counts[key][bisect_left(_SECONDS, seconds)] += 1
            self._sums[key] += seconds
        if (reply.model, reply.version) not in self._outputs:
            self._outputs[reply.model, reply.version] = [
                {"name": name, "datatype": datatype_of(tensor.dtype), "shape": [-1] * tensor.dim()}
                for name, tensor in reply.outputs.items()
            ]

    def outputs_of(self, model: str, version: int) -> list[dict[str, Any]]:
        """Return the outputs of the model's first reply; empty before that."""
        return self._outputs.get((model, version), [])

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
