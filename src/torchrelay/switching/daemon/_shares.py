"""Fair shares of the device's time."""

from __future__ import annotations

__all__ = ["Rank", "Shares"]

Rank = tuple[int, float]  # the least goes first: by priority, then by the time it had


class Shares:
    """The time that models had of the device. Of equal priority, the one that had least goes first.

    A model that comes back after a while has no claim to the time that it did not ask for.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}  # in s, divided by the model's weight
        self._least = 0.0  # that the model had which was started last

    def rank(self, priority: int, name: str) -> Rank:
        return -priority, max(self._used.get(name, 0.0), self._least)

    def start(self, name: str) -> None:
        """Note that `name` runs now, as the one that had least."""
        self._least = self.rank(0, name)[1]

    def charge(self, name: str, seconds: float, weight: float = 1.0) -> None:
        self._used[name] = self.rank(0, name)[1] + seconds / weight
