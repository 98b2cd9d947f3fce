"""A switch's statistics as JSON and as Prometheus metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchrelay.aggregation.switch._data_plane import SessionStats, SwitchStats
from torchrelay.aggregation.switch._service import ServiceThread
from torchrelay.errors import UnavailableError

__all__ = ["MetricsServer", "as_dict", "as_prometheus"]

_REQUEST_S = 10.0  # a client that sends nothing for so long is disconnected
_HELP = {
    "received": "data packets of members",
    "sent": "results sent",
    "completed": "results that every worker was sent",
    "answered_again": "results sent again because a worker asked again",
    "duplicates": "packets sent again while other workers' packets were missing",
    "stale": "packets older than the newest of their slot",
    "rejected": "packets of a wrong size or for a slot that does not exist",
    "malformed": "datagrams that are neither data nor control, or have a wrong checksum",
    "strangers": "data packets whose sender is in no session",
    "control": "control messages",
    "control_dropped": "control messages beyond what is kept",
    "dropped_ingress": "packets dropped by the ingress probability",
    "dropped_egress": "results dropped by the egress probability",
    "socket_lost": "datagrams lost because the kernel's receive buffer was full",
    "send_lost": "datagrams lost because the kernel's send buffer was full, or it has no route",
}


def as_dict(stats: SwitchStats) -> dict[str, Any]:
    """Return the statistics as plain values; without session ids, because they are
    secrets that admit to sessions.
    """
    values = dataclasses.asdict(stats)
    for index, session in enumerate(values["sessions"]):
        del session["session_id"]
        session["index"] = index
        silent_s = session.pop("silent_s")
        session["workers"] = {
            str(rank): {
                "received": received,
                "retransmissions": again,
                "silent_s": round(silent_s[rank], 1),
            }
            for rank, (received, again) in session["workers"].items()
        }
    return values


def as_prometheus(stats: SwitchStats) -> str:
    """Return the statistics in Prometheus' text format."""
    return "\n".join(_lines(stats)) + "\n"


def _lines(stats: SwitchStats) -> Iterator[str]:
    plane = f'data_plane="{stats.data_plane}"'
    for name, meaning in _HELP.items():
        yield f"# HELP torchrelay_switch_{name}_total {meaning}"
        yield f"# TYPE torchrelay_switch_{name}_total counter"
        yield f"torchrelay_switch_{name}_total{{{plane}}} {getattr(stats, name)}"
    yield "# HELP torchrelay_switch_sessions sessions that are open"
    yield "# TYPE torchrelay_switch_sessions gauge"
    yield f"torchrelay_switch_sessions{{{plane}}} {len(stats.sessions)}"
    yield (
        "# HELP torchrelay_switch_worker_retransmissions packets that a worker of an open session "
        "sent again"
    )
    yield "# TYPE torchrelay_switch_worker_retransmissions gauge"
    for index, session in enumerate(stats.sessions):
        yield from _workers(index, session)


def _workers(index: int, session: SessionStats) -> Iterator[str]:
    for rank, (_, again) in session.workers.items():
        yield f'torchrelay_switch_worker_retransmissions{{session="{index}",rank="{rank}"}} {again}'


class MetricsServer:
    """Serves ``/metrics`` over HTTP, from a thread of its own.

    Raises:
        UnavailableError: the address or port cannot be bound.
    """

    def __init__(self, stats: Callable[[], SwitchStats], address: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_S

            def do_GET(self) -> None:
                found = self.path == "/metrics"
                body = as_prometheus(stats()).encode() if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

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
