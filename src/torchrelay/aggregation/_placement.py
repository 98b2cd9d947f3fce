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
        return next(host for host, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.hosts)
