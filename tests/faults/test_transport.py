"""Killed, silent, foreign and hostile peers of the ZeroMQ network, over real sockets between
processes.
"""

from __future__ import annotations

import contextlib
import random
import socket

import pytest

from torchrelay import _native
from torchrelay.errors import ArgumentError, ProtocolError
from torchrelay.transport import (
    zmq_library_path,
)

TOKEN = bytes(16)


def open_pair(**options: object) -> tuple[_native.ZmqNetwork, _native.Endpoint, _native.Endpoint]:
    network = _native.ZmqNetwork(zmq_library_path(), token=TOKEN, local_sockets=False, **options)  # type: ignore[arg-type]
    receiver, sender = network.open("receiver"), network.open("sender")
    sender.connect(0, receiver.address)
    return network, receiver, sender


def test_hostile_bytes_on_the_port_do_nothing() -> None:
    _, receiver, sender = open_pair()
    host, port = receiver.address.removeprefix("tcp://").split(":")
    noise = random.Random(7)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    attacks = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100000,
        greeting,
        greeting + b"\x02" + b"\xff" * 8,  # a frame of 2^64 - 1 bytes
        greeting + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH" + b"\x02" + b"\x7f" * 8,
        *[noise.randbytes(noise.randrange(1, 3000)) for _ in range(50)],
        *[greeting + noise.randbytes(noise.randrange(1, 3000)) for _ in range(50)],
    ]
    for attack in attacks:
        connection = socket.create_connection((host, int(port)))
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(attack)
    sender.send(0, b"still here")
    assert receiver.receive(30) == b"still here"
    assert receiver.receive(0.05) is None


def test_strangers_who_speak_zeromq_are_ignored_and_counted() -> None:
    import zmq

    network, receiver, sender = open_pair()
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.linger = 0
        stranger.connect(receiver.address)
        preamble = b"TRLY" + b"\x01\x00\x00\x00" + b"wrong token 0000"
        for frames in (
            [b"hello"],
            [b"", b""],
            [preamble, b"data"],
            [preamble],
            [b"a", b"b", b"c"] * 10,
        ):
            stranger.send_multipart(frames)
        for _ in range(600):
            assert receiver.receive(0.05) is None
            if network.ignored_messages == 5:
                break
        assert network.ignored_messages == 5
    sender.send(0, b"friend")
    assert receiver.receive(30) == b"friend"


def test_another_version_of_the_message_protocol_is_an_error() -> None:
    import zmq

    _, receiver, _ = open_pair()
    with zmq.Context() as context, context.socket(zmq.PUSH) as old:
        old.linger = 0
        old.connect(receiver.address)
        old.send_multipart([b"TRLY" + b"\x63\x00\x00\x00" + TOKEN, b"data"])
        with pytest.raises(ProtocolError, match="version 99"):
            receiver.receive(30)
        old.send_multipart([b"TRLY" + b"\x01\x00\x00\x00" + TOKEN, b"data"])
        assert receiver.receive(30) == b"data"


def test_oversized_messages_end_their_connection_only() -> None:
    _, receiver, sender = open_pair(max_message_bytes=1000)
    with pytest.raises(ArgumentError, match="1001 bytes"):
        sender.send(0, bytes(1001))
    _, _, careless = open_pair()
    careless.connect(1, receiver.address)
    careless.send(1, bytes(1001))
    sender.send(0, b"fits")
    assert receiver.receive(30) == b"fits"
    assert receiver.receive(0.2) is None
