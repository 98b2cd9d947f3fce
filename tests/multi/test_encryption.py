"""What is on the wire between hosts, with a key and without: two hosts, in network namespaces."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend
from namespaces import Hosts, enter, missing, switched
from torchrelay.errors import ConfigError, MismatchError
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

KEY, OTHER_KEY = "3a" * 32, "3b" * 32
ROWS, DIM = 256, 64

# Bytes of a float32 that is neither zero nor common, by what sends many of them.
SECRETS = {"sml": b"SML\x3f", "pushes": b"PUS\x3f", "gradients": b"GRA\x3f"}
_ALL_PACKETS = 3  # ETH_P_ALL
_SO_RCVBUFFORCE = 33


class Wire:
    """What passes the port of host 0.

    Attributes:
        seen: the names of the secrets that passed in clear.
        size_bytes: of all packets.
    """

    def __init__(self, switch: int) -> None:
        self.seen: set[str] = set()
        self.size_bytes = 0
        self._ended = threading.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(switch, ready))
        self._thread.start()
        assert ready.wait(30)

    def _listen(self, switch: int, ready: threading.Event) -> None:
        enter(switch)  # this thread only
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PACKETS)) as tap:
            tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
            tap.bind(("port0", _ALL_PACKETS))
            tap.settimeout(0.2)
            ready.set()
            while True:
                try:
                    packet = tap.recv(1 << 17)
                except TimeoutError:
                    if self._ended.is_set():
                        return
                    continue
                self.size_bytes += len(packet)
                self.seen |= {name for name, secret in SECRETS.items() if 4 * secret in packet}

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@contextlib.contextmanager
def sniffed() -> Iterator[tuple[Hosts, Wire]]:
    with switched(2) as hosts, contextlib.closing(Wire(hosts.switch)) as wire:
        yield hosts, wire


def _float(name: str) -> float:
    return float(struct.unpack("<f", SECRETS[name])[0])


def _place(world: World, hosts: Hosts, key: str) -> World:
    """Put this rank on its host."""
    enter(hosts.pids[world.rank])
    os.environ.update(
        TORCHRELAY_HOST_ID=str(world.rank),
        MASTER_ADDR=hosts.addresses[0],
        TORCHRELAY_TRANSPORT_KEY=key,
        TORCHRELAY_TRANSPORT_CONNECT_TIMEOUT_S="5",
    )
    return dataclasses.replace(world, master_addr=hosts.addresses[0])


def _send_secrets(world: World, hosts: Hosts, key: str) -> None:
    world = _place(world, hosts, key)
    dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=2)
    tensor = torch.full((ROWS * DIM,), _float("sml"))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert (tensor == _float("sml")).all()
    dist.destroy_process_group()

    with Table.create(ROWS, DIM) as table:
        table.push(torch.arange(ROWS), torch.full((ROWS, DIM), _float("pushes")))
        table.sync()
        assert (table.pull(torch.arange(ROWS)) == 2 * _float("pushes")).all()

    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0), reduction="sum") as table:
        module, optimizer = Embedding(ROWS, DIM, table=table), table.optimizer()
        (module(torch.arange(ROWS)) * _float("gradients")).sum().backward()
        optimizer.step()
        assert (table.pull(torch.arange(ROWS)) == -2 * _float("gradients")).all()


@pytest.mark.parametrize("key", ["", KEY], ids=["without", "with"])
def test_with_a_key_nothing_is_on_the_wire_in_clear(run_processes: RunProcesses, key: str) -> None:
    with sniffed() as (hosts, wire):
        for result in run_processes(_send_secrets, 2, hosts=hosts, key=key):
            assert result.ok, result.error
    assert wire.size_bytes > len(SECRETS) * ROWS * DIM * 4
    assert wire.seen == (set() if key else set(SECRETS))


def _refuse(world: World, hosts: Hosts, keys: list[str]) -> list[str]:
    world = _place(world, hosts, keys[world.rank])
    messages = []
    with pytest.raises(MismatchError) as sml:
        dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=2)
    messages.append(str(sml.value))
    with pytest.raises(MismatchError) as table:
        Table.create(ROWS, DIM)
    messages.append(str(table.value))
    return messages


@pytest.mark.parametrize("other", ["", OTHER_KEY], ids=["none", "another"])
def test_both_sides_name_a_missing_or_another_key(run_processes: RunProcesses, other: str) -> None:
    with switched(2) as hosts:
        results = run_processes(_refuse, 2, hosts=hosts, keys=[KEY, other])
    for result in results:
        assert result.ok, result.error
        for message in result.value:
            assert "TORCHRELAY_TRANSPORT_KEY" in message and " key" in message
            assert KEY not in message and OTHER_KEY not in message


def _use_a_switch(world: World, hosts: Hosts) -> str:
    world = _place(world, hosts, KEY)
    os.environ["TORCHRELAY_AGGREGATION_SWITCH"] = hosts.addresses[0]
    with pytest.raises(ConfigError) as error:
        dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=2)
    return str(error.value)


def test_a_switch_is_refused_if_there_is_a_key(run_processes: RunProcesses) -> None:
    with switched(2) as hosts:
        for result in run_processes(_use_a_switch, 2, hosts=hosts):
            assert result.ok, result.error
            assert "TORCHRELAY_AGGREGATION_UNENCRYPTED_SWITCH=1" in result.value
