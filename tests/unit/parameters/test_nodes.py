"""Nodes as threads over the in-memory network, which may delay, reorder and duplicate."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest
import torch

from nodes import SETTINGS, Server, Topology, Worker, faulty_network, on_nodes, pulled
from torchrelay import _native, config
from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    UnsupportedError,
)
from torchrelay.parameters import Embedding, KeyInit, Table, UpdateRule
from waiting import eventually

TECHNIQUES = ["all", "replication_only", "relocation_only"]


@pytest.mark.parametrize("techniques", TECHNIQUES)
def test_every_node_reads_and_writes_every_key(techniques: str) -> None:
    keys = torch.arange(40)

    def body(server: Server, worker: Worker) -> None:
        worker.push(keys, torch.full((40, 2), float(server.node + 1)))
        worker.barrier()
        assert (pulled(worker, keys, 2) == 6).all()
        worker.barrier()
        if server.node == 2:
            worker.set(keys, torch.arange(80.0))
        worker.barrier()
        assert torch.equal(pulled(worker, keys, 2), torch.arange(80.0).view(40, 2))

    on_nodes(3, body, table={"keys": 40, "length": 2}, techniques=techniques)


def test_a_key_moves_to_the_only_node_that_wants_it() -> None:
    keys = torch.arange(20)

    def body(server: Server, worker: Worker) -> None:
        if server.node == 0:
            worker.intent(keys, 0, 10)
            eventually(lambda: len(worker.owned_keys()) == 20)
            before = server.statistics()["remote_pulls"]
            handle = worker.pull(keys, torch.empty(20), True)
            assert handle is not None and handle.is_completed()
            assert server.statistics()["remote_pulls"] == before
        worker.barrier()
        assert len(worker.owned_keys()) == (20 if server.node == 0 else 0)
        for _ in range(10):
            worker.advance_clock()
        worker.barrier()
        time.sleep(0.05)
        # It stays with the last owner.
        assert len(worker.owned_keys()) == (20 if server.node == 0 else 0)

    on_nodes(2, body, table={"keys": 20})


def test_several_nodes_that_want_a_key_get_replicas_and_the_last_gets_the_key() -> None:
    keys = torch.arange(10)

    def body(server: Server, worker: Worker) -> None:
        end = 5 if server.node == 0 else 50
        worker.intent(keys, 0, end)
        eventually(lambda: worker.pull_if_local(keys, torch.empty(10)))
        worker.barrier()
        worker.push(keys, torch.full((10,), float(10**server.node)))
        worker.wait_sync()
        worker.barrier()
        assert (pulled(worker, keys) == 11).all()
        worker.barrier()
        for _ in range(5):
            worker.advance_clock()
        if server.node == 1:
            eventually(lambda: len(worker.owned_keys()) == 10)
        worker.barrier()
        assert (pulled(worker, keys) == 11).all()

    on_nodes(2, body, table={"keys": 10})


def test_a_replica_follows_the_owner_without_being_asked() -> None:
    keys = torch.arange(8)

    def body(server: Server, worker: Worker) -> None:
        worker.intent(keys, 0, 1000)
        eventually(lambda: worker.pull_if_local(keys, torch.empty(8)))
        worker.barrier()
        if server.node == 0:
            worker.push(keys, torch.ones(8))
        eventually(lambda: bool((pulled(worker, keys) == 1).all()))
        worker.barrier()
        if server.node == 1:
            worker.push(keys, torch.ones(8))
        eventually(lambda: bool((pulled(worker, keys) == 2).all()))
        assert server.statistics()["replicas_made"] <= 8

    on_nodes(2, body, table={"keys": 8}, techniques="replication_only")


@pytest.mark.parametrize("techniques", TECHNIQUES)
def test_set_is_ordered_with_pushes_under_every_technique(techniques: str) -> None:
    """Each node sets and pushes its own keys while all announce all: the last writes of each
    stand.
    """
    num_nodes, rounds = 3, 60
    keys = torch.arange(30)

    def body(server: Server, worker: Worker) -> None:
        mine = keys[keys // 10 == server.node]
        generator = torch.Generator().manual_seed(server.node)
        for clock in range(rounds):
            worker.intent(keys[torch.randperm(30, generator=generator)[:15]], clock + 2, clock + 6)
            worker.push(mine, torch.full((10,), 3.0), True)
            worker.set(mine, torch.full((10,), float(clock)), clock % 2 == 0)
            worker.push(mine, torch.ones(10), clock % 3 == 0)
            assert (pulled(worker, mine) == clock + 1).all()
            worker.advance_clock()
        worker.wait_sync()
        worker.barrier()
        assert (pulled(worker, keys) == rounds).all()

    network = faulty_network()
    on_nodes(num_nodes, body, table={"keys": 30}, techniques=techniques, network=network)


def test_of_concurrent_sets_one_wins_everywhere() -> None:
    keys = torch.arange(12)

    def body(server: Server, worker: Worker) -> torch.Tensor:
        worker.intent(keys, 0, 1000)
        eventually(lambda: worker.pull_if_local(keys, torch.empty(12)))
        worker.barrier()
        for _ in range(20):
            worker.set(keys, torch.full((12,), float(server.node + 1)))
        worker.wait_sync()
        worker.barrier()
        worker.wait_sync()
        worker.barrier()
        return pulled(worker, keys)

    first, second, third = on_nodes(3, body, table={"keys": 12}, techniques="replication_only")
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert set(first.flatten().tolist()) <= {1.0, 2.0, 3.0}


def test_lengths_per_key_over_nodes() -> None:
    lengths = torch.tensor([1, 4, 2] * 10)
    keys = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    total = int(lengths[keys].sum())

    def body(server: Server, worker: Worker) -> None:
        worker.intent(keys[server.node :: 2].contiguous(), 0, 20)
        for _ in range(10):
            worker.push(keys, torch.arange(float(total)), True)
            worker.advance_clock()
        worker.wait_all()
        worker.wait_sync()
        worker.barrier()
        out = torch.empty(total)
        worker.pull(keys, out)
        assert torch.equal(out, torch.arange(float(total)) * 20)

    on_nodes(2, body, table={"keys": lengths}, network=faulty_network())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_other_dtypes_over_nodes(dtype: torch.dtype) -> None:
    keys = torch.arange(16)

    def body(server: Server, worker: Worker) -> None:
        worker.intent(keys, 0, 100)
        for _ in range(10):
            worker.push(keys, torch.ones(16, 3, dtype=dtype))
        worker.wait_sync()
        worker.barrier()
        assert (pulled(worker, keys, 3, dtype) == 20).all()

    on_nodes(2, body, table={"keys": 16, "length": 3, "dtype": dtype})


def test_max_norm_is_refused_where_it_would_undo_pushes_of_others() -> None:
    def body(server: Server, worker: Worker) -> None:
        table = Table(server, worker, apply_gradients="backward")
        Embedding(10, 2, table=table)
        with pytest.raises(UnsupportedError, match=r"max_norm .*step table\.optimizer\(\)"):
            Embedding(10, 2, max_norm=1.0, table=table)

    on_nodes(2, body, table={"keys": 10, "length": 2, "rule": UpdateRule("sgd", lr=1.0)})


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_optimizers_step_at_the_owner(kind: str) -> None:
    """Nodes take turns, with wait_sync between: the same as one node, replicas or not."""
    rule = UpdateRule(kind, lr=0.1, eps=1e-8)
    table: dict[str, Any] = {"keys": 9, "length": 4, "dtype": torch.float64, "rule": rule}
    keys = torch.arange(9)
    gradients = torch.randn(
        12, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    alone = Worker(0, Server(**table))
    for gradient in gradients:
        alone.push(keys, gradient)
    expected = pulled(alone, keys, 4, torch.float64)

    def body(server: Server, worker: Worker) -> None:
        worker.intent(keys, 0, 1000)
        for step, gradient in enumerate(gradients):
            if step % 3 == server.node:
                worker.push(keys, gradient)
            worker.wait_sync()
            worker.barrier()
        torch.testing.assert_close(
            pulled(worker, keys, 4, torch.float64), expected, rtol=1e-12, atol=1e-12
        )

    on_nodes(3, body, table=table)


@pytest.mark.parametrize(
    ("table", "needed"),
    [
        ({"rule": UpdateRule("adagrad", lr=0.1)}, 1),
        ({"dtype": torch.bfloat16, "init": KeyInit("constant", 256.0)}, 1),
        ({"dtype": torch.int64}, 0),
    ],
    ids=["adagrad", "bfloat16", "int64"],
)
def test_a_replica_equals_its_owner_after_a_sync(table: dict[str, Any], needed: int) -> None:
    """A replica applies each push, its owner their sum: ten steps or roundings, and one."""
    settings = dataclasses.replace(SETTINGS, sync_threshold=1e9)
    key, one = torch.tensor([0]), torch.ones(1, dtype=table.get("dtype", torch.float32))

    def body(server: Server, worker: Worker) -> tuple[torch.Tensor, float]:
        worker.intent(key, 0, 100)
        if server.node == 1:
            eventually(lambda: server.statistics()["replicas"] == 1)
            for _ in range(10):
                worker.push(key, one)
        for _ in range(3):
            worker.barrier()
            worker.wait_sync()
        worker.barrier()
        row = one.new_empty(1, server.row_length())
        worker.pull_rows(key, row)
        return row, server.statistics()["refreshes"]

    (owned, refreshes), (replicated, _) = on_nodes(
        2,
        body,
        table={"keys": 2, **table},
        settings=settings,
        techniques="replication_only",
    )
    assert torch.equal(owned, replicated)
    assert refreshes == needed


def test_pushes_before_a_load_do_not_change_the_loaded_rows() -> None:
    settings = dataclasses.replace(SETTINGS, sync_threshold=1e9)
    key = torch.tensor([0])

    def body(server: Server, worker: Worker) -> None:
        table = Table(server, worker)
        module = Embedding(4, 1, table=table)
        table.intent(key, 0, 100)
        if server.node == 1:
            eventually(lambda: server.statistics()["replicas"] == 1)
        worker.barrier()
        rows = torch.ones(4, 1)
        for load in (
            lambda: table.load_state_dict({"rows": rows}),
            lambda: table.load_state_dict({"weight": rows}),
            module.reset_parameters,
        ):
            if server.node == 1:
                table.push(key, torch.full((1, 1), 5.0))
            load()
            assert table.pull(key) == 1
            worker.barrier()

    on_nodes(
        2,
        body,
        table={"keys": 4, "rule": UpdateRule("sgd", lr=1.0), "init": KeyInit("constant", 1.0)},
        settings=settings,
        techniques="replication_only",
    )


def test_keys_made_at_first_use_over_nodes() -> None:
    keys = torch.tensor([5, -7, 2**40, 123456789, -(2**50)])

    def body(server: Server, worker: Worker) -> None:
        assert (pulled(worker, keys, 2) == 1.5).all()
        worker.barrier()
        worker.intent(keys, 0, 100)
        for _ in range(50):
            worker.push(keys, torch.ones(5, 2), True)
        worker.wait_all()
        worker.wait_sync()
        worker.barrier()
        assert (pulled(worker, keys, 2) == 101.5).all()
        noise = torch.arange(server.node, 2000, 2) + 10**6
        for piece in noise.split(20):
            worker.push(piece, torch.ones(len(piece), 2))
        assert (pulled(worker, keys, 2) == 101.5).all()

    table = {"keys": 0, "length": 2, "capacity": 200, "init": KeyInit("constant", 1.5)}
    on_nodes(2, body, table=table)


def test_values_go_back_to_zero_and_monotone_in_between() -> None:
    keys = torch.arange(24)

    def body(server: Server, worker: Worker) -> None:
        for sign in (1.0, -1.0):
            last = pulled(worker, keys)
            worker.barrier()
            for clock in range(40):
                worker.intent(
                    keys[clock % 4 :: 4].contiguous(),
                    worker.current_clock() + 1,
                    worker.current_clock() + 4,
                )
                worker.push(keys, torch.full((24,), sign), clock % 2 == 0)
                now = pulled(worker, keys)
                assert ((now - last) * sign >= 0).all()
                last = now
                worker.advance_clock()
            worker.wait_all()
            worker.wait_sync()
            worker.barrier()
        assert (pulled(worker, keys) == 0).all()

    on_nodes(3, body, table={"keys": 24}, network=faulty_network())


def test_nodes_that_make_different_tables_are_told() -> None:
    def body(server: Server, worker: Worker) -> None:
        raise AssertionError("the tables differ")

    topologies = Topology.in_memory(2, settings=SETTINGS)
    errors: list[BaseException] = []

    def run(node: int) -> None:
        try:
            Server(10 + node, topology=topologies[node])
        except MismatchError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(node,)) for node in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert sorted(str(error).rpartition(": ")[2] for error in errors) == [
        "keys is 10 here, 11 there",
        "keys is 11 here, 10 there",
    ]


def test_a_node_that_does_not_start_is_named() -> None:
    settings = dataclasses.replace(SETTINGS, timeout_s=0.3)
    topologies = Topology.in_memory(3, settings=settings)
    with pytest.raises(OperationTimeoutError, match="ranks 1, 2 did not make the table") as caught:
        Server(10, topology=topologies[0])
    assert caught.value.ranks == (1, 2)


def test_a_dead_node_is_named_by_all_others() -> None:
    network = _native.MemoryNetwork()
    transport = config.TransportSettings(heartbeat_s=0.05, peer_timeout_s=1.0)
    keys = torch.arange(30)
    dead = threading.Event()

    def body(server: Server, worker: Worker) -> None:
        worker.push(keys, torch.ones(30))
        worker.barrier()
        if server.node == 1:
            network.cut("node1")
            dead.set()
            return
        dead.wait()
        with pytest.raises(PeerLostError, match="node 1 is lost") as caught:
            worker.pull(keys, torch.empty(30))
        assert caught.value.ranks == (1,)
        with pytest.raises(PeerLostError, match="node 1 is lost"):
            worker.barrier()
        with pytest.raises(PeerLostError, match="node 1 is lost"):
            worker.close()  # its pull is unfinished

    on_nodes(3, body, table={"keys": 30}, network=network, transport=transport)


def test_a_barrier_that_somebody_misses_times_out() -> None:
    settings = dataclasses.replace(SETTINGS, timeout_s=0.5)
    done = threading.Event()

    def body(server: Server, worker: Worker) -> None:
        if server.node == 0:
            with pytest.raises(OperationTimeoutError, match="rank 1 did not reach"):
                worker.barrier()
            done.set()
        done.wait()

    on_nodes(2, body, table={"keys": 4}, settings=settings)


def test_an_empty_intent_is_an_error() -> None:
    def body(server: Server, worker: Worker) -> None:
        with pytest.raises(ArgumentError, match=r"\[5, 3\) is empty"):
            worker.intent(torch.tensor([1]), 5, 3)
        with pytest.raises(ArgumentError, match="out of range"):
            worker.intent(torch.tensor([10]), 5)
        worker.intent(torch.tensor([1]), 5)

    on_nodes(2, body, table={"keys": 4})


def test_a_row_is_lent_for_one_use_and_moves_to_the_only_node_that_uses_it() -> None:
    keys, gradient = torch.arange(0, 20, 2), torch.ones(10, 2)  # at home on node 0
    uses = 6

    def body(server: Server, worker: Worker) -> None:
        if server.node == 1:
            for use in range(uses):
                worker.intent(keys, use, use + 1)
                eventually(lambda: worker.pull_if_local(keys, torch.empty(10, 2)))
                before = pulled(worker, keys, 2)
                assert use > 0 or server.statistics()["relocations"] == 0
                worker.push(keys, gradient)
                # The gradient and its state are in what the worker reads next.
                rows = torch.empty(10, 4)
                worker.pull_rows(keys, rows)
                assert torch.allclose(rows[:, :2], before - 0.1 / (use + 1) ** 0.5)
                assert (rows[:, 2:] == use + 1).all()
                worker.advance_clock()
                worker.wait_sync()
                time.sleep(0.02)
        worker.barrier()
        assert len(worker.owned_keys()) == (0 if server.node == 0 else 20)

    on_nodes(2, body, table={"keys": 20, "length": 2, "rule": UpdateRule("adagrad", lr=0.1)})
