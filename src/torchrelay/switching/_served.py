"""The state of a served model in the daemon."""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field

from torchrelay.errors import TorchRelayError
from torchrelay.switching._contract import Copy
from torchrelay.switching._planner import Grouped
from torchrelay.switching._store import StoredModel

__all__ = ["Served", "merged_copies"]


@dataclass(eq=False)
class Served:
    """A model that is loaded or loading."""

    model: StoredModel
    grouped: Grouped
    priority: int
    ready: Future[None] = field(default_factory=Future)
    plan: int = 0
    profiling: bool = False
    regroup: Grouped | None = None  # applied once no copy or request uses the old groups
    runs_whole: bool = False  # requests start when all groups have arrived
    error: TorchRelayError | None = None
    lost_builds: int = 0  # workers that died while they built its modules
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)
    _copies: dict[int, list[Copy]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def key(self) -> tuple[int, int]:
        """The version and plan that a worker must have loaded."""
        return self.model.version, self.plan

    def apply_regroup(self) -> None:
        """Use the groups of `regroup` from now on; requests can run."""
        assert self.regroup is not None
        self.grouped, self.regroup = self.regroup, None
        self.plan += 1
        self._copies.clear()
        if not self.ready.done():
            self.ready.set_result(None)

    def fail(self, error: TorchRelayError) -> None:
        """Fail those that wait for the model to be ready."""
        if not self.ready.done():
            self.ready.set_exception(error)

    def copies(self, group: int, offset_bytes: int) -> list[Copy]:
        """Return the copies that move `group` to `offset_bytes` of the arena."""
        if group not in self._copies:
            self._copies[group] = merged_copies(self.model, self.grouped, group)
        return [Copy(copy.source, offset_bytes + copy.offset_bytes) for copy in self._copies[group]]


def merged_copies(model: StoredModel, grouped: Grouped, group: int) -> list[Copy]:
    """Return the copies of a group to the start of the arena, one for all storages that follow one
    another.

    Most groups hold storages in the order of the store, so that a model of a thousand tensors takes
    a few copies.
    """
    runs: list[tuple[int, int, int]] = []  # start and end in the store, offset in the group
    for storage, offset in grouped.places(group):
        start, size_bytes = model.offsets[storage], model.layout.storages[storage]
        if not size_bytes:
            continue
        if runs and start - runs[-1][0] == offset - runs[-1][2]:
            runs[-1] = (runs[-1][0], start + size_bytes, runs[-1][2])
        else:
            runs.append((start, start + size_bytes, offset))
    return [Copy(model.bytes(start, end), offset) for start, end, offset in runs]
