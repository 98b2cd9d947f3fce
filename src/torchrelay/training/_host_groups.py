"""Process groups of ranks that share a host, the default nodes of SlowMo and GossipGraD."""

from __future__ import annotations

import torch.distributed as dist

from torchrelay.world import host_identity

__all__ = ["ranks_by_host", "subgroup_of"]


def ranks_by_host() -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first rank. Collective over the default
    group.
    """
    identities: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(identities, host_identity())
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return list(hosts.values())


def subgroup_of(partition: list[list[int]]) -> dist.ProcessGroup:
    """This rank's process group out of a partition of all ranks. Collective over the default
    group.
    """
    group, _ = dist.new_subgroups_by_enumeration(partition)  # type: ignore[no-untyped-call]
    if not isinstance(group, dist.ProcessGroup):
        raise AssertionError(f"rank {dist.get_rank()} is in none of the groups {partition}")
    return group
