"""Counters of the parameter manager: accesses, traffic, moved keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

__all__ = ["Metrics"]


@dataclass(frozen=True)
class Metrics:
    """Counters of one node since its start; ``later - earlier`` is the difference.

    ``replicas`` and ``owned`` are states, not counters: a difference keeps the later one.
    """

    local_pulls: float = 0  # keys, served from this host's memory
    remote_pulls: float = 0  # keys, fetched from another node
    local_pushes: float = 0
    remote_pushes: float = 0
    sent_bytes: float = 0
    received_bytes: float = 0
    sent_messages: float = 0
    relocations: float = 0  # keys that moved to this node
    replicas: float = 0  # keys of other nodes that this node holds a copy of now
    owned: float = 0  # keys this node owns now
    rounds: float = 0  # of the channels
    refreshes: float = (
        0  # values sent to replicas on other nodes, because the key's value had changed
    )
    evictions: float = 0
    protocol_errors: float = 0
    round_seconds: float = 0  # time in rounds, all channels together
    refresh_age_seconds: float = (
        0  # over all refreshes: how long before it the owner last looked for changes
    )

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, float]) -> Metrics:
        """Convert the result of :meth:`Server.statistics`."""
        return cls(**{field.name: statistics.get(field.name, 0) for field in fields(cls)})

    def __sub__(self, earlier: Metrics) -> Metrics:
        states = {"replicas", "owned"}
        return Metrics(
            **{
                field.name: getattr(self, field.name)
                - (0 if field.name in states else getattr(earlier, field.name))
                for field in fields(self)
            }
        )

    @property
    def locality(self) -> float:
        """The share of pulled keys served from this host's memory, 0 to 1; 1 if none was pulled."""
        pulls = self.local_pulls + self.remote_pulls
        return self.local_pulls / pulls if pulls else 1.0

    @property
    def staleness_s(self) -> float:
        """The average of the longest time that a changed key waited until it was sent to replicas.

        In seconds, without the transfer; 0 if nothing was sent.
        """
        return self.refresh_age_seconds / self.refreshes if self.refreshes else 0.0

    def __str__(self) -> str:
        """Return one line for a progress bar."""
        return (
            f"{self.locality:.3%} local, {self.sent_bytes / 1e6:.1f} MB out, "
            f"{self.received_bytes / 1e6:.1f} MB in, {self.relocations:.0f} moved, "
            f"{self.replicas:.0f} replicas, staleness {self.staleness_s * 1e3:.1f} ms"
        )
