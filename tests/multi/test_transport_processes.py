from __future__ import annotations

import pytest
from torch.distributed import Store  # type: ignore[attr-defined]

from torchrelay.transport import Transport, TransportSettings, connect, session_token, zmq_network
from torchrelay.world import World

SETTINGS = TransportSettings(heartbeat_s=0.2, silence_s=60)


def join(world: World, store: Store, settings: TransportSettings = SETTINGS) -> Transport:
    network = zmq_network(settings, token=session_token(store, world.rank))
    return connect(network, store, world.rank, world.size, "test", settings)


def leave_together(world: World, store: Store) -> None:
    """Returns when all ranks have called it: none leaves before all have heard all."""
    store.set(f"done/{world.rank}", "")
    store.wait([f"done/{rank}" for rank in range(world.size)])
    store.set(f"left/{world.rank}", "")
    if world.rank == 0:  # it serves the store
        store.wait([f"left/{rank}" for rank in range(world.size)])


@pytest.mark.processes(4)
@pytest.mark.parametrize("local_sockets", [True, False])
def test_everyone_hears_everyone(world: World, local_sockets: bool) -> None:
    store = world.connect(60)
    transport = join(
        world, store, TransportSettings(heartbeat_s=0.2, silence_s=60, local_sockets=local_sockets)
    )
    peers = [peer for peer in range(world.size) if peer != world.rank]
    for number in range(300):
        for peer in peers:
            transport.send(peer, f"{number}".encode() + b"." * (number % 5 * 1000))
    heard: dict[int, list[int]] = {peer: [] for peer in peers}
    for _ in range(300 * len(peers)):
        message = transport.receive(60)
        heard[message.peer].append(int(message.data.rstrip(b".")))
    assert all(numbers == list(range(300)) for numbers in heard.values())
    leave_together(world, store)
    transport.close()


@pytest.mark.processes(2)
def test_floods_from_both_sides_pass_each_other(world: World) -> None:
    settings = TransportSettings(heartbeat_s=0.2, silence_s=60, high_water_mark=1000)
    store = world.connect(60)
    transport = join(world, store, settings)
    data = bytes(100_000)
    for _ in range(200):
        transport.send(1 - world.rank, data, timeout_s=60)
    for _ in range(200):
        assert len(transport.receive(60).data) == len(data)
    leave_together(world, store)
    transport.close()
