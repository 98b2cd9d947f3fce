"""What this package shares: checks of settings, the ranks of a node, the two callers of a hook, and
the shards of DTensors.

DDP passes buckets, FSDP passes gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.world import host_identity

__all__ = ["check_setting", "local_tensor", "ranks_by_host", "refuse_sharded", "subgroup_of"]


def check_setting(owner: object, name: str, value: object, holds: bool, condition: str) -> None:
    """Raise :class:`ArgumentError` for a setting of ``owner`` that does not hold a condition."""
    if not holds:
        raise ArgumentError(f"{type(owner).__name__}: {name} = {value}; it must {condition}")


def refuse_sharded(hook: str, output: torch.Tensor | None) -> None:
    """Raise :class:`UnsupportedError` if FSDP asks for a shard of the gradient."""
    if output is not None:
        raise UnsupportedError(
            f"{hook}: FSDP shards its gradients here, and only whole ones can be averaged among "
            "some of the ranks; use ShardingStrategy.NO_SHARD, or shard inside a node with "
            "FSDP(process_group=...) and no hook"
        )


def ranks_by_host() -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first rank.

    Collective over the default group.
    """
    identities: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(identities, host_identity())
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return list(hosts.values())


def subgroup_of(partition: list[list[int]]) -> dist.ProcessGroup:
    """Return this rank's process group out of a partition of all ranks.

    Collective over the default group.
    """
    group, _ = dist.new_subgroups_by_enumeration(partition)  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup), "every rank is in a part"
    return group


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory; of others the tensor itself."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
