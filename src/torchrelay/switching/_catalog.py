"""The served models: built in every worker, profiled once, regrouped, and retired."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from torchrelay.errors import (
    CapacityError,
    NotFoundError,
    OperationTimeoutError,
    PeerLostError,
    TorchRelayError,
)
from torchrelay.switching._channel import Message, error_of
from torchrelay.switching._contract import Link
from torchrelay.switching._fleet import Fleet
from torchrelay.switching._groups import Grouped
from torchrelay.switching._planner import Costs
from torchrelay.switching._process import WorkerProcess
from torchrelay.switching._profile import Profile, ProfileCache
from torchrelay.switching._residency import Residency
from torchrelay.switching._served import Served
from torchrelay.switching._store import StoredModel

__all__ = ["Catalog"]

# A model whose modules cannot be built without killing the worker is not tried for ever.
_MAX_LOST_BUILDS = 2


class Catalog:
    """The models by name. Owned by the loop's thread; other threads may look a model up."""

    def __init__(
        self,
        residency: Residency,
        fleet: Fleet,
        link: Link,
        costs: Costs,
        *,
        grouping: str,
        profile_folder: Path | None,
        profiled_on: str,
        request_profile: Callable[[StoredModel], None],
        failed: Callable[[str, TorchRelayError], None],
    ) -> None:
        """Make an empty catalog.

        Args:
            profiled_on: what profiles depend on besides the model: machine, device, threads.
            request_profile: has a worker profile the model.
            failed: ends the requests that wait for a model.
        """
        self.models: dict[str, Served] = {}
        self.costs = costs
        self._leaving: dict[str, list[StoredModel]] = {}
        self._residency = residency
        self._fleet = fleet
        self._link = link
        self._grouping = grouping
        self._profiles = ProfileCache(profile_folder)
        self._profiled_on = profiled_on
        self._request_profile = request_profile
        self._failed = failed

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
        served = Served(model, whole, priority, Future())
        self.models[model.name] = served
        return served.ready

    def remove(self, name: str, reason: str = "was unloaded") -> None:
        """Stop serving the model; a running request is finished.

        Raises:
            NotFoundError: there is none of that name.
        """
        served = self.models.pop(name, None)
        if served is None:
            raise NotFoundError(f"there is no model {name!r} to unload")
        error = NotFoundError(f"model {name!r} {reason}")
        self._failed(name, error)
        served.fail(error)
        self._leaving.setdefault(name, []).append(served.model)
        for worker in [one for one in self._fleet if one.loading == name]:
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

    def fail(self, name: str, error: TorchRelayError) -> None:
        """Answer every request to the model with `error` until it is loaded again."""
        served = self.models.get(name)
        if served is not None:
            served.error = error
            served.fail(error)
            self._failed(name, error)

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
            if worker.idle:
                self._unload(worker)
        for served in self.models.values():
            name = served.model.name
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
        for worker in [one for one in self._fleet if one.loading]:
            limit = worker.loading_since + timeout_s
            if time.monotonic() < limit:
                return limit
            name, text = worker.loading, f"model {worker.loading!r} took more than {timeout_s:g} s"
            error = OperationTimeoutError(f"{text} to build; its worker was ended")
            self._fleet.lose(worker, f"built model {name!r} for more than {timeout_s:g} s")
            served = self.models.get(name)
            if served is not None and not served.ready.done():
                self.fail(name, error)
        return math.inf

    def send_build(self, worker: WorkerProcess, served: Served) -> None:
        """Let `worker` build the model's module, or switch to its new groups."""
        model, known = served.model, worker.loaded.get(served.model.name)
        replace = known is None or known[0] != model.version
        worker.loaded[model.name] = served.key
        worker.send(
            {
                "op": "load",
                "model": model.name,
                "replace": replace,
                "factory": model.factory.reference,
                "kwargs": model.factory.kwargs,
                "seed": model.factory.seed,
                "layout": model.layout.to_json() if replace else None,
                "groups": served.grouped.groups,
            }
        )

    # --- events

    def on_built(self, worker: WorkerProcess, message: Message) -> None:
        """Ask for a profile once the first worker has built the model."""
        worker.loading = ""
        served = self.models.get(message["model"])
        if served is not None and message["op"] == "loaded":
            served.lost_builds = 0
        if served is None or served.profiling or served.ready.done():
            return
        if message["op"] == "load_failed":
            self.fail(served.model.name, error_of(message))
            return
        served.profiling = True
        profile = self._profiles.load(self._profile_key(served))
        if profile is None:
            self._request_profile(served.model)
        else:
            self._group(served, profile)

    def on_profiled(self, name: str, message: Message) -> None:
        """Plan the model's groups, unless it was removed meanwhile."""
        served = self.models.get(name)
        if served is None:
            return
        profile = Profile.from_json(message["profile"])
        self._profiles.save(self._profile_key(served), profile)
        self._group(served, profile)

    def on_profile_failed(self, name: str, error: TorchRelayError) -> None:
        """Fail the model, and say so if its input may just have had unsuitable sizes."""
        served = self.models.get(name)
        if served is None:
            return
        guessed = [spec for spec in served.model.inputs if spec.is_guessed]
        if guessed:
            shapes = ", ".join(f"{spec.name} of shape {spec.example_shape}" for spec in guessed)
            error = type(error)(
                f"{error}; this was the first run of model {name!r}, with 1 for each size of -1: "
                f"{shapes}. If the model needs other sizes, name some: example = [...] beside "
                "shape in the models file, or (dtype, shape, example) in ModelStore.add"
            )
        self.fail(name, error)

    def on_lost(self, worker: WorkerProcess, reason: str) -> None:
        """Fail a model whose building has killed two workers in a row, and never succeeded."""
        served = self.models.get(worker.loading)
        if served is None or served.ready.done():
            return
        served.lost_builds += 1
        if served.lost_builds >= _MAX_LOST_BUILDS:
            text = f"worker {worker.pid} {reason} while it built model {worker.loading!r}"
            self.fail(worker.loading, PeerLostError(f"{text}; tried {served.lost_builds} times"))

    def _forget(self, name: str) -> None:
        self._residency.arena.evict(name)
        for model in self._leaving.pop(name):
            self._link.unregister(model.bytes(0, model.size_bytes))
        for worker in self._fleet:
            worker.loaded.pop(name, None)
            worker.unwanted.add(name)

    def _unload(self, worker: WorkerProcess) -> None:
        for name in worker.unwanted - set(self.models):
            worker.send({"op": "unload", "model": name})
        worker.unwanted.clear()

    def _group(self, served: Served, profile: Profile) -> None:
        layout = served.model.layout
        served.regroup = Grouped.of_profile(layout, profile, self.costs, self._grouping)

    def _profile_key(self, served: Served) -> str:
        key = f"{served.model.fingerprint()}-{self._profiled_on}-{torch.__version__}"
        return key.replace("/", "_")
