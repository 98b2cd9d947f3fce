"""For tests whose nodes are threads of one process, over the in-memory network."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch

from torchrelay import _native, config
from torchrelay.parameters._server import Server
from torchrelay.parameters._topology import Topology
from torchrelay.parameters._worker import Worker

__all__ = [
    "SETTINGS",
    "Server",
    "Topology",
    "Worker",
    "faulty_network",
    "in_threads",
    "on_nodes",
    "pulled",
]

SETTINGS = dataclasses.replace(config.load(config.Parameters), timeout_s=60.0)


def faulty_network() -> _native.Network:
    """Delays, reorders and duplicates messages."""
    return _native.DelayedNetwork(
        _native.MemoryNetwork(), max_delay_s=0.002, duplicate_probability=0.2, seed=1
    )


def in_threads(bodies: list[Callable[[], Any]]) -> list[Any]:
    """Runs all bodies at once; their results, or the first one's error."""
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def on_nodes(
    num_nodes: int,
    body: Callable[[Server, Worker], Any],
    *,
    table: dict[str, Any],
    network: _native.Network | None = None,
    **fields: Any,
) -> list[Any]:
    """Runs ``body`` on every node at once; what each returned. The first error of any is raised."""
    fields.setdefault("settings", SETTINGS)
    topologies = Topology.in_memory(num_nodes, network, **fields)

    def run(node: int) -> Any:
        server = Server(**table, topology=topologies[node])
        worker = Worker(0, server)
        result = body(server, worker)
        worker.close()
        server.close()
        return result

    return in_threads([lambda node=node: run(node) for node in range(num_nodes)])  # type: ignore[misc]


def pulled(
    worker: Worker, keys: torch.Tensor, length: int = 1, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.empty(len(keys), length, dtype=dtype)
    worker.pull(keys, out)
    return out
