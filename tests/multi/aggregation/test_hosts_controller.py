"""Groups over hosts whose leaders form their session by a switch's controller."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.aggregation import Options
from torchrelay.aggregation.switch import Controller, SwitchServer, UdpDataPlane
from torchrelay.errors import UnavailableError
from torchrelay.world import World

pytest.importorskip("grpc", reason="needs grpcio")
SMALL: dict[str, Any] = {"num_worker_threads": 2, "max_outstanding_packets": 16, "packet_numel": 64}


@contextlib.contextmanager
def controlled(world: World) -> Iterator[int]:
    """Rank 0 runs a switch and its controller; yields the controller's port."""
    os.environ["TORCHRELAY_HOST_ID"] = "aab"[world.rank]
    store = world.connect(60)
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            server = stack.enter_context(SwitchServer(UdpDataPlane(port=0)))
            store.set("port", str(stack.enter_context(Controller(server, port=0)).port))
        yield int(store.get("port"))
        store.set(f"done/{world.rank}", "")
        store.wait([f"done/{rank}" for rank in range(world.size)])


def start(world: World, options: Options, timeout_s: float = 60.0) -> None:
    dist.init_process_group(
        "sml",
        store=world.connect(60),
        rank=world.rank,
        world_size=3,
        timeout=timedelta(seconds=timeout_s),
        pg_options=options,
    )


@pytest.mark.processes(3)
def test_leaders_form_their_sessions(world: World) -> None:
    with controlled(world) as port:
        options = Options(controller_ip="127.0.0.1", controller_port=port, **SMALL)
        start(world, options)
        others = dist.new_group([1, 2], backend="sml", pg_options=options)
        for group, ranks in ((None, (0, 1, 2)), (others, (1, 2))):
            if world.rank in ranks:
                tensor = torch.full((5000,), 10**world.rank, dtype=torch.int32)
                dist.all_reduce(tensor, group=group)
                assert tensor.eq(sum(10**rank for rank in ranks)).all()
                links = cast(Any, group or dist.group.WORLD).stats().links
                (switch,) = [link for link in links if link.transport == "switch"]
                is_leader = world.rank in (ranks[0], 2)
                assert switch.sent_bytes == (tensor.nbytes if is_leader else 0)
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.processes(3)
def test_mistakes_are_raised_on_every_rank(world: World) -> None:
    with controlled(world) as port:
        mine = port if world.rank < 2 else 9  # where nobody listens
        with pytest.raises(UnavailableError, match="could not join its switch: controller"):
            start(world, Options(controller_ip="127.0.0.1", controller_port=mine), timeout_s=6)
