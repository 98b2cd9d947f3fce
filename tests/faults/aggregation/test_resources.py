"""A rank that lacks descriptors reports it, and the others do not wait for their timeout of 30
minutes: these ranks would be killed long before.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - what is imported late needs descriptors too
from torchrelay.errors import TorchRelayError
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses


def report(call: Callable[[], Any]) -> str:
    try:
        call()
    except TorchRelayError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextlib.contextmanager
def descriptors_left(count: int) -> Any:
    """Leave this process so many descriptors."""
    held = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limit[0]), limit[1]))
    with contextlib.suppress(OSError):
        while True:
            held.append(os.dup(0))
    for _ in range(min(count, len(held))):
        os.close(held.pop())
    try:
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def _create_with_few_descriptors(world: World, poor: int) -> list[str]:
    store = world.connect(60)
    heard = []
    for count in range(8):
        scarce = descriptors_left(count) if world.rank == poor else contextlib.nullcontext()
        with scarce:
            heard.append(report(lambda: start(store, world, f"try{count}")))  # noqa: B023
        if dist.is_initialized():
            dist.destroy_process_group()
    start(store, world, "last")  # with all that it needs
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(world.size).all()
    return heard


def start(store: Any, world: World, prefix: str) -> None:
    dist.init_process_group(
        "sml",
        store=dist.PrefixStore(prefix, store),
        rank=world.rank,
        world_size=world.size,
    )


@pytest.mark.parametrize("poor", [0, 1])
def test_no_descriptors_at_the_creation(run_processes: RunProcesses, poor: int) -> None:
    results = run_processes(_create_with_few_descriptors, 2, poor=poor)
    assert all(result.ok for result in results), results
    failed = 0
    for ours, theirs in zip(results[poor].value, results[1 - poor].value, strict=True):
        assert (ours == "nothing") == (theirs == "nothing"), (ours, theirs)
        if ours != "nothing":
            failed += 1
            assert "Too many open files" in ours, ours
            if "attaching the segment" not in theirs:  # which the poor rank has closed already
                assert f"rank {poor} cannot be in the group" in theirs, theirs
                assert "Too many open files" in theirs, theirs
    assert failed >= 2, results[poor].value
