"""A switch's statistics as JSON and as Prometheus metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from torchrelay import _native
from torchrelay.aggregation.switch._data_plane import SwitchStats
from torchrelay.aggregation.switch._service import ServiceThread
from torchrelay.errors import UnavailableError

__all__ = ["MetricsServer", "as_dict"]

_REQUEST_S = 10.0  # a client that sends nothing for so long is disconnected


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


class _Collector:
    """Metrics of a switch, read at each request."""

    def __init__(self, stats: Callable[[], SwitchStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import (  # noqa: PLC0415 - optional
            CounterMetricFamily,
            GaugeMetricFamily,
        )

        stats = self._stats()
        for name, meaning in _native.switch_stats().items():
            counter = CounterMetricFamily(
                f"torchrelay_switch_{name}", meaning, labels=["data_plane"]
            )
            counter.add_metric([stats.data_plane], stats.counts[name])
            yield counter
        sessions = GaugeMetricFamily(
            "torchrelay_switch_sessions", "sessions that are open", labels=["data_plane"]
        )
        sessions.add_metric([stats.data_plane], len(stats.sessions))
        yield sessions
        again = GaugeMetricFamily(
            "torchrelay_switch_worker_retransmissions",
            "packets that a worker of an open session sent again",
            labels=["session", "rank"],
        )
        for index, session in enumerate(stats.sessions):
            for rank, worker in enumerate(session.workers):
                again.add_metric([str(index), str(rank)], worker.retransmissions)
        yield again


class MetricsServer:
    """Serves Prometheus metrics over HTTP, from a thread of its own.

    Raises:
        UnavailableError: the package prometheus-client is missing, or the address or port cannot be
            bound.
    """

    def __init__(self, stats: Callable[[], SwitchStats], address: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, MetricsHandler  # noqa: PLC0415
        except ImportError as error:
            raise UnavailableError(
                f"the metrics of a switch need the package prometheus-client ({error}): pip "
                "install prometheus-client"
            ) from error

        class Handler(MetricsHandler):
            registry = CollectorRegistry()
            timeout = _REQUEST_S

        Handler.registry.register(_Collector(stats))
        try:
            self._server = ThreadingHTTPServer((address, port), Handler)
        except OSError as error:
            raise UnavailableError(f"switch: metrics at {address}:{port}: {error}") from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = ServiceThread("switch-metrics", self._server.serve_forever)

    def check(self) -> None:
        """Raise if the thread has ended.

        Raises:
            UnavailableError: the metrics are no longer served.
        """
        self._thread.check()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
