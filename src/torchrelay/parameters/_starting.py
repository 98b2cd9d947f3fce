"""The processes that share a table, as they find each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchrelay import _torch, config
from torchrelay.errors import ArgumentError, ConfigError
from torchrelay.parameters._topology import Topology, topology_of
from torchrelay.world import Meeting, Ranks, World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

__all__ = ["meet"]


def meet(
    name: str,
    techniques: str,
    node_of_rank: Callable[[int], int] | None,
    group: ProcessGroup | None,
) -> Topology:
    """Return the topology of the processes that share the table ``name``. Collective; blocks.

    They are those of ``group``, else of the default process group, else of the launcher.

    Raises:
        ArgumentError: this process is not in ``group``, or nodes differ in size or span hosts.
        ConfigError: the default process group contradicts the launcher's variables.
        OperationTimeoutError: a process is missing.
    """
    import torch.distributed as dist  # noqa: PLC0415

    settings = config.load(config.Parameters)
    world, store = _job(group, settings.timeout_s)
    # A name may be used again, after its table was closed or torchrun restarted the processes.
    meeting = Meeting(dist.PrefixStore(name, store), world.rank, world.size, settings.timeout_s)
    ranks = Ranks(meeting.store, world.rank, world.size)
    return topology_of(
        ranks,
        world.master_addr,
        node_of_rank=node_of_rank,
        techniques=techniques,
        settings=settings,
    )


def _job(group: ProcessGroup | None, timeout_s: float) -> tuple[World, Store]:
    import torch.distributed as dist  # noqa: PLC0415

    launched = World.from_environment()
    if group is None and not dist.is_initialized():
        return launched, launched.connect(timeout_s)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ArgumentError("this process is not in the process group that was given")
    if group is None and launched.size > 1 and (launched.rank, launched.size) != (rank, size):
        raise ConfigError(
            f"this process is rank {rank} of {size} in the default process group, but rank "
            f"{launched.rank} of {launched.size} by the variables of {launched.launcher}; pass "
            "process_group= to choose"
        )
    store: Store = _torch.group_store(group or dist.group.WORLD)
    host = _torch.store_host(store) or launched.master_addr
    return World(rank, size, launcher="a process group", master_addr=host), store
