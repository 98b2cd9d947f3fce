from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from nodes import in_threads
from torchrelay import _native
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
)
from torchrelay.transport import (
    Transport,
    TransportSettings,
    connect,
    create_key_file,
    plain_network,
    read_key_file,
    session_token,
    zmq_library_path,
    zmq_network,
)

SETTINGS = TransportSettings(heartbeat_s=0.2, silence_s=30)
TOKEN = bytes(16)


@contextmanager
def meshed(
    nodes: int, network: _native.Network | None = None, settings: TransportSettings = SETTINGS
) -> Iterator[list[Transport]]:
    network = network or _native.MemoryNetwork()
    store = HashStore()

    def join(node: int) -> Transport:
        return connect(network, store, node, nodes, "test", settings)

    with ExitStack() as stack:
        transports = in_threads([lambda node=node: join(node) for node in range(nodes)])
        for transport in transports:
            stack.enter_context(closing(transport))
        yield transports


NETWORKS = {
    "memory": _native.MemoryNetwork,
    "bad weather": lambda: _native.MemoryNetwork(max_delay_s=0.003, duplicate_probability=0.3, seed=7),
    "zeromq": lambda: zmq_network(SETTINGS, token=TOKEN),
    "plain sockets": lambda: plain_network(SETTINGS, token=TOKEN),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())
def test_messages_arrive_once_and_in_order(make: Callable[[], _native.Network]) -> None:
    with meshed(3, make()) as transports:

        def talk(transport: Transport) -> dict[int, list[int]]:
            peers = [peer for peer in range(3) if peer != transport.node]
            for number in range(200):
                for peer in peers:
                    transport.send(peer, str(number).encode())
            heard: dict[int, list[int]] = {peer: [] for peer in peers}
            for _ in range(400):
                message = transport.receive()
                heard[message.peer].append(int(message.data))
            return heard

        for heard in in_threads([lambda t=t: talk(t) for t in transports]):
            assert all(numbers == list(range(200)) for numbers in heard.values())


def test_one_node_alone() -> None:
    with meshed(1) as (transport,):
        assert (transport.node, transport.nodes) == (0, 1)
        with pytest.raises(ArgumentError):
            transport.send(0, b"")
        with pytest.raises(OperationTimeoutError):
            transport.receive(0.01)


def test_a_full_peer_makes_senders_wait_and_time_out() -> None:
    settings = TransportSettings(heartbeat_s=0.2, high_water_mark=4)
    with meshed(2, settings=settings) as (a, b):
        for number in range(4):
            a.send(1, bytes([number]))
        with pytest.raises(OperationTimeoutError, match=r"node 1.*4 messages untaken") as caught:
            a.send(1, b"one too many", timeout_s=0.1)
        assert caught.value.ranks == (1,)
        in_threads([lambda: a.send(1, b"waits"), lambda: [b.receive() for _ in range(4)]])
        assert b.receive().data == b"waits"


def test_the_size_limit() -> None:
    with meshed(2, settings=TransportSettings(max_message_bytes=10)) as (a, b):
        with pytest.raises(ArgumentError, match="11 bytes"):
            a.send(1, bytes(11))
        a.send(1, bytes(10))
        assert b.receive().data == bytes(10)


def test_a_farewell_is_heard_after_the_last_message() -> None:
    with meshed(2) as (a, b):
        a.send(1, b"last words")
        a.close()
        assert b.receive().data == b"last words"
        with pytest.raises(PeerLostError, match="node 0 closed") as caught:
            b.receive()
        assert caught.value.ranks == (0,)
        with pytest.raises(OperationTimeoutError):
            b.receive(0.05)  # told once
        with pytest.raises(PeerLostError):
            b.send(0, b"anyone there?")
        with pytest.raises(PeerLostError):
            a.receive()
        a.close()


def test_silence_is_a_loss_that_names_the_peer() -> None:
    network = _native.MemoryNetwork()
    with meshed(3, network, TransportSettings(heartbeat_s=0.1, silence_s=1)) as (a, b, _):
        network.cut("node-2")
        for transport in (a, b):
            with pytest.raises(PeerLostError, match=r"node 2 has not been heard of for \d") as caught:
                transport.receive(20)
            assert caught.value.ranks == (2,)
        a.send(1, b"we go on")
        assert b.receive().data == b"we go on"


def test_a_missing_node_is_named() -> None:
    with pytest.raises(OperationTimeoutError) as caught:
        connect(_native.MemoryNetwork(), HashStore(), 0, 2, "t", TransportSettings(connect_timeout_s=0.1))
    assert caught.value.ranks == (1,)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network, store = _native.MemoryNetwork(), HashStore()
    old = network.open("old")
    store.set("torchrelay/transport/t/1", old.address)

    def old_node() -> None:
        address = store.get("torchrelay/transport/t/0").decode()
        old.connect(0, address)
        old.send(0, bytes([1, 0, 99, 0, 1, 0, 0, 0]) + bytes(8))

    def new_node() -> None:
        with pytest.raises(ProtocolError, match="node 1 speaks version 99"):
            connect(network, store, 0, 2, "t", SETTINGS)

    in_threads([new_node, old_node])


@pytest.mark.parametrize("garbage", [b"", b"short", b"\xff" * 16, bytes([9, 0, 1, 0, 1, 0, 0, 0]) + bytes(8)])
def test_a_damaged_message_is_a_protocol_error(garbage: bytes) -> None:
    network, store = _native.MemoryNetwork(), HashStore()
    evil = network.open("evil")
    with ExitStack() as stack:
        for transport in in_threads(
            [lambda n=n: connect(network, store, n, 2, "t", SETTINGS) for n in (0, 1)]
        ):
            stack.enter_context(closing(transport))
            if transport.node == 0:
                victim = transport
        evil.connect(0, store.get("torchrelay/transport/t/0").decode())
        evil.send(0, garbage)
        with pytest.raises(ProtocolError):
            victim.receive(10)


def test_node_numbers_are_checked() -> None:
    with pytest.raises(ArgumentError):
        connect(_native.MemoryNetwork(), HashStore(), 2, 2, "t")


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    create_key_file(path)
    public, secret = read_key_file(path)
    assert len(public) == len(secret) == 40 and public != secret
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_key_file(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key_file(path)
    for content in ("", "a b", "\xff\xfe"):
        bad = tmp_path / "bad"
        bad.write_text(content)
        bad.chmod(0o600)
        with pytest.raises(ConfigError):
            read_key_file(bad)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(tmp_path / "missing")


def test_curve_keys_let_friends_in(tmp_path: Path) -> None:
    create_key_file(tmp_path / "keys")
    settings = TransportSettings(heartbeat_s=0.2, key_file=str(tmp_path / "keys"))
    with meshed(2, zmq_network(settings, token=TOKEN), settings) as (a, b):
        a.send(1, b"secret" * 100000)
        assert b.receive().data == b"secret" * 100000


def test_plain_sockets_and_keys_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="do not encrypt"):
        plain_network(TransportSettings(key_file="keys"), token=TOKEN)


def test_the_token_is_drawn_by_node_0() -> None:
    store = HashStore()
    token = session_token(store, 0)
    assert len(token) == 16 and session_token(store, 1) == token
    with pytest.raises(OperationTimeoutError, match="node 0 did not come"):
        session_token(store, 1, "another name", timeout_s=0.01)
    with pytest.raises(ArgumentError, match="16 bytes"):
        _native.ZmqNetwork(zmq_library_path(), token=b"short")


def test_the_library_is_found_and_a_foreign_one_refused() -> None:
    assert os.path.exists(zmq_library_path())
    with pytest.raises(UnavailableError):
        _native.ZmqNetwork("libm.so.6", token=TOKEN)
