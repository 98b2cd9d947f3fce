"""Foreign peers of the parameter manager's network, over real sockets."""

from __future__ import annotations

import ctypes
import socket
import struct

import pytest

from torchrelay import _native
from torchrelay.errors import ArgumentError, ProtocolError

TOKEN = bytes(16)


def open_pair(
    max_message_bytes: int = 1 << 30,
) -> tuple[_native.TcpNetwork, _native.Endpoint, _native.Endpoint]:
    network = _native.TcpNetwork(
        token=TOKEN, local_sockets=False, max_message_bytes=max_message_bytes
    )
    receiver, sender = network.open("receiver"), network.open("sender")
    sender.connect(0, receiver.address)
    return network, receiver, sender


def test_another_version_of_the_message_protocol_is_an_error() -> None:
    _, receiver, sender = open_pair()
    host, port = receiver.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as old:
        old.sendall(struct.pack("<4sHHI16s", b"TRLA", 99, 0, 0, TOKEN))
        with pytest.raises(ProtocolError, match="version 99"):
            receiver.receive(30)
        sender.send(0, b"of this version")
        assert bytes(receiver.receive(30) or b"") == b"of this version"


def test_a_message_that_no_memory_holds_leaves_its_buffer_free() -> None:
    _, _, sender = open_pair()
    array = (ctypes.c_char * (1 << 62)).from_address(ctypes.addressof(ctypes.c_char()))
    with memoryview(array) as huge, pytest.raises(MemoryError):  # its end fails while it is in use
        sender.send(0, b"", huge)


def test_oversized_messages_end_their_connection_only() -> None:
    network, receiver, sender = open_pair(max_message_bytes=1000)
    with pytest.raises(ArgumentError, match="1001 bytes"):
        sender.send(0, bytes(1001))
    _, _, careless = open_pair()
    careless.connect(1, receiver.address)
    careless.send(1, bytes(1001))
    sender.send(0, b"fits")
    assert bytes(receiver.receive(30) or b"") == b"fits"
    for _ in range(600):
        assert receiver.receive(0.05) is None
        if network.ignored_connections:
            break
    assert network.ignored_connections >= 1
