"""The served models: built in every worker, profiled once, regrouped, and retired."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from torchrelay.config import Switching
from torchrelay.errors import (
    CapacityError,
    ModelError,
    NotFoundError,
    OperationTimeoutError,
    PeerLostError,
    TorchRelayError,
    from_json,
)
from torchrelay.switching import _messages
from torchrelay.switching._contract import Link
from torchrelay.switching._fleet import Fleet, WorkerProcess
from torchrelay.switching._loop import Loop
from torchrelay.switching._planner import Costs, Grouped
from torchrelay.switching._profile import Profile, load_profile, save_profile
from torchrelay.switching._queue import Request, RequestQueue
from torchrelay.switching._residency import Residency
from torchrelay.switching._served import Served
from torchrelay.switching._store import StoredModel

__all__ = ["Catalog"]

# Workers that may die while they build a model that has never been built.
_MAX_LOST_BUILDS = 2
_PROFILE_PRIORITY = 1 << 30


class Catalog:
    """The models by name. The loop's lock protects it; any thread may look a model up."""

    def __init__(
        self,
        loop: Loop,
        queue: RequestQueue,
        residency: Residency,
        fleet: Fleet,
        link: Link,
        costs: Costs,
        options: Switching,
        *,
        profiled_on: str,
        fail_waiting: Callable[[str, TorchRelayError], None],
    ) -> None:
        """Make an empty catalog.

        Args:
            profiled_on: what profiles depend on besides the model: machine, device, threads.
            fail_waiting: ends the waiting requests to a model.
        """
        self.models: dict[str, Served] = {}
        self.costs = costs
        self._leaving: dict[str, list[StoredModel]] = {}
        self._loop = loop
        self._queue = queue
        self._residency = residency
        self._fleet = fleet
        self._link = link
        self._options = options
        self._profiled_on = profiled_on
        self._fail_waiting = fail_waiting

    def add(self, model: StoredModel, priority: int) -> Future[None]:
        """Serve `model`, replacing one of its name; the future is done when a request can run.

        Raises:
            CapacityError: it is larger than the arena.
        """
        whole = Grouped.one_group(model.layout)
        arena_bytes = self._residency.arena.size_bytes
        if sum(whole.sizes) > arena_bytes:
            raise CapacityError(
                f"model {model.name!r} takes {model.size_bytes} bytes, the arena has "
                f"{arena_bytes}; start with larger arena_bytes"
            )
        if model.name in self.models:
            self.remove(model.name, "was replaced")
        served = self.models[model.name] = Served(model, whole, priority)
        return served.ready

    def remove(self, name: str, reason: str = "was unloaded") -> None:
        """Stop serving the model; a running request is finished.

        Raises:
            NotFoundError: there is none of that name.
        """
        served = self.models.pop(name, None)
        if served is None:
            raise NotFoundError(f"there is no model {name!r} to unload")
        self._fail_all(served, NotFoundError(f"model {name!r} {reason}"))
        self._leaving.setdefault(name, []).append(served.model)
        for worker in self._fleet:
            if worker.loading == name:
                self._fleet.lose(worker, f"was building model {name!r}, which {reason}")

    def is_leaving(self, name: str) -> bool:
        """Return whether an older model of that name still holds bytes or modules."""
        return name in self._leaving

    def can_copy(self, name: str) -> bool:
        """Return whether requests to the model may run: it is profiled, and its groups are
        final.
        """
        served = self.models[name]
        return served.ready.done() and served.regroup is None and not self.is_leaving(name)

    def fail(self, served: Served, error: TorchRelayError) -> None:
        """Answer every request to the model with `error` until it is loaded again."""
        if self._is_current(served):
            served.error = error
            self._fail_all(served, error)

    # --- what each turn of the loop does

    def retire(self, running: str) -> None:
        """Free what removed and regrouped models hold, once it is unused.

        Args:
            running: the model of the request that runs, or "".
        """
        for name in list(self._leaving):
            if name != running:
                self._residency.cancel_copy(name)
            if self._residency.is_unused(name):
                self._forget(name)
        for worker in self._fleet:
            if worker.unwanted and worker.idle:
                for name in worker.unwanted - set(self.models):
                    worker.send(_messages.Unload(name))
                worker.unwanted.clear()
        for name, served in self.models.items():
            if served.regroup is not None and self._residency.is_unused(name):
                self._residency.arena.evict(name)
                served.apply_regroup()

    def build(self) -> None:
        """Let one idle worker build a module that it lacks; the others serve meanwhile."""
        if any(worker.loading for worker in self._fleet):
            return
        for worker in self._fleet:
            for name, served in self.models.items():
                outdated = worker.loaded.get(name) != served.key
                wanted = outdated and served.error is None and not self.is_leaving(name)
                if wanted and worker.idle:
                    worker.loading, worker.loading_since = name, time.monotonic()
                    self.send_build(worker, served)
                    return

    def check_builds(self, timeout_s: float) -> float:
        """End the worker of a build that takes longer; return the time of the next check."""
        for worker in self._fleet:
            if not worker.loading:
                continue
            limit = worker.loading_since + timeout_s
            if time.monotonic() < limit:
                return limit
            name, served = worker.loading, self.models.get(worker.loading)
            self._fleet.lose(worker, f"built model {name!r} for more than {timeout_s:g} s")
            if served is not None and not served.ready.done():
                text = f"model {name!r} took more than {timeout_s:g} s"
                self.fail(served, OperationTimeoutError(f"{text} to build; its worker was ended"))
        return math.inf

    def send_build(self, worker: WorkerProcess, served: Served) -> None:
        """Let `worker` build the model's module, or switch to its new groups."""
        model, groups = served.model, served.grouped.groups
        worker.loaded[model.name] = served.key
        worker.send(_messages.Load(model.name, model.version, model.factory, model.layout, groups))

    # --- events

    def on_built(self, worker: WorkerProcess, built: _messages.Built) -> None:
        """Ask for a profile once the first worker has built the model."""
        if worker.loading == built.model:
            worker.loading = ""
        served = self.models.get(built.model)
        if served is None or served.model.version != built.version:
            return
        if built.error is None:
            served.lost_builds = 0
        if served.profiling or served.ready.done():
            return
        if built.error is not None:
            self.fail(served, from_json(built.error, ModelError))
            return
        served.profiling = True
        profile = load_profile(self._profile_file(served))
        if profile is not None:
            self._group(served, profile)
            return
        inputs = {spec.name: spec.example_tensor() for spec in served.model.inputs}
        request = Request(served.name, inputs, priority=_PROFILE_PRIORITY, is_profile=True)
        request.future.add_done_callback(
            lambda future: self._loop.post(lambda: self._on_profiled(served, future))
        )
        self._queue.push_back(request)

    def on_lost(self, worker: WorkerProcess, reason: str) -> None:
        """Fail a model whose building has killed two workers in a row, and never succeeded."""
        served = self.models.get(worker.loading)
        if served is None or served.ready.done():
            return
        served.lost_builds += 1
        if served.lost_builds >= _MAX_LOST_BUILDS:
            text = f"worker {worker.pid} {reason} while it built model {served.name!r}"
            self.fail(served, PeerLostError(f"{text}; tried {served.lost_builds} times"))

    def _on_profiled(self, served: Served, future: Future[Profile]) -> None:
        """Plan the model's groups, unless it was removed or replaced meanwhile; or fail it, with
        the sizes of the example in the error if those were guessed.
        """
        if not self._is_current(served):
            return
        error = future.exception()
        guessed = [spec for spec in served.model.inputs if spec.is_guessed]
        if error is None:
            save_profile(self._profile_file(served), future.result())
            self._group(served, future.result())
        elif guessed and isinstance(error, ModelError):
            shapes = ", ".join(f"{spec.name} of shape {spec.example_shape}" for spec in guessed)
            text = (
                f"{error}; this was the first run of model {served.name!r}, with 1 for each size "
                f"of -1: {shapes}. If the model needs other sizes, name some: example = [...] "
                "beside shape in the models file, or (dtype, shape, example) in ModelStore.add"
            )
            self.fail(served, ModelError(text))
        elif isinstance(error, TorchRelayError):
            self.fail(served, error)

    def _is_current(self, served: Served) -> bool:
        return self.models.get(served.name) is served

    def _fail_all(self, served: Served, error: TorchRelayError) -> None:
        """Fail those that wait for the model, or for its replies."""
        self._fail_waiting(served.name, error)
        served.fail(error)

    def _forget(self, name: str) -> None:
        self._residency.arena.evict(name)
        for model in self._leaving.pop(name):
            self._link.unregister(model.bytes(0, model.size_bytes))
        for worker in self._fleet:
            worker.loaded.pop(name, None)
            worker.unwanted.add(name)

    def _group(self, served: Served, profile: Profile) -> None:
        layout, policy = served.model.layout, self._options.grouping
        served.regroup = Grouped.of_profile(layout, profile, self.costs, policy)

    def _profile_file(self, served: Served) -> Path | None:
        key = f"{served.model.fingerprint()}-{self._profiled_on}-{torch.__version__}"
        folder = self._options.profile_folder
        return Path(folder) / f"{key.replace('/', '_')}.json" if folder else None
