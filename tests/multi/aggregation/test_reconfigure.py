"""Groups of c10d whose members change: shrink, grow, split, merge, join late, alone."""

from __future__ import annotations

import contextlib
import itertools
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchrelay.aggregation import Configuration, Options, get_reconfigure_handle, reconfigure
from torchrelay.aggregation.switch import SwitchServer, UdpDataPlane
from torchrelay.errors import ArgumentError, UnavailableError
from torchrelay.world import World

_steps = itertools.count()
TIMEOUT_S = 60.0
CHECKED = 5  # collectives of check(); that of objects has two


def start(world: World, options: Options | None = None, **more: Any) -> dist.Store:
    """Make a group of all; return the store, over which the tests exchange handles.

    Args:
        more: arguments that not every torch has.
    """
    store = world.connect(TIMEOUT_S)
    dist.init_process_group(
        "sml",
        store=dist.PrefixStore("init", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=TIMEOUT_S),
        pg_options=options,
        **more,
    )
    return store


def start_alone() -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dist.init_process_group("sml")
    assert dist.get_world_size() == 1


def exchange(world: World, store: dist.Store) -> list[str]:
    step = next(_steps)
    store.set(f"handle/{step}/{world.rank}", get_reconfigure_handle())
    return [store.get(f"handle/{step}/{rank}").decode() for rank in range(world.size)]


def check(formed: Configuration, members: int, group: Any = None) -> None:
    """Compare what the group says and sums with what it should."""
    assert dist.get_world_size(group) == formed.size == members
    assert dist.get_rank(group) == formed.rank
    tensor = torch.full((1000,), formed.rank + 1.0)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(members * (members + 1) / 2).all()
    gathered = [torch.empty(2) for _ in range(members)]
    dist.all_gather(gathered, torch.full((2,), float(formed.rank)), group=group)
    assert [int(each[0]) for each in gathered] == list(range(members))
    objects: list[Any] = [None] * members
    dist.all_gather_object(objects, formed.rank, group=group)
    assert objects == list(range(members))
    dist.barrier(group)


@pytest.mark.processes(4, together=True)
def test_shrink_and_grow(world: World) -> None:
    store = start(world)
    dist.all_reduce(torch.ones(3))
    handles = exchange(world, store)
    completed = 1
    for uuid, chosen in enumerate(([0, 1, 2], [2, 0], [3, 1, 0, 2], [1, 2, 3], [0, 1, 2, 3])):
        if world.rank in chosen:
            formed = reconfigure(None, uuid, [handles[rank] for rank in chosen])
            assert formed.rank == chosen.index(world.rank)
            assert formed.completed_on_all == completed
            check(formed, len(chosen))
            completed = CHECKED


@pytest.mark.processes(4, together=True)
def test_split_merge_and_alone(world: World) -> None:
    handles = exchange(world, start(world))
    assert dist.group.WORLD is not None
    check(reconfigure(dist.group.WORLD, world.rank // 2, handles[world.rank // 2 * 2 :][:2]), 2)
    check(reconfigure(None, 10, handles), 4)
    check(reconfigure(None, 20 + world.rank, {handles[world.rank]}), 1)
    formed = reconfigure(None, 30, set(handles))
    assert set(formed.handles) == set(handles)
    check(formed, 4)


@pytest.mark.processes(4, together=True)
def test_join_without_a_launcher_or_a_common_store(world: World) -> None:
    store = world.connect(TIMEOUT_S)
    start_alone()
    handles = exchange(world, store)
    if world.rank < 2:
        check(reconfigure(None, 1, handles[:2]), 2)
    check(reconfigure(None, 2, handles), 4)


@pytest.mark.processes(4, together=True)
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_between_hosts(world: World, hosts: str) -> None:
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    store = start(world)
    handles = exchange(world, store)
    for uuid, chosen in enumerate(([0, 1, 2, 3], [3, 0], [1, 0, 2], [2, 3], [3, 2, 1, 0])):
        if world.rank in chosen:
            check(reconfigure(None, uuid, [handles[rank] for rank in chosen]), len(chosen))
    if hosts == "abab":  # of a set, ranks of one host are neighbours
        formed = reconfigure(None, 10, frozenset(handles))
        placed = [hosts[handles.index(handle)] for handle in formed.handles]
        assert placed in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
        stats = dist.group.WORLD.stats()  # type: ignore[union-attr]
        assert {link.transport for link in stats.links} == {"shm", "tcp"}
    os.environ.pop("TORCHRELAY_HOST_ID")


@pytest.mark.processes(4, together=True)
def test_with_a_switch(world: World) -> None:
    os.environ["TORCHRELAY_HOST_ID"] = "abac"[world.rank]
    store = world.connect(TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            server = stack.enter_context(SwitchServer(UdpDataPlane(port=0)))
            store.set("switch", server.address)
        options = Options(switch=store.get("switch").decode(), packet_numel=64)
        start(world, options)
        handles = exchange(world, store)
        for uuid, chosen in enumerate(([0, 1, 2], [3, 1, 0, 2], [2, 3], [0, 1, 2, 3])):
            if world.rank in chosen:
                formed = reconfigure(None, uuid, [handles[rank] for rank in chosen])
                tensor = torch.full((100_003,), formed.rank + 1, dtype=torch.int32)
                dist.all_reduce(tensor)
                assert tensor.eq(sum(range(1, formed.size + 1))).all()
                links = dist.group.WORLD.stats().links  # type: ignore[union-attr]
                sent = {link.transport: link.sent_bytes for link in links}
                leads_host = world.rank != 2 or 0 not in chosen
                assert (sent["switch"] > 0) == leads_host
        dist.barrier()  # rank 0 serves the switch until all are done
        dist.destroy_process_group()
    os.environ.pop("TORCHRELAY_HOST_ID")


@pytest.mark.processes(4, together=True)
def test_after_abort_and_after_a_failure(world: World) -> None:
    handles = exchange(world, start(world))
    group: Any = dist.group.WORLD
    group.abort()
    with pytest.raises(UnavailableError, match="was aborted; call reconfigure"):
        dist.all_reduce(torch.ones(3))
    check(reconfigure(None, 1, handles), 4)
    if world.rank == 0:
        with pytest.raises(TimeoutError):
            reconfigure(None, 2, handles, 0.05)
        with pytest.raises(UnavailableError, match="reconfiguration 2 failed"):
            dist.barrier()
        with pytest.raises(ArgumentError, match="already used"):
            reconfigure(None, 1, handles)
    check(reconfigure(None, 3, handles), 4)


@pytest.mark.processes(4, together=True)
def test_messages_and_training_in_a_new_group(world: World) -> None:
    handles = exchange(world, start(world))
    formed = reconfigure(None, 1, [handles[rank] for rank in (2, 3, 0, 1)])
    tensor, received = torch.full((4,), float(formed.rank)), torch.empty(4)
    sent = dist.isend(tensor, (formed.rank + 1) % 4)
    dist.recv(received, (formed.rank - 1) % 4)
    assert sent is not None
    sent.wait()
    assert received.eq((formed.rank - 1) % 4).all()
    if formed.rank > 2:
        return
    formed = reconfigure(None, 2, formed.handles[:3])
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), formed.rank + 1.0)).sum().backward()
    grad = model.module.weight.grad
    assert grad is not None and grad.eq(2.0).all()  # DDP divides by the new size


@pytest.mark.processes(2, together=True)
def test_other_groups_are_refused(world: World) -> None:
    start(world)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ArgumentError, match="only groups of sml"):
        get_reconfigure_handle(gloo)
    both: Any = dist.new_group(backend="cuda:gloo,cpu:sml")
    with pytest.raises(NotImplementedError, match="with other backends"):
        get_reconfigure_handle(both)


has_own = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch has its own functions since 2.15"
)
_torch: Any = dist


@has_own
@pytest.mark.processes(3, together=True)
def test_by_functions_of_torch(world: World) -> None:
    store = start(world, enable_reconfigure=True)
    assert _torch._supports_reconfigure()
    backend: Any = _torch.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
    assert backend.supports_reconfigure
    with pytest.raises(UnavailableError, match="has not been done"):
        dist.all_reduce(torch.ones(3))
    handles = exchange(world, store)
    assert _torch._get_reconfigure_handle() == handles[world.rank]

    def form(uuid: int, chosen: list[int]) -> None:
        members = [handles[rank] for rank in chosen]
        _torch._reconfigure(uuid, members, timeout=timedelta(seconds=TIMEOUT_S)).wait()
        assert dist.get_rank() == chosen.index(world.rank)
        assert dist.get_world_size() == len(chosen)
        tensor = torch.full((4,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(1, len(chosen) + 1))).all()

    form(1 + world.rank, [world.rank])
    with pytest.raises(RuntimeError, match="already used"):
        form(1 + world.rank, [world.rank])
    form(10, [0, 1, 2])
    if world.rank != 1:
        form(11, [2, 0])
    backend.abort()
    assert backend.get_error().name == "SUCCESS"
    form(12, [1, 2, 0])
