"""Fair shares of the device's time."""

from __future__ import annotations

__all__ = ["Rank", "Shares"]

# The least goes first: by priority, by the time it had, by its last turn.
Rank = tuple[int, float, int]


class Shares:
    """Whose turn it is: of equal priority, that of the model which had least of the device's time.

    A turn ends between two steps, so it takes longer than it should. Up to half a turn of that
    shortens the model's next one, as in deficit round robin (Shreedhar and Varghese, 1995):
    models of equal weight go in rounds, and none waits for two turns of another. Only what goes
    beyond is made up for by more turns of the others.

    A model that comes back after a while has no claim to the time that it did not ask for.
    """

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._used: dict[str, float] = {}  # in s, divided by the model's weight
        self._owed: dict[str, float] = {}  # in s, of the next turn
        self._turns: dict[str, int] = {}  # the number of the last one
        self._count = 0
        self._least = 0.0  # that the model had which was started last

    def rank(self, priority: int, name: str) -> Rank:
        used = max(self._used.get(name, 0.0), self._least)
        return -priority, used, self._turns.get(name, 0)

    def start(self, name: str) -> float:
        """Begin a turn of `name`, the one that had least; return how many seconds it may take."""
        self._least = self.rank(0, name)[1]
        self._count += 1
        self._turns[name] = self._count
        return self._turn_s - self._owed.get(name, 0.0)

    def charge(self, name: str, seconds: float, weight: float = 1.0) -> None:
        """End a turn of `name`, which took `seconds`."""
        seconds += self._owed.get(name, 0.0)
        beyond = max(0.0, seconds - self._turn_s)
        self._owed[name] = owed = min(beyond, self._turn_s / 2)
        charged = self._turn_s + (beyond - owed) if beyond else seconds
        self._used[name] = self.rank(0, name)[1] + charged / weight
