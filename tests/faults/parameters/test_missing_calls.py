"""Collective calls that not every process makes: who is named, how soon, and what else is said."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from torchrelay import _waiting
from torchrelay.errors import OperationTimeoutError, PeerLostError, UnavailableError
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.world import World
from waiting import eventually

if TYPE_CHECKING:
    from ranks import RunProcesses

KEYS, DIM = 8, 2


class Reports(logging.Handler):
    """The warnings of the component, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("torchrelay").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def wait_for_one(self) -> str:
        eventually(lambda: self.messages)
        return self.messages.pop(0)


CALLS: dict[str, Callable[[Table], Any]] = {
    "sync": lambda table: table.sync(),
    "state_dict": lambda table: table.state_dict(),
    "load_state_dict": lambda table: table.load_state_dict({"weight": table.rows()}),
}


def _call_late(world: World, nodes: int) -> list[str]:
    """Rank 0 makes each call alone, until it has said who is missing; then the others make it
    too.
    """
    dist.init_process_group("gloo")
    _waiting._FIRST_LOOK_S, _waiting._FIRST_REPORT_S = 0.1, 0.4
    reports = Reports()
    node_of_rank = lambda rank: rank * nodes // world.size  # noqa: E731
    said = []
    with Table.create(KEYS, DIM, node_of_rank=node_of_rank) as table:
        store = table._server.topology.ranks.store
        assert store is not None
        for name, call in CALLS.items():
            if world.rank == 0:
                calls = threading.Thread(target=call, args=(table,))
                calls.start()
                said.append(reports.wait_for_one())
                store.set(f"{name}/go", "")
                calls.join()
            else:
                store.wait([f"{name}/go"])
                call(table)
            dist.barrier()
            reports.messages.clear()
    return said


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_call_of_one_rank_names_the_others_and_goes_on_when_they_come(
    run_processes: RunProcesses, nodes: int
) -> None:
    results = run_processes(_call_late, 3, timeout_s=200, nodes=nodes)
    for result in results:
        assert result.ok, result.error
    said = dict(zip(CALLS, results[0].value, strict=True))
    for name in ("sync", "state_dict"):
        assert "ranks 1, 2 did not reach the barrier of all workers" in said[name]
        assert "do not put it inside `if rank == 0:`" in said[name]
    assert "ranks 1, 2 did not pass the state to load" in said["load_state_dict"]


def _close_early(world: World) -> tuple[str, tuple[int, ...]]:
    table = Table.create(KEYS, DIM, node_of_rank=lambda rank: rank // 2)
    if world.rank != 0:
        table.close()
        return "", ()
    with pytest.raises(PeerLostError) as raised:
        table.sync()
    table._server.abort()
    return str(raised.value), raised.value.ranks


def test_who_closes_the_table_instead_is_an_error_at_once(
    run_processes: RunProcesses,
) -> None:
    results = run_processes(_close_early, 4)
    for result in results:
        assert result.ok, result.error
    message, nodes = results[0].value
    assert message.startswith("rank 0: rank 1 is closing the table") and nodes == (0,)


def _create(world: World) -> tuple[str, tuple[int, ...]]:
    reports = Reports()
    store = world.connect()
    store.set(f"started/{world.rank}", "")
    store.wait([f"started/{rank}" for rank in range(world.size)])  # the timeout is short
    if world.rank == 2:
        store.wait(["reported/0", "reported/1"])
        return "", ()
    try:
        Table.create(KEYS, DIM, optimizer=optim.sgd(1.0))
    except OperationTimeoutError as error:
        return reports.messages[0], tuple(error.ranks)
    finally:
        store.set(f"reported/{world.rank}", "")
    return "", ()


def test_a_rank_that_does_not_create_the_table_is_named(
    run_processes: RunProcesses,
) -> None:
    results = run_processes(_create, 3, environ={"TORCHRELAY_PARAMETERS_TIMEOUT_S": "8"})
    for result in results[:2]:
        assert result.ok, result.error
        message, ranks = result.value
        assert "rank 2 did not join the group" in message and "are they running" in message
        assert ranks == (2,)


def _create_again(world: World) -> list[str]:
    """Each rank in turn cannot say which node it is of; then all try again under the same name."""
    said = []
    for wrong in range(world.size):

        def node_of(rank: int, wrong: int = wrong) -> int:
            if rank == wrong:
                raise KeyError("host-7")
            return 0

        with pytest.raises((KeyError, UnavailableError)) as raised:
            Table.create(KEYS, DIM, name="again", node_of_rank=node_of)
        said.append(f"{raised.type.__name__}: {raised.value}")
        with Table.create(KEYS, DIM, name="again", node_of_rank=lambda _: 0) as table:
            table.set([world.rank], torch.full((1, DIM), float(wrong)))
            table.sync()
            assert table.pull([0, 1, 2]).unique().tolist() == [wrong]
    return said


def test_a_rank_that_cannot_create_the_table_says_so_and_all_try_again(
    run_processes: RunProcesses,
) -> None:
    for rank, result in enumerate(run_processes(_create_again, 3)):
        assert result.ok, result.error
        for wrong, said in enumerate(result.value):
            reason = f"node_of_rank({wrong}) raised KeyError('host-7')"
            expected = "KeyError: 'host-7'" if wrong == rank else f"UnavailableError: rank {rank}: "
            assert said.startswith(expected) and (wrong == rank or reason in said), said


def _end(world: World, error: bool) -> tuple[int, str, tuple[int, ...]]:
    """The last rank of two nodes ends without closing the table, outside of any ``with``."""
    table = Table.create(KEYS, DIM, node_of_rank=lambda rank: rank // 2)
    process = table._server.topology.gather("pid", os.getpid(), "give its process id")[3]
    table._worker.barrier()
    if world.rank == 3:
        if error:
            raise ValueError("the data is broken")
        return process, "", ()
    with pytest.raises(PeerLostError) as raised:
        table._worker.barrier()
    return process, str(raised.value), raised.value.ranks


@pytest.mark.parametrize("error", [True, False])
def test_a_process_that_ends_without_closing_is_named(
    run_processes: RunProcesses, error: bool
) -> None:
    environ = {"TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S": "100"}
    results = run_processes(_end, 4, environ=environ, error=error)
    assert results[3].ok is not error
    for rank, result in enumerate(results[:3]):
        assert result.ok, result.error
        process, message, ranks = result.value
        assert ranks == (1,)
        if "has ended without" in message:  # from Python 3.12 on also after an error
            continue
        if not error:
            assert "has left" in message
        elif rank == 2:
            assert f"process {process} of node 1 has left" in message
        else:
            assert (
                "node 1 is lost" in message
                and f"process {process} has left, or shut down" in message
            )


def _step_alone(world: World, hosts: str, is_killed: bool) -> tuple[str, str, tuple[int, ...]]:
    """Rank 2 does not take part in the second backward pass, or has died."""
    store = world.connect()
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    table = Table.create(KEYS, DIM, optimizer=optim.sgd(1.0), node_of_rank=lambda rank: rank)
    module, optimizer = Embedding(KEYS, DIM, table=table), table.optimizer()
    keys = torch.arange(KEYS)
    module(keys).sum().backward()
    optimizer.step()
    if not is_killed:
        exchange = table.gradients._exchange
        assert exchange is not None
        exchange._timeout_s = 2
    if world.rank == 2:
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["reported/0", "reported/1"], timedelta(seconds=100))
        return "", "", ()
    try:
        module(keys).sum().backward()
    except (OperationTimeoutError, PeerLostError) as error:
        return type(error).__name__, str(error), error.ranks
    finally:
        store.set(f"reported/{world.rank}", "")
        table._server.abort()
    return "", "", ()


@pytest.mark.parametrize("hosts", ["aaa", "aba", "abc"])
@pytest.mark.parametrize("is_killed", [False, True], ids=["absent", "killed"])
def test_who_takes_no_part_in_a_sum_of_gradients_is_named(
    run_processes: RunProcesses, hosts: str, is_killed: bool
) -> None:
    results = run_processes(_step_alone, 3, hosts=hosts, is_killed=is_killed)
    for result in results[:2]:
        assert result.ok, result.error
        kind, message, ranks = result.value
        assert kind == ("PeerLostError" if is_killed else "OperationTimeoutError"), message
        assert ranks == (2,)
        if not is_killed or "node 2 is lost" not in message:  # who looks rows up may notice first
            assert "rank 2" in message and "sum of row gradients" in message
