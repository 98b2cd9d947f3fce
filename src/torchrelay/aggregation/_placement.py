"""The hosts of the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay._communicators import hosts_of

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """The ranks of each host, in order; the hosts in the order of their lowest ranks.

    A host's *leader* is its lowest rank.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rank: int, identities: Sequence[str]) -> Placement:
        """Return the placement of ranks whose hosts have these ``identities``."""
        return cls(rank, hosts_of(identities))

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def host(self) -> int:
        """The index of this rank's host."""
        return self.host_of(self.rank)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @property
    def remote(self) -> list[int]:
        """The ranks of other hosts."""
        return [rank for rank in range(self.size) if rank not in self.local]

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.hosts)

    @property
    def other_hosts(self) -> list[int]:
        return [host for host in range(len(self.hosts)) if host != self.host]

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)

    def local_index(self, rank: int) -> int:
        """Return the index of ``rank`` among the ranks of its host."""
        return self.hosts[self.host_of(rank)].index(rank)

    def leaders_for(self, root: int | None) -> tuple[int, ...]:
        """Return the rank of each host that exchanges with other hosts: its leader, or ``root``."""
        if root is None:
            return self.leaders
        return tuple(root if root in ranks else ranks[0] for ranks in self.hosts)

    def counterpart(self, host: int, rank: int) -> int:
        """Return the rank of ``host`` that exchanges with ``rank`` of another host."""
        ranks = self.hosts[host]
        return ranks[self.local_index(rank) % len(ranks)]
