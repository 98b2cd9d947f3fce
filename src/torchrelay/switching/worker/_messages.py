"""The messages between the daemon and a worker."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchrelay.switching.models._factory import Factory
from torchrelay.switching.models._layout import ModelLayout
from torchrelay.switching.worker._profile import Profile
from torchrelay.switching.worker._request_buffer import Written

Groups = tuple[tuple[int, ...], ...]

# --- to a worker


class Parts(NamedTuple):
    """Descriptors of parts of the arena; the answer to :class:`WantParts`."""


class Load(NamedTuple):
    """Build the module of a model; answered by :class:`Built`."""

    model: str
    version: int
    factory: Factory
    layout: ModelLayout
    groups: Groups


class Unload(NamedTuple):
    """Forget a model."""

    model: str


class Unmap(NamedTuple):
    """Stop using the memory of groups, (model, group), which others get."""

    groups: list[tuple[str, int]]


class Run(NamedTuple):
    """Run a model; answered by :class:`Result` or :class:`Failed`."""

    request_id: int
    model: str
    offsets: tuple[int, ...]  # of the groups, in bytes
    missing: list[int]  # groups that have not arrived
    whole: bool  # start when all have
    buffer: int  # the index of the request buffer
    inputs: list[Written]
    outputs_at: int
    is_profile: bool


class GroupCopied(NamedTuple):
    """A missing group of the running request is in place."""

    request_id: int
    group: int


class Stop(NamedTuple):
    """Cancel the running request, or pause the running task at the end of its step."""

    request_id: int


class Train(NamedTuple):
    """Run a training task from the state in the descriptor that comes along, if one does."""

    request_id: int
    name: str
    factory: Factory
    steps: int
    save_every: int


class Exit(NamedTuple):
    """End the process."""


# --- from a worker


class WantParts(NamedTuple):
    """Ask for parts of the arena."""

    first: int


class Ready(NamedTuple):
    """The worker can receive messages."""


class Built(NamedTuple):
    """The answer to :class:`Load`."""

    model: str
    error: dict[str, Any] | None  # as of errors.to_json


class Result(NamedTuple):
    """Outputs of a request; those of a profiling run are its profile."""

    outputs: list[Written]
    bind_s: float
    compute_s: float
    # By group that was missing: time.monotonic() when an operator needed it, and when it had it.
    waits: dict[int, tuple[float, float]]
    profile: Profile | None


class Failed(NamedTuple):
    """The error of a request or task."""

    error: dict[str, Any]  # as of errors.to_json


class Saved(NamedTuple):
    """A training state, in the descriptor that comes along."""

    step: int
    ended: str  # "" if the task goes on, else "paused" or "done"
