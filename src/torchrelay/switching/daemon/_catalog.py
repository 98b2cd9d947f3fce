"""The served models: built in every worker, profiled once, regrouped, and retired."""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from torchrelay.config import Switching
from torchrelay.errors import CapacityError, ModelError, NotFoundError, TorchRelayError, from_json
from torchrelay.switching.daemon._fleet import Fleet, WorkerProcess
from torchrelay.switching.daemon._owner import Owner
from torchrelay.switching.daemon._planner import Costs, grouped_by_profile
from torchrelay.switching.daemon._queue import Request, RequestQueue
from torchrelay.switching.daemon._residency import Residency
from torchrelay.switching.daemon._served import Served, State
from torchrelay.switching.device._contract import WorkerLink
from torchrelay.switching.models._layout import Grouped
from torchrelay.switching.models._store import StoredModel
from torchrelay.switching.worker import _messages
from torchrelay.switching.worker._profile import Profile, load_profile, save_profile

__all__ = ["Catalog"]

_PROFILE_PRIORITY = 1 << 30
_MAX_LOST_BUILDS = 3  # in a row, of a model that was built before


@dataclass(eq=False)
class Catalog:
    """The models by name."""

    activity = "loading"

    owner: Owner
    queue: RequestQueue
    residency: Residency
    fleet: Fleet
    link: WorkerLink
    costs: Costs
    options: Switching
    models: dict[str, Served] = field(default_factory=dict)
    on_failed: Callable[[str, TorchRelayError], None] = lambda name, error: None
    _leaving: dict[str, list[StoredModel]] = field(default_factory=dict, init=False)
    _builds: dict[WorkerProcess, Served] = field(default_factory=dict, init=False)

    def add(self, model: StoredModel, priority: int, is_pinned: bool) -> Future[None]:
        """Serve `model`, replacing one of its name; the future is done when a request can run.

        Raises:
            CapacityError: it is larger than what others leave of the arena.
        """
        whole = Grouped.one_group(model.layout)
        self._check_fits(model, whole, is_pinned)
        if model.name in self.models:
            self.remove(model.name, "was replaced")
        profile = load_profile(self._profile_file(model), len(model.layout.storages))
        grouped = whole if profile is None or is_pinned else self._best(model, profile)
        served = Served(model, grouped, priority, profile, is_pinned)
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
        error, is_new = NotFoundError(f"model {name!r} {reason}"), served.is_new
        served.leave(error)
        if served.is_pinned:
            self.residency.arena.unkeep()  # the others move together
        self._fail_requests(served, error)
        self._leaving.setdefault(name, []).append(served.model)
        for worker, building in list(self._builds.items()):
            # A first build may hang; one of a model that was built before ends.
            if building is served and is_new:
                self.fleet.lose(worker, f"was building model {name!r}, which {reason}")

    def progress(self, name: str) -> str:
        """Return what the model that is loading waits for."""
        served = self.models.get(name)
        if served is not None and served.state is State.PROFILING:
            step = "it is profiled, by its first run"
        elif served is not None and any(one is served for one in self._builds.values()):
            step = "a worker builds it"
        else:
            step = "it waits for a worker"
        return f"loading model {name!r}: {step}"

    def can_run(self, served: Served, is_profile: bool = False) -> bool:
        """Return whether requests to the model may run: it is loaded, or the request profiles it,
        and no older model of its name still holds bytes or modules.
        """
        is_loaded = served.state not in (State.LOADING, State.PROFILING)
        return (is_loaded or is_profile) and served.name not in self._leaving

    def fail_all(self, error: TorchRelayError) -> None:
        """Fail those that wait for any model, and every load that is in progress."""
        for served in self.models.values():
            if served.state in (State.LOADING, State.PROFILING):
                served.fail(error)
            self._fail_requests(served, error)

    # --- what each turn of the loop does

    def retire(self, running: str) -> None:
        """Free what removed and regrouped models hold, once it is unused.

        Args:
            running: the model of the request that runs, or "".
        """
        for name in list(self._leaving):
            if name != running:
                self.residency.cancel_copy(name)
            if self.residency.is_unused(name):
                self._forget(name)
        for name, served in self.models.items():
            if served.state is not State.PROFILING or served.profile is None:
                continue
            if served.is_pinned:
                served.regroup(served.grouped)
            elif self.residency.is_unused(name):
                grouped = self._best(served.model, served.profile)
                if grouped != served.grouped:
                    self.residency.arena.evict(name)
                served.regroup(grouped)

    def keep(self, running: str, make_way: Callable[[], None]) -> bool:
        """Give pinned models their places; return False, and let others make way, if one has none
        yet.

        Args:
            running: the model of the request that runs, or "".
        """
        for name, served in self.models.items():
            is_placed = not served.is_pinned or self.residency.arena.is_kept(name)
            if is_placed or name in self._leaving:
                continue
            if not self.residency.keep(served, running):
                make_way()
                return False
        return True

    def build(self, pause_training: Callable[[], None]) -> None:
        """Let one idle worker build a module that it lacks; the others serve meanwhile.

        A module that it could not build, or that several workers in a row were lost with, is tried
        again for a request only. Training makes way for the first build of a model.
        """
        if any(one.state is not State.LEAVING for one in self._builds.values()):
            return  # a removed model is built to its end, and holds nobody up
        for worker in self.fleet.workers:
            if worker.user is not None:
                continue
            for name, served in self.models.items():
                lacks_it = worker.loaded.get(name) != served.key and name not in worker.failed
                is_wanted = served.state in (State.LOADING, State.READY)
                is_lethal = served.lost_builds >= _MAX_LOST_BUILDS
                if lacks_it and is_wanted and not (is_lethal or name in self._leaving):
                    self._builds[worker] = served
                    worker.work_for(self, self.options.start_timeout_s)
                    self.send_build(worker, served)
                    return
        if any(one.is_new and name not in self._leaving for name, one in self.models.items()):
            pause_training()

    def send_build(self, worker: WorkerProcess, served: Served) -> None:
        """Let `worker` build the model's module."""
        model, groups = served.model, served.grouped.groups
        worker.loaded[model.name] = served.key
        worker.send(_messages.Load(model.name, model.version, model.factory, model.layout, groups))

    # --- events

    def on_message(self, worker: WorkerProcess, built: _messages.Built, _: list[int]) -> None:
        """Ask for a profile once the first worker has built the model."""
        served = self._builds.pop(worker)
        worker.release()
        if served.state is State.LEAVING:
            return
        self.note_built(worker, built)
        if served.state is not State.LOADING:
            return
        if built.error is not None:
            self._fail(served, from_json(built.error, ModelError))
            return
        if served.built() is not State.PROFILING:
            return
        inputs = {spec.name: spec.example_tensor() for spec in served.model.inputs}
        request = Request(served.name, inputs, priority=_PROFILE_PRIORITY, is_profile=True)
        request.future.add_done_callback(
            lambda future: self.owner.post_event(partial(self._on_profiled, served, future))
        )
        self.queue.push_back(request)

    def on_lost(self, worker: WorkerProcess) -> None:
        """Handle a build that took too long or killed the worker."""
        self.note_lost_build(worker, self._builds.pop(worker))

    def note_built(self, worker: WorkerProcess, built: _messages.Built) -> None:
        """Note whether the worker has a module now."""
        worker.note_built(built)
        served = self.models.get(built.model)
        if served is not None:
            served.lost_builds = 0

    def note_lost_build(self, worker: WorkerProcess, served: Served) -> None:
        """Fail a model if this was its first build, or one too many and no worker has it."""
        served.lost_builds += 1
        limit = 1 if served.is_new else _MAX_LOST_BUILDS
        has_it = any(served.name in one.loaded for one in self.fleet.workers)
        if served.lost_builds >= limit and not has_it:
            self._fail(served, worker.loss(f"built model {served.name!r}"))

    def _on_profiled(self, served: Served, future: Future[Profile]) -> None:
        """Keep the model's profile; or fail it, with the sizes of the example in the error if those
        were guessed.
        """
        error = future.exception()
        guessed = [spec for spec in served.model.inputs if spec.is_guessed]
        if error is None:
            served.profile = future.result()
            save_profile(self._profile_file(served.model), served.profile)
        elif guessed and isinstance(error, ModelError):
            shapes = ", ".join(f"{spec.name} of shape {spec.example_shape}" for spec in guessed)
            text = (
                f"{error}; this was the first run of model {served.name!r}, with 1 for each size "
                f"of -1: {shapes}. If the model needs other sizes, name some: example = [...] "
                "beside shape in the models file, or (dtype, shape, example) in ModelStore.add"
            )
            self._fail(served, ModelError(text))
        elif isinstance(error, TorchRelayError):
            self._fail(served, error)

    def _fail(self, served: Served, error: TorchRelayError) -> None:
        """Answer every request to the model with `error` until it is loaded again."""
        if served.state is not State.LEAVING:
            served.fail(error)
            self._fail_requests(served, error)

    def _fail_requests(self, served: Served, error: TorchRelayError) -> None:
        """Fail the model's waiting requests, and its sequences."""
        self.on_failed(served.name, error)
        for request in self.queue:
            if request.model == served.name:
                self.queue.remove(request)
                request.fail(error)

    def _forget(self, name: str) -> None:
        self.residency.arena.evict(name)
        for model in self._leaving.pop(name):
            self.link.unregister(model.bytes(0, model.size_bytes))
        for worker in self.fleet.workers:
            worker.failed.discard(name)
            worker.mapped.discard(name)
            if worker.loaded.pop(name, None) is not None:
                worker.send(_messages.Unload(name))

    def _best(self, model: StoredModel, profile: Profile) -> Grouped:
        """Return the groups that are best by the profile, and fit the arena."""
        grouped = grouped_by_profile(model.layout, profile, self.costs, self.options.grouping)
        is_fitting = self._arena_bytes(grouped) <= self._left_bytes(model.name)
        return grouped if is_fitting else Grouped.one_group(model.layout)

    def _check_fits(self, model: StoredModel, whole: Grouped, is_pinned: bool) -> None:
        """Raise :class:`CapacityError` unless the model fits beside those that are pinned, and, if
        it is pinned itself, each other one fits beside it.
        """
        left, size_bytes = self._left_bytes(model.name), self._arena_bytes(whole)
        if size_bytes > left:
            raise CapacityError(
                f"model {model.name!r} takes {model.size_bytes} bytes, the arena has {left} beside "
                "pinned models; start with larger arena_bytes"
            )
        others = [one for name, one in self.models.items() if name != model.name]
        for one in others if is_pinned else []:
            needed = 0 if one.is_pinned else self._arena_bytes(one.grouped)
            if needed > left - size_bytes:
                raise CapacityError(
                    f"model {model.name!r}, pinned, leaves {left - size_bytes} bytes of the arena; "
                    f"model {one.name!r} takes {needed}: start with larger arena_bytes"
                )

    def _arena_bytes(self, grouped: Grouped) -> int:
        return grouped.starts(self.residency.arena.granule_bytes)[-1]

    def _left_bytes(self, name: str) -> int:
        """Return the bytes that pinned models other than `name` leave of the arena."""
        pinned = [one for one in self.models.values() if one.is_pinned and one.name != name]
        taken = sum(self._arena_bytes(one.grouped) for one in pinned)
        return self.residency.arena.size_bytes - taken

    def _profile_file(self, model: StoredModel) -> Path | None:
        """Return where the profile is kept: it depends on machine, device, threads and torch."""
        folder = self.options.profile_folder
        on = platform.node(), self.fleet.cache.device, self.options.threads, torch.__version__
        name = "-".join(map(str, (model.fingerprint(), *on))).replace("/", "_")
        return Path(folder) / f"{name}.json" if folder else None
