"""The switcher: many models, one arena, one request at a time, switched in milliseconds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from torchrelay._resource import Resource
from torchrelay.errors import ArgumentError, CapacityError, OperationTimeoutError, UnavailableError
from torchrelay.switching._cache import SharedCache
from torchrelay.switching._contract import Link, align
from torchrelay.switching._copier import measure_link
from torchrelay.switching._daemon import Daemon, Options
from torchrelay.switching._factory import Factory
from torchrelay.switching._host import HostLink
from torchrelay.switching._queue import Reply, Request
from torchrelay.switching._store import ModelStore
from torchrelay.switching._tasks import Task, TrainingHandle

__all__ = ["Switcher", "default_profile_folder"]

_GROUPINGS = ("best", "one", "layer")
_MAX_PRIORITY = 1000
_MEASURE_BYTES = 64 << 20  # more than most processors' caches


def default_profile_folder() -> Path:
    """Return where profiles are cached: `torchrelay/switching` in the user's cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "torchrelay" / "switching"


class Switcher(Resource):
    """Serves the models of a store from one arena, by worker processes that are always warm.

    The process that makes the switcher is the daemon: it owns the arena and copies models into it.
    Workers map the arena read-only. One request runs at a time; other workers stand by. When the
    daemon ends, however it ends, workers and memory are gone.
    """

    def __init__(
        self,
        store: ModelStore,
        *,
        arena_bytes: int,
        device: str | torch.device = "cpu",
        workers: int = 2,
        link_gbps: float = 0.0,
        request_bytes: int = 64 << 20,
        queue_limit: int = 256,
        client_limit: int = 64,
        run_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        prefetch: bool = True,
        grouping: str = "best",
        threads: int = 0,
        profile_folder: Path | None = None,
    ) -> None:
        """Allocate the arena and start the workers; models are loaded by :meth:`load`.

        Args:
            store: where :meth:`load` finds models; the caller keeps and closes it.
            arena_bytes: device memory for parameters; activations are torch's own.
            workers: processes; one computes, the others stand by.
            link_gbps: on the CPU, the rate in GB/s of an emulated link to the arena; 0 is memory's
                own.
            request_bytes: the most that one request's inputs and outputs take together. Host
                memory: at most four times as much for each worker.
            queue_limit: the most requests that wait; more raise OverloadedError.
            client_limit: the most requests that wait for one named client.
            run_timeout_s: the most that one request computes before its worker is ended.
            start_timeout_s: the most that a worker takes to start, or to build a model.
            prefetch: copy the next request's model while the current one computes.
            grouping: "best", or for comparison "one" group or one group for each "layer".
            threads: torch threads of a worker; 0 leaves torch's default.
            profile_folder: where profiles are kept between runs; None keeps none.

        Raises:
            ArgumentError: an argument is wrong.
            SegmentError: the device does not have `arena_bytes` bytes.
            UnavailableError: the device is missing.
        """
        if workers < 1 or queue_limit < 1 or client_limit < 1 or request_bytes < 1 or link_gbps < 0:
            raise ArgumentError(
                "workers, limits and request_bytes must be at least 1, link_gbps at least 0"
            )
        if grouping not in _GROUPINGS:
            raise ArgumentError(f"grouping={grouping!r}: the choices are {', '.join(_GROUPINGS)}")
        self._store = store
        self._closed = False
        self._cache = SharedCache.allocate(arena_bytes, device)
        try:
            self._link = _link(self._cache, link_gbps)
            size_bytes = min(_MEASURE_BYTES, self._cache.size_bytes)
            source = torch.ones(size_bytes, dtype=torch.uint8)  # zeros might not be in memory yet
            self._link.register(source)
            costs = measure_link(self._link, source)
            self._link.unregister(source)
            self._daemon = Daemon(
                self._cache,
                self._link,
                costs,
                Options(
                    workers=workers,
                    request_bytes=align(request_bytes),
                    queue_limit=queue_limit,
                    client_limit=client_limit,
                    run_timeout_s=run_timeout_s,
                    start_timeout_s=start_timeout_s,
                    prefetch=prefetch,
                    grouping=grouping,
                    threads=threads,
                    profiles=profile_folder,
                ),
            )
        except BaseException:
            self._cache.close()
            raise
        self._daemon.start()

    def load(self, name: str, *, priority: int = 0, timeout_s: float = 300.0) -> None:
        """Serve the store's model `name`, replacing an older version; blocks until it can answer.

        Args:
            priority: models of higher priority stay in the arena longer; from -1000 to 1000.

        Raises:
            ArgumentError: the priority is out of bounds.
            CapacityError: the model is larger than the arena, or its example inputs than
                `request_bytes`.
            ModelError: its factory or its first run failed.
            NotFoundError: the store has no such model.
            OperationTimeoutError: it was not ready after `timeout_s`.
        """
        _check_priority(priority)
        model = self._store.get(name)
        self._check_size(
            f"the example inputs of model {name!r}", [spec.example_bytes for spec in model.inputs]
        )
        source = model.bytes(0, model.size_bytes)
        self._link.register(source)  # the catalog undoes it when it has forgotten the model
        try:
            ready = self._daemon.loop.call(lambda: self._daemon.add_model(model, priority))
        except BaseException:
            self._link.unregister(source)
            raise
        try:
            ready.result(timeout_s)
        except TimeoutError as error:
            if ready.done():
                raise
            raise OperationTimeoutError(
                f"model {name!r} was not ready after {timeout_s:g} s"
            ) from error

    def unload(self, name: str) -> None:
        """Stop serving `name`: waiting requests fail, the running one is finished.

        Raises:
            NotFoundError: it is not loaded.
        """
        self._daemon.loop.call(lambda: self._daemon.catalog.remove(name))

    @property
    def device(self) -> torch.device:
        """The device of the arena."""
        return self._cache.device

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that are loaded or loading."""
        return tuple(sorted(self._daemon.catalog.models))

    def is_ready(self, name: str) -> bool:
        """Return whether `name` is loaded and can answer."""
        served = self._daemon.catalog.models.get(name)
        return (
            self.failure is None
            and served is not None
            and served.ready.done()
            and served.error is None
        )

    @property
    def failure(self) -> UnavailableError | None:
        """The error that ended the switcher before it was closed, if one did."""
        return self._daemon.failure

    def wait_ended(self) -> None:
        """Block until the switcher is closed or has failed."""
        self._daemon.loop.join()

    def submit(
        self,
        name: str,
        inputs: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        client: str = "",
    ) -> Future[Reply]:
        """Queue a request with copies of `inputs` and return the future of its reply. Cancelling
        the future takes it off the queue.

        Args:
            priority: from -1000 to 1000. Higher ones run first, however long lower ones wait.
            deadline_s: the most to wait for a worker; then the future raises OperationTimeoutError.
                Of equal priority, earlier deadlines run first; none counts as 10 s.
            client: who asks, for `client_limit`.

        Raises:
            ArgumentError: the inputs are not the model's, or the priority is out of bounds.
            CapacityError: they exceed `request_bytes`.
            NotFoundError: the model is not loaded.

        The future raises ModelError, OperationTimeoutError, OverloadedError, PeerLostError,
        NotFoundError or UnavailableError.
        """
        _check_priority(priority)
        self._check_inputs(name, inputs)
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        plain = {key: value.detach().to("cpu", copy=True) for key, value in inputs.items()}
        request = Request(name, plain, Future(), priority, deadline, client)
        if not self._daemon.loop.post(lambda: self._daemon.submit(request)):
            raise UnavailableError("the switcher is closed")
        request.future.add_done_callback(self._forget_cancelled)
        return request.future

    def _forget_cancelled(self, future: Future[Reply]) -> None:
        """Wake the loop, which removes cancelled requests from the queue and frees their inputs."""
        if future.cancelled():
            self._daemon.loop.post(lambda: None)

    def infer(
        self, name: str, inputs: Mapping[str, torch.Tensor], **options: Any
    ) -> dict[str, torch.Tensor]:
        """Return the model's outputs by name; a single tensor is named "output". As :meth:`submit`,
        but blocks.
        """
        return self.submit(name, inputs, **options).result().outputs

    def train(
        self,
        name: str,
        factory: Callable[..., Any] | str,
        *,
        steps: int,
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        save_every: int = 0,
    ) -> TrainingHandle:
        """Run `steps` training steps while no request runs; return a handle.

        A request preempts the task at the end of a step: its state is written to host memory and it
        resumes, in whatever worker, bit for bit. A worker that dies costs the steps since the last
        state.

        Args:
            factory: builds the task: an object with `step(index)`, `state_dict()` and
                `load_state_dict(state)`.
            save_every: write the state back every so many steps too; 0 only when preempted.

        Raises:
            ArgumentError: an argument is wrong.
        """
        if steps < 1 or save_every < 0:
            raise ArgumentError(
                f"a task needs at least 1 step and save_every of at least 0, not {steps}, "
                f"{save_every}"
            )
        task = Task(name, Factory.of(factory, kwargs, seed), steps, save_every)
        self._daemon.loop.call(lambda: self._daemon.train(task))
        cancel = self._daemon.training.cancel
        return TrainingHandle(task, lambda one: self._daemon.loop.call(lambda: cancel(one)))

    def status(self) -> dict[str, Any]:
        """Return the resident models, and queued, running and finished requests, as JSON values."""
        from torchrelay.switching._status import status  # noqa: PLC0415

        return self._daemon.loop.call(lambda: status(self._daemon, self._cache))

    def close(self, grace_s: float = 10.0) -> None:
        """Finish what is queued, for at most `grace_s`, then end the workers and free the arena.

        Idempotent. In a process forked from the switcher's it only unmaps the arena.
        """
        if self._closed:
            return
        self._closed = True
        if self._daemon.loop.is_foreign:
            self._cache.close()
            return
        self._daemon.loop.post(lambda: self._daemon.drain(grace_s))
        self._daemon.loop.join()
        self._cache.close()

    def _end_block(self, error: BaseException | None) -> None:
        self.close(grace_s=10.0 if error is None else 0.0)

    def _check_inputs(self, name: str, inputs: Mapping[str, torch.Tensor]) -> None:
        served = self._daemon.catalog.models.get(name)
        if served is None:
            return  # the daemon answers, in order with loads and unloads before
        specs = {spec.name: spec for spec in served.model.inputs}
        if set(inputs) != set(specs):
            raise ArgumentError(
                f"model {name!r} takes the inputs {', '.join(sorted(specs))}; got "
                f"{', '.join(sorted(inputs)) or 'none'}"
            )
        for key, value in inputs.items():
            specs[key].check(value)
        self._check_size("the inputs", [value.nbytes for value in inputs.values()])

    def _check_size(self, what: str, sizes: list[int]) -> None:
        size_bytes, limit = sum(map(align, sizes)), self._daemon.options.request_bytes
        if size_bytes > limit:
            raise CapacityError(
                f"{what} take {size_bytes} bytes, a request at most {limit}; make them smaller, or "
                "start with larger request_bytes"
            )


def _check_priority(priority: int) -> None:
    if not -_MAX_PRIORITY <= priority <= _MAX_PRIORITY:
        raise ArgumentError(
            f"priority={priority}: it must be from -{_MAX_PRIORITY} to {_MAX_PRIORITY}"
        )


def _link(cache: SharedCache, link_gbps: float) -> Link:
    arena = cache.tensor((cache.size_bytes,), torch.uint8)
    if cache.device.type == "cpu":
        return HostLink(arena, gbytes_per_s=link_gbps)
    if link_gbps:
        raise ArgumentError(f"link_gbps emulates a link on the CPU; {cache.device} has its own")
    from torchrelay.switching._cuda import CudaLink  # noqa: PLC0415

    return CudaLink(arena, cache.device)
