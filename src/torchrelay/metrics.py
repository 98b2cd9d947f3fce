"""Prometheus metrics of a training process: its process groups, tables, checkpoints and models.

They are served over HTTP, or written to a file for the textfile collector of node_exporter::

    from torchrelay import metrics

    metrics.serve(9400 + int(os.environ["LOCAL_RANK"]))

Every metric has the label ``rank``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from torchrelay import _telemetry
from torchrelay._processes import closed_in_children
from torchrelay._resource import Resource
from torchrelay.errors import UnavailableError
from torchrelay.world import World

try:
    import prometheus_client
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        SummaryMetricFamily,
    )
    from prometheus_client.registry import Collector, CollectorRegistry
except ModuleNotFoundError as error:
    raise UnavailableError(
        f"metrics need {error.name}: pip install prometheus-client (extra [metrics])"
    ) from None

__all__ = ["Endpoint", "serve", "write_textfile"]


class _Process(Collector):
    """Everything that this process reports, read at each request."""

    def __init__(self) -> None:
        self._launched = World.from_environment()

    def collect(self) -> Iterator[Any]:
        group = dist.group.WORLD  # a launcher may give the rank to init_process_group only
        rank = str(self._launched.rank if group is None else group.rank())
        for (component, name), total in sorted(_telemetry.counts().items()):
            metric = f"torchrelay_{component}_{name}"
            seconds = SummaryMetricFamily(f"{metric}_seconds", f"Time of {name}", labels=["rank"])
            seconds.add_metric([rank], total.count, total.seconds)
            size = CounterMetricFamily(f"{metric}_bytes", f"Bytes of {name}", labels=["rank"])
            size.add_metric([rank], total.size_bytes)
            yield from (seconds, size)
        families: dict[str, Any] = {}
        for sample in _telemetry.samples():
            if sample.name not in families:
                family = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
                families[sample.name] = family(
                    f"torchrelay_{sample.name}", sample.meaning, labels=["rank", *sample.labels]
                )
            families[sample.name].add_metric([rank, *sample.labels.values()], sample.value)
        yield from families.values()


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Process())
    return registry


class Endpoint(Resource):
    """An HTTP server with the metrics of this process; :meth:`close` ends it."""

    def __init__(self, port: int, address: str) -> None:
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, address, _registry()
            )
        except OSError as error:
            raise UnavailableError(
                f"metrics at {address}:{port}: {error.strerror}; give each rank of a host a port "
                "of its own, such as 9400 plus its LOCAL_RANK"
            ) from error
        closed_in_children(self._server.socket)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._thread.is_alive():  # not in a forked process
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def serve(port: int, address: str = "127.0.0.1") -> Endpoint:
    """Serve the metrics at ``http://address:port/metrics`` from a thread of its own.

    Args:
        port: one for each process of a host; 0 takes any that is free.
        address: where to listen; ``"0.0.0.0"`` if Prometheus runs on another host. There is no
            authentication.

    Raises:
        UnavailableError: the address or port cannot be used.
    """
    return Endpoint(port, address)


def write_textfile(path: str | os.PathLike[str]) -> None:
    """Write the metrics to a file, atomically, for the textfile collector of node_exporter.

    Args:
        path: ends in ``.prom``; one for each rank.
    """
    prometheus_client.write_to_textfile(os.fspath(path), _registry())
