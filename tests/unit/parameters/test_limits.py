"""What is bounded: operations under way, rows of tables without a number of keys; and what is
counted.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import pytest
import torch

from nodes import SETTINGS, Server, Worker, faulty_network, on_nodes, pulled
from torchrelay import _native, config
from torchrelay.errors import ConfigError, OperationTimeoutError
from torchrelay.parameters import KeyInit, Metrics
from waiting import eventually


def test_unfinished_operations_are_bounded_and_a_further_one_waits() -> None:
    settings = dataclasses.replace(SETTINGS, max_unfinished=4)
    network = _native.DelayedNetwork(_native.MemoryNetwork(), max_delay_s=0.02, seed=1)

    def body(server: Server, worker: Worker) -> None:
        if server.node == 0:
            for _ in range(40):
                assert worker.push(torch.tensor([1]), torch.ones(1), True) is not None
                assert worker._native.unfinished <= 4
            worker.wait_all()
            assert worker._native.unfinished == 0
            assert pulled(worker, torch.tensor([1])) == 40
        worker.barrier()

    on_nodes(2, body, table={"keys": 2}, network=network, settings=settings)


def test_a_push_that_finds_no_room_in_time_has_changed_nothing() -> None:
    settings = dataclasses.replace(SETTINGS, max_unfinished=2, timeout_s=5.0)
    # Node 1 is not to be taken for lost, however long that takes.
    transport = dataclasses.replace(config.load(config.TransportSettings), peer_timeout_s=300.0)
    network = _native.MemoryNetwork()
    done = threading.Event()

    def body(server: Server, worker: Worker) -> None:
        if server.node == 1:
            done.wait()
            return
        network.cut("node1")
        try:
            for _ in range(2):
                worker.push(torch.tensor([1]), torch.ones(1), True)
            with pytest.raises(OperationTimeoutError, match="as many as max_unfinished allows"):
                worker.push(torch.tensor([0, 1]), torch.ones(2), True)
            here = torch.empty(1)
            assert worker.pull_if_local(torch.tensor([0]), here) and here == 0
            with pytest.raises(OperationTimeoutError):
                worker.close()
        finally:
            done.set()

    table = {"keys": 2}
    on_nodes(2, body, table=table, network=network, settings=settings, transport=transport)


def test_requests_and_answers_stay_below_the_size_limit_of_messages() -> None:
    limit_bytes, keys = 1 << 20, torch.arange(1, 3000, 2)  # rows of a kilobyte
    transport = dataclasses.replace(
        config.load(config.TransportSettings), max_message_bytes=limit_bytes
    )
    network = _native.TcpNetwork(token=bytes(16), max_message_bytes=limit_bytes)

    def body(server: Server, worker: Worker) -> None:
        if server.node == 0:
            worker.push(keys, torch.ones(len(keys), 256))
            assert (pulled(worker, keys, 256) == 1).all()
        worker.barrier()

    table = {"keys": 3000, "length": 256}
    on_nodes(2, body, table=table, network=network, transport=transport)


@pytest.mark.parametrize(
    "network", [_native.MemoryNetwork, faulty_network], ids=["ideal", "faulty"]
)
def test_rows_that_moved_and_fell_out_of_use_are_evicted(
    network: Callable[[], _native.Network],
) -> None:
    """Three nodes use far more keys than fit, wherever their homes are; locations learnt before are
    then wrong.
    """
    capacity, steps, batch = 64, 250, 4

    def body(server: Server, worker: Worker) -> tuple[float, int]:
        generator = torch.Generator().manual_seed(server.node)
        for step in range(steps):
            window = 40 * (step // 10)  # what is used changes with time
            soon = torch.randint(window, window + 60, (batch,), generator=generator)
            worker.intent(soon, step + 2, step + 4)
            keys = torch.randint(max(0, window - 60), window + 60, (batch,), generator=generator)
            worker.push(keys, torch.ones(batch))
            assert (pulled(worker, keys) <= 3 * steps * batch).all()
            worker.advance_clock()
        worker.wait_sync()
        worker.barrier()
        return server.statistics()["evictions"], len(worker.owned_keys())

    results = on_nodes(
        3,
        body,
        table={"keys": 0, "capacity": capacity},
        network=network(),
    )
    for evictions, owned in results:
        assert evictions > capacity
        assert owned <= capacity


def test_an_evicted_key_that_had_moved_starts_anew() -> None:
    """Key 0's home is node 0; node 1 takes it, and then uses so many others that it must go."""
    many = torch.arange(1, 400, 2)  # node 1's own

    def body(server: Server, worker: Worker) -> None:
        key = torch.tensor([0])
        if server.node == 1:
            worker.push(key, torch.ones(1))
            worker.intent(key, 0, 1)
            eventually(lambda: 0 in worker.owned_keys())
            assert pulled(worker, key) == 8
            worker.advance_clock()
            for start in range(0, len(many), 8):
                worker.push(many[start : start + 8], torch.ones(8))
                time.sleep(0.002)  # rounds pass
            eventually(lambda: 0 not in worker.owned_keys())
        worker.barrier()
        assert pulled(worker, key) == 7, "as init says"
        worker.barrier()

    on_nodes(2, body, table={"keys": 0, "capacity": 32, "init": KeyInit("constant", 7)})


def test_traffic_is_that_with_other_nodes_and_counts_workers() -> None:
    keys = torch.arange(1, 2000, 2)  # node 1's

    def body(server: Server, worker: Worker) -> None:
        worker.barrier()
        if server.node == 0:
            before = Metrics(server.statistics())
            pulled(worker, keys, 8)
            spent = Metrics(server.statistics()) - before
            assert spent.remote_pulls == len(keys)
            assert len(keys) * 16 < spent.sent_bytes < len(keys) * 24  # key, counter and position
            # The value, counter and position.
            assert len(keys) * 32 < spent.received_bytes < len(keys) * 64
            assert spent.sent_messages < 10
        worker.barrier()

    on_nodes(2, body, table={"keys": 2000, "length": 8})


def test_time_in_rounds_and_staleness_are_measured() -> None:
    """Ten rounds a second: what a replica gets has waited for a tenth at most, and not for
    nothing.
    """
    settings = dataclasses.replace(SETTINGS, max_rounds_per_s=10.0)
    key = torch.tensor([0])

    def body(server: Server, worker: Worker) -> Metrics:
        worker.intent(key, 0, 1)
        if server.node == 1:
            eventually(lambda: server.statistics()["replicas"] == 1)
        worker.barrier()
        for _ in range(10):
            if server.node == 0:
                worker.push(key, torch.ones(1))
            time.sleep(0.05)
        worker.barrier()
        return Metrics(server.statistics())

    owner, replica = on_nodes(
        2, body, table={"keys": 2}, settings=settings, techniques="replication_only"
    )
    assert owner.refreshes > 0
    assert 0.01 < owner.staleness_s < 60
    assert 0 < owner.round_seconds < 60
    assert replica.staleness_s == 0  # it owns no key that others hold


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CONNECT_TIMEOUT_S", "-1"),
        ("HEARTBEAT_S", "0"),
        ("PEER_TIMEOUT_S", "0"),
    ],
)
def test_times_that_make_no_sense_are_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = {text}.*at least"):
        config.load(config.TransportSettings, {f"TORCHRELAY_TRANSPORT_{name}": text})


def test_a_heartbeat_too_slow_for_the_peer_timeout_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"peer_timeout_s = 1.5 s: it must be at least twice .*heartbeat_s = 1 s"
    ):
        config.load(config.TransportSettings, {"TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S": "1.5"})
