"""Servers and workers that are used after they were closed."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
from functools import partial
from typing import Any

import pytest
import torch

from nodes import SETTINGS, Server, Worker, in_threads, on_nodes
from torchrelay import _native
from torchrelay.errors import OperationTimeoutError, PeerLostError, UnavailableError
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.parameters._topology import Topology
from waiting import eventually

KEYS, VALUES = torch.arange(2), torch.ones(2)


def refuse(server: Server, worker: Worker, match: str) -> None:
    for use in (
        lambda: worker.pull(KEYS, VALUES.clone()),
        lambda: worker.push(KEYS, VALUES, True),
        lambda: worker.set(KEYS, VALUES),
        lambda: worker.pull_rows(KEYS, VALUES.clone()),
        lambda: worker.set_rows(KEYS, VALUES),
        lambda: worker.pull_if_local(KEYS, VALUES.clone()),
        lambda: worker.wait_for(-1),
        worker.wait_all,
        lambda: worker.has_finished(-1),
        lambda: worker.intent(KEYS, 1),
        worker.advance_clock,
        worker.current_clock,
        lambda: worker.prepare_sample(1, 1),
        lambda: worker.pull_sample(0, KEYS.clone(), VALUES.clone()),
        worker.owned_keys,
        worker.wait_sync,
        worker.barrier,
    ):
        with pytest.raises(UnavailableError, match=match):
            use()


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("leave", ["close", "abort"])
def test_a_server_or_worker_that_is_closed_raises(nodes: int, leave: str) -> None:
    def body(server: Server, worker: Worker) -> None:
        server.enable_sampling_support("naive")
        worker.barrier()
        if leave == "close":
            server.close()  # before the worker's: the mistake
        else:
            with contextlib.suppress(PeerLostError):  # the other may have left by now
                server.barrier()
            server.abort()
        refuse(server, worker, "has left the table")
        for use in (
            server.barrier,
            server.enable_sampling_support,
            lambda: server.set_learning_rate(1.0),
            lambda: Worker(0, server),
        ):
            with pytest.raises(UnavailableError, match="has left the table"):
                use()
        server.close()
        server.abort()

    on_nodes(nodes, body, table={"keys": 4})


def _descriptors_and_threads() -> list[int]:
    return [len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task")]


def _make_and_drop() -> None:
    for name in (None, "named"):
        table = Table.create(10, 4, optimizer=optim.sgd(1.0), name=name)
        module, optimizer = Embedding(10, 4, table=table), table.optimizer()
        module(KEYS).sum().backward()
        optimizer.step()
        del table, module, optimizer
    topologies = Topology.in_memory(2, _native.TcpNetwork(token=bytes(16)), settings=SETTINGS)

    def use(node: int) -> None:
        server = Server(4, topology=topologies[node])
        worker = Worker(0, server)
        worker.push(KEYS, VALUES)
        worker.barrier()

    in_threads([partial(use, node) for node in range(2)])


def test_dropped_tables_hold_no_descriptors_or_threads() -> None:
    _make_and_drop()  # torch's own threads start
    gc.collect()
    gc.disable()
    try:
        before = _descriptors_and_threads()
        for _ in range(3):
            _make_and_drop()
        eventually(lambda: _descriptors_and_threads() <= before)
    finally:
        gc.enable()


def test_a_table_whose_worker_cannot_finish_leaves_when_it_is_closed() -> None:
    network = _native.MemoryNetwork()
    left = threading.Event()

    def body(server: Server, worker: Worker) -> None:
        if server.node == 1:
            left.wait(60)
            return server.abort()
        try:
            network.cut("node1")
            table = Table(server, worker)
            table.push(torch.tensor([1]), torch.ones(1, 1), wait=False)
            with pytest.raises((OperationTimeoutError, PeerLostError)):
                table.close()
            with pytest.raises(UnavailableError, match="has left the table"):
                server.check_open()
            table.close()
        finally:
            left.set()

    settings = dataclasses.replace(SETTINGS, timeout_s=8.0)
    on_nodes(2, body, table={"keys": 2}, network=network, settings=settings)


def test_a_closed_worker_raises_and_another_takes_its_place() -> None:
    def body(server: Server, worker: Worker) -> None:
        worker.close()
        worker.close()
        refuse(server, worker, "worker 0 of node 0 is closed")
        server.enable_sampling_support("naive")
        other: Any = Worker(0, server)
        other.push(KEYS, VALUES)
        del other
        gc.collect()
        other = Worker(0, server)  # though its predecessor was not closed
        assert other.current_clock() == 0
        other.close()

    on_nodes(1, body, table={"keys": 4})
