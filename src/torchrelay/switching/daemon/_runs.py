"""What runs on a worker: a request or a batch, or a slice of a model that generates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torchrelay.config import Switching
from torchrelay.errors import SegmentError, TorchRelayError
from torchrelay.switching.daemon._catalog import Catalog
from torchrelay.switching.daemon._fleet import Fleet, WorkerProcess
from torchrelay.switching.daemon._queue import new_id
from torchrelay.switching.daemon._residency import Pinned, Residency
from torchrelay.switching.daemon._served import Served
from torchrelay.switching.daemon._shares import Shares
from torchrelay.switching.worker import _messages

__all__ = ["Run", "Runs"]


@dataclass(eq=False)
class Run:
    """A model on a worker."""

    worker: WorkerProcess
    served: Served
    overlaps: bool  # it runs while later groups are copied, or is profiled as if it did
    run_id: int = field(default_factory=new_id, init=False)
    started: float = field(default_factory=time.monotonic, init=False)
    is_building: bool = field(init=False)  # the worker still builds the module
    arrived: dict[int, float] = field(default_factory=dict, init=False)  # when a group was in place

    def __post_init__(self) -> None:
        self.is_building = self.worker.loaded.get(self.served.name) != self.served.key

    @property
    def weight(self) -> float:
        """The weight of the time that it takes."""
        return 1.0

    @property
    def broke_memory(self) -> bool:
        """Whether it may have killed the worker, as it read weights before they arrived, without
        operators.
        """
        return self.worker.broke_memory and self.overlaps


R = TypeVar("R", bound=Run)


@dataclass(eq=False)
class Runs(Generic[R]):
    """Starts and ends runs, one at a time."""

    activity = ""

    catalog: Catalog
    residency: Residency
    fleet: Fleet
    shares: Shares
    counts: Counter[str]
    options: Switching
    run: R | None = field(default=None, init=False)  # what runs

    @property
    def model(self) -> str:
        """The model of what runs, or ""."""
        return self.run.served.name if self.run is not None else ""

    def place(
        self, served: Served, make_way: Callable[[], None]
    ) -> tuple[WorkerProcess, Pinned] | None:
        """Return an idle worker, and the model's place in the arena, for which others make way;
        None while one is lacking.
        """
        worker = self.fleet.idle(served.name)
        make_way()
        if worker is None:
            return None
        pinned = self.residency.pin(served)
        if pinned is None:
            self.residency.cancel_copies(keep=served.name)
            return None
        return worker, pinned

    def begin(self, run: R) -> None:
        """Give the worker to `run`, and let it build the module if it lacks that."""
        self.run = run
        run.worker.work_for(self, self.options.run_timeout_s)
        run.worker.mapped.add(run.served.name)
        if run.is_building:
            self.catalog.send_build(run.worker, run.served)

    def end(self) -> R:
        """Return what ran."""
        run, self.run = self.run, None
        assert run is not None
        self.residency.arena.release(run.served.name)
        self.shares.charge(run.served.name, time.monotonic() - run.started, run.weight)
        return run

    # --- events

    def on_arrived(self, model: str, group: int) -> None:
        """Pass on that a group of a model is in place."""
        if self.run is not None and self.model == model:
            self.run.arrived[group] = time.monotonic()
            self.run.worker.send(_messages.GroupCopied(self.run.run_id, group))

    def on_copy_failed(self, model: str, error: Exception) -> None:
        """Fail what runs, if its model could not be copied."""
        if self.run is not None and self.model == model:
            text = f"copying model {model!r} to the arena failed: {error}"
            self.run.worker.send(_messages.Stop(self.run.run_id))
            self.fail_run(self.run, SegmentError(text))

    def on_message(self, worker: WorkerProcess, message: Any, descriptors: list[int]) -> None:
        """Handle a message of the worker."""
        assert self.run is not None
        if isinstance(message, _messages.Built):  # the module that the run needed
            self.catalog.note_built(worker, message)
            self.run.is_building = False
            worker.due = time.monotonic() + worker.limit_s
        else:
            self.on_answer(self.run, message, descriptors)

    def on_lost(self, worker: WorkerProcess) -> None:
        """Run again what the worker that has died ran, or fail it."""
        run = self.end()
        if run.broke_memory:
            run.served.runs_whole = True
        self.retry(run)
        if run.is_building:
            self.catalog.note_lost_build(worker, run.served)

    # --- of a kind of run

    def on_answer(self, run: R, message: Any, descriptors: list[int]) -> None:
        """Handle a message of the worker that is about the run."""
        raise NotImplementedError

    def fail_run(self, run: R, error: TorchRelayError) -> None:
        raise NotImplementedError

    def retry(self, run: R) -> None:
        """Run again what a worker was lost with, or fail it."""
        raise NotImplementedError
