"""Creation of a table in all processes of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchrelay import _torch, config
from torchrelay._resource import Resource
from torchrelay.errors import ArgumentError, ConfigError
from torchrelay.parameters._contract import KeyInit, UpdateRule
from torchrelay.parameters._rendezvous import topology_of
from torchrelay.parameters._server import Server
from torchrelay.parameters._worker import Worker
from torchrelay.world import Meeting, World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

__all__ = ["Participant", "start"]


@dataclass(frozen=True)
class Participant(Resource):
    """This process in a table: the result of :func:`start`. A context manager.

    Attributes:
        server: this process's part of the table.
        worker: its worker.
        world: the processes of the job.
    """

    server: Server
    worker: Worker
    world: World

    def close(self) -> None:
        """Leave the table. Collective and idempotent."""
        self.worker.close()
        self.server.close()

    def _end_block(self, error: BaseException | None) -> None:
        """Leave the table; after an error without waiting for the others, which then raise."""
        self.worker._end_block(error)
        self.server._end_block(error)


def _job(group: ProcessGroup | None, timeout_s: float) -> tuple[World, Store]:
    """Return the processes of ``group``, else of the default group, else of the launcher; and
    their store.
    """
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


def start(
    num_keys: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    rule: UpdateRule | None = None,
    init: KeyInit | None = None,
    techniques: str = "all",
    name: str = "table",
    world: World | None = None,
    store: Store | None = None,
    node_of_rank: Callable[[int], int] | None = None,
    process_group: ProcessGroup | None = None,
    description: Mapping[str, Any] | None = None,
) -> Participant:
    """Create the table ``name`` with one worker per process. Collective over the job.

    Args:
        world: the job; default: that of ``process_group``, of the default process group if there is
            one, or of the launcher.
        store: shared by the processes of ``world``.
        node_of_rank: the node of each rank; default: its host.
        description: further values that must be equal on all processes.

    Raises:
        ArgumentError: a size, dtype, rule or technique is not supported.
        ConfigError: the default process group contradicts the launcher's variables.
        MismatchError: the processes describe different tables; on every process.
        OperationTimeoutError: a process is missing.
    """
    import torch.distributed as dist  # noqa: PLC0415

    settings = config.load(config.Parameters)
    if world is None:
        world, found = _job(process_group, settings.timeout_s)
        store = store or found
    # A name may be used again, after its table was closed or torchrun restarted the processes.
    shared = Meeting(
        dist.PrefixStore(name, store or world.connect(settings.timeout_s)),
        world.rank,
        world.size,
        settings.timeout_s,
    ).store
    topology = topology_of(
        world, shared, node_of_rank=node_of_rank, techniques=techniques, settings=settings
    )
    server = Server(
        num_keys,
        length=length,
        dtype=dtype,
        rule=rule,
        init=init,
        topology=topology,
        description=description,
    )
    return Participant(server, Worker(topology.member, server), world)
