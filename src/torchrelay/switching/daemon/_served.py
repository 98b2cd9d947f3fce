"""A model that is served, and its states."""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from torchrelay.errors import TorchRelayError
from torchrelay.switching.device._contract import Copy
from torchrelay.switching.models._layout import Grouped
from torchrelay.switching.models._store import StoredModel
from torchrelay.switching.worker._profile import Output, Profile

__all__ = ["Served", "State", "merged_copies"]


class State(Enum):
    """What a model is about to do. The value is for people.

    A model whose profile is known is LOADING and then READY. Another is LOADING, PROFILING, LOADING
    once more if other groups are better by its profile, and then READY. From each of these it may
    become FAILED, and from any LEAVING.
    """

    LOADING = "loading"  # a worker builds it, or will
    PROFILING = "profiling"  # a worker runs it for the first time; no other one builds it
    READY = "ready"  # requests run; workers that lack it build it
    FAILED = "failed"  # until it is loaded again, requests fail
    LEAVING = "leaving"  # it was unloaded or replaced, and may hold memory


@dataclass(eq=False)
class Served:
    """A model that :meth:`Switcher.load` was called for. Its methods are the transitions."""

    name: str = field(init=False)
    model: StoredModel
    grouped: Grouped
    priority: int
    profile: Profile | None = None
    is_pinned: bool = False  # it is one group that stays in the arena
    state: State = field(default=State.LOADING, init=False)
    error: TorchRelayError | None = field(default=None, init=False)  # why it is FAILED
    ready: Future[None] = field(default_factory=Future, init=False)  # done once it is READY or not
    plan: int = field(default=0, init=False)  # how often its groups were replaced
    runs_whole: bool = False  # requests start when all groups have arrived
    lost_builds: int = 0  # in a row: workers that were lost as they built it
    # Of the replies so far, by kind: how many, and the seconds of their parts.
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _copies: dict[int, list[Copy]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.model.name

    @property
    def key(self) -> tuple[int, int]:
        """The version and plan that a worker must have built."""
        return self.model.version, self.plan

    @property
    def is_new(self) -> bool:
        """Whether no worker has built it."""
        return self.state is State.LOADING and not self.plan

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The outputs of its first run; empty before it."""
        return () if self.profile is None else self.profile.outputs

    def built(self) -> State:
        """Go on after a build in LOADING; return the next state."""
        if self.profile is None:
            self.state = State.PROFILING
        else:
            self._be_ready()
        return self.state

    def regroup(self, grouped: Grouped) -> None:
        """Go on after PROFILING, in the groups that are best. Workers that have the module in
        others build it again: its tensors never move.
        """
        if grouped == self.grouped:
            self._be_ready()
        else:
            self.grouped, self.plan, self.state = grouped, self.plan + 1, State.LOADING
            self._copies.clear()

    def fail(self, error: TorchRelayError) -> None:
        """Answer requests with `error` from now on."""
        self.state, self.error = State.FAILED, error
        self._fail_load(error)

    def leave(self, error: TorchRelayError) -> None:
        """Be no longer served; `error` is for a load that is in progress."""
        self.state = State.LEAVING
        self._fail_load(error)

    def _be_ready(self) -> None:
        self.state = State.READY
        self.ready.set_result(None)

    def _fail_load(self, error: TorchRelayError) -> None:
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
