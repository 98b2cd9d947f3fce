"""A peer of the session that sends what no node would say."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import struct

import pytest
import torch

from nodes import Server, Worker, on_nodes, pulled
from torchrelay import _native, config
from torchrelay.errors import PeerLostError, ProtocolError
from waiting import eventually

TOKEN = b"the right token!"
KEYS = torch.arange(40)
_HELLO, _REPLY, _BUNDLE, _UNKNOWN = 1, 3, 6, 99
_INCARNATION = 2**31  # more than that of any worker


def _message(kind: int, sender: int, body: bytes, count: int = 1) -> bytes:
    magic = int.from_bytes(b"\x01TRP", "little")
    return struct.pack("<IIIIHHI", magic, sender, _INCARNATION, 0, kind, 0, count) + body


def _garbage() -> list[bytes]:
    """Each is one protocol error at least."""
    noise = random.Random(3)
    worker, no_node = 1 << 31, 500 << 12
    return [
        b"",
        b"short",
        noise.randbytes(1000),
        _message(_HELLO, worker | 77, b"\xff\xfe is no address"),
        _message(_HELLO, worker | 78, b"tcp://\xff\xfe"),
        _message(_HELLO, worker | 79, b"x" * 2000),
        _message(_UNKNOWN, worker | 80, b""),
        _message(_BUNDLE, worker | 81, noise.randbytes(24), count=2**32 - 1),
        _message(_BUNDLE, worker | 82, b""),
        _message(_BUNDLE, no_node, b""),
    ]


def _push_for_ever(worker: Worker) -> None:
    while True:
        worker.push(KEYS, torch.ones(40))


def _network() -> _native.TcpNetwork:
    return _native.TcpNetwork(token=TOKEN, local_sockets=False)


def test_garbage_is_counted_and_ends_nothing() -> None:
    network = _network()

    def body(server: Server, worker: Worker) -> float:
        worker.push(KEYS, torch.ones(40))
        if server.node == 1:
            evil = network.open("evil")
            for number, address in enumerate(server.addresses):
                evil.connect(number, address)
                for garbage in _garbage():
                    evil.send(number, garbage)
        expected = len(_garbage()) * len(server.addresses) // server.num_nodes
        eventually(lambda: server.statistics()["protocol_errors"] >= expected)
        worker.barrier()
        worker.push(KEYS, torch.ones(40))
        worker.barrier()
        assert (pulled(worker, KEYS) == 4).all()
        return server.statistics()["protocol_errors"]

    on_nodes(2, body, table={"keys": 40}, network=network)


def test_a_peer_of_another_version_is_a_protocol_error_of_every_operation() -> None:
    patient = dataclasses.replace(config.load(config.TransportSettings), peer_timeout_s=100.0)

    def body(server: Server, worker: Worker) -> None:
        worker.barrier()
        if server.node == 0:
            host, port = server.addresses[0].removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as old:
                old.sendall(b"TRLA" + struct.pack("<HHI", 99, 0, 0) + TOKEN)
                with pytest.raises(ProtocolError, match="version 99"):
                    _push_for_ever(worker)
        else:  # at once, not after the silence
            with pytest.raises(PeerLostError, match=r"node 0 is lost.*cannot serve it any more"):
                _push_for_ever(worker)
        with contextlib.suppress(ProtocolError, PeerLostError):  # where a push was under way
            worker.close()

    on_nodes(2, body, table={"keys": 40}, network=_network(), transport=patient)
