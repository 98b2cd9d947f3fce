"""Statistics of the parameter manager: accesses, traffic, moved keys."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Metrics"]


class Metrics:
    """Statistics of one node since its start; ``later - earlier`` is the difference.

    Each statistic of :meth:`Server.statistics` is an attribute: keys pulled and pushed in this
    host's memory and elsewhere (``local_pulls``, ``remote_pulls``, ``local_pushes``,
    ``remote_pushes``), ``sent_bytes``, ``received_bytes`` and ``sent_messages``, ``relocations``
    to this node, ``refreshes`` of replicas on other nodes because a value had changed,
    ``evictions``, ``protocol_errors``, and ``rounds`` of the channels and ``round_seconds`` in
    them. ``replicas`` is a state, the keys of other nodes that this node holds a copy of now: a
    difference keeps the later one.
    """

    def __init__(self, statistics: Mapping[str, float]) -> None:
        self._statistics = dict(statistics)

    def __getattr__(self, name: str) -> float:
        try:
            return self.__dict__["_statistics"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"there is no statistic {name!r}") from None

    def __sub__(self, earlier: Metrics) -> Metrics:
        return Metrics(
            {
                name: value if name == "replicas" else value - getattr(earlier, name)
                for name, value in self._statistics.items()
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
