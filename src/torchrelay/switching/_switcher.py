"""The switcher: many models, one arena, one request at a time, switched in milliseconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from torchrelay import _telemetry, _torch
from torchrelay._names import names_options
from torchrelay._resource import Resource
from torchrelay.config import Switching, check_value
from torchrelay.config import load as load_settings
from torchrelay.errors import (
    ArgumentError,
    CapacityError,
    TorchRelayError,
    UnavailableError,
)
from torchrelay.switching.daemon._daemon import Daemon
from torchrelay.switching.daemon._owner import OwnersFuture
from torchrelay.switching.daemon._planner import measure_link
from torchrelay.switching.daemon._queue import Reply, Request
from torchrelay.switching.daemon._reports import wait_reporting
from torchrelay.switching.daemon._scheduler import TrainingHandle
from torchrelay.switching.daemon._served import Served
from torchrelay.switching.device._cache import SharedCache
from torchrelay.switching.device._contract import WorkerLink, align
from torchrelay.switching.device._host import HostLink
from torchrelay.switching.generate._messages import Emitted, Sampling
from torchrelay.switching.generate._prompts import ids_of, sampling_of, text_after
from torchrelay.switching.generate._sequences import Sequence as TokenSequence
from torchrelay.switching.generate._stream import TokenStream
from torchrelay.switching.models._factory import Factory
from torchrelay.switching.models._store import ModelStore, StoredModel
from torchrelay.switching.models._tensors import check_mode, check_tensors
from torchrelay.switching.worker._profile import Output

__all__ = ["Switcher"]

T = TypeVar("T")

_MAX_PRIORITY = 1000
_PAGE_BYTES = 4096  # at least; an arena is used in whole pages
_MAX_PARTS = 4096  # of an arena on CUDA: how many granules groups are placed in
_MEASURE_BYTES = 64 << 20  # more than most processors' caches


class Switcher(Resource):
    """Serves the models of a store from one arena, by worker processes that are always warm.

    The process that makes the switcher is the daemon: it owns the arena and copies models into it.
    Workers map the arena read-only. One request runs at a time; other workers stand by. When the
    daemon ends, however it ends, workers and memory are gone.
    """

    @names_options(*(field.name for field in fields(Switching)))
    def __init__(self, store: ModelStore, options: Switching | None = None, **changes: Any) -> None:
        """Allocate the arena and start the workers; models are loaded by :meth:`load`.

        Args:
            store: where :meth:`load` finds models; the caller keeps and closes it.
            options: by default those of the environment. Those of the HTTP server are not used.
            changes: fields of the options and their values, such as ``arena_bytes=1 << 30``.

        Raises:
            ArgumentError: there is no such device, or `link_gbps` is given for a GPU.
            ConfigError: an option is out of bounds.
            SegmentError: the device does not have `arena_bytes` bytes.
            UnavailableError: the device is missing.
        """
        options = replace(options or load_settings(Switching), **changes)
        for field in fields(options):
            check_value(getattr(options, field.name), field, field.name)
        self._store = store
        self._closed = False
        size_bytes = align(options.arena_bytes, _PAGE_BYTES)
        self._cache = SharedCache.allocate(size_bytes, options.device, max_parts=_MAX_PARTS)
        try:
            self._link = _link(self._cache, options.link_gbps)
            size_bytes = min(_MEASURE_BYTES, self._cache.size_bytes)
            # Zeros might not be in memory yet.
            source = torch.ones(size_bytes, dtype=torch.uint8, device="cpu")
            self._link.register(source)
            costs = measure_link(self._link, source)
            self._link.unregister(source)
            self._daemon = Daemon(store, self._cache, self._link, costs, options)
            self._owner = self._daemon.owner
            self._owner.start()
        except BaseException:
            self._cache.close()
            raise

    def load(
        self, name: str, *, priority: int = 0, pinned: bool = False, timeout_s: float = 300.0
    ) -> None:
        """Serve the store's model `name`, replacing an older version; blocks until it can answer.

        Args:
            priority: models of higher priority stay in the arena longer; from -1000 to 1000.
            pinned: it stays in the arena, from when what is in its place has ended, and others
                share what is left.

        Raises:
            ArgumentError: the priority is out of bounds, or FakeTensorMode is on.
            CapacityError: the model is larger than what pinned ones leave of the arena, or leaves
                too little for another; or its example inputs are larger than `request_bytes`.
            ModelError: its factory or its first run failed.
            NotFoundError: the store has no such model.
            OperationTimeoutError: it was not ready after `timeout_s`.
            UnavailableError: no worker starts, or a coroutine of :meth:`run` called this.
        """
        self._owner.check_can_wait()
        check_mode()
        _check_priority(priority)
        model = self._store.get(name)
        self._check_size(
            f"the example inputs of model {name!r}", [spec.example_bytes for spec in model.inputs]
        )
        source = model.bytes(0, model.size_bytes)
        self._link.register(source)  # the catalog undoes it when it has forgotten the model
        try:
            ready = self._owner.call(lambda: self._daemon.add_model(model, priority, pinned))
        except Exception:  # after Ctrl-C it may be loaded
            self._link.unregister(source)
            raise
        with _telemetry.event("switching", "load", name) as running:
            running.size_bytes = model.size_bytes
            progress = partial(self._daemon.catalog.progress, name)
            wait_reporting(ready, timeout_s, lambda: self._owner.read(progress))

    def unload(self, name: str) -> None:
        """Stop serving `name`: waiting requests fail, the running one is finished.

        Raises:
            NotFoundError: it is not loaded.
        """
        self._owner.call(lambda: self._daemon.catalog.remove(name))

    @property
    def device(self) -> torch.device:
        """The device of the arena."""
        return self._cache.device

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that are loaded or loading."""
        return self._owner.read(lambda: tuple(sorted(self._daemon.catalog.models)))

    def stored(self, name: str) -> StoredModel | None:
        """Return the model that is loaded, or loading, under `name`, of which the store may have
        another version; None if there is none.
        """
        return self._of(name, lambda served: served.model, None)

    def is_ready(self, name: str) -> bool:
        """Return whether `name` is loaded and can answer."""
        try:
            return self._of(name, self._daemon.is_ready, False)
        except UnavailableError:
            return False

    def is_resident(self, name: str) -> bool:
        """Return whether all of model `name` is in the arena."""
        return self._of(name, self._daemon.residency.is_resident, False)

    def failure_of(self, name: str) -> TorchRelayError | None:
        """Return why `name` cannot answer although it was loaded; None if it can or still loads."""
        return self.failure or self._of(name, self._daemon.error_of, None)

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Return the outputs of the model that is loaded under `name`; empty if there is none, or
        before its first run.
        """
        return self._of(name, lambda served: served.outputs, ())

    @property
    def failure(self) -> UnavailableError | None:
        """The error that ended the switcher before it was closed, if one did."""
        return self._daemon.failure

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` in the event loop that reads the workers' answers, whose thread owns all
        of this: what it awaits there passes through no other thread. The switcher ends after it.

        In it, :meth:`infer`, :meth:`load` and :meth:`close` raise UnavailableError, as they would
        wait for their own thread: await :meth:`submit`.
        """
        return self._owner.run(coroutine)

    def submit(
        self,
        name: str,
        inputs: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        copy: bool = True,
    ) -> OwnersFuture[Reply]:
        """Queue a request and return the future of its reply. Cancelling the future takes it off
        the queue. A coroutine can await it.

        The future's callbacks run one after the other, in a thread of their own, where they may
        wait for other requests.

        Args:
            priority: from -1000 to 1000. Higher ones run first, however long lower ones wait.
            deadline_s: the most to wait for a worker; then the future raises OperationTimeoutError.
                Of equal priority, earlier deadlines run first; a request without one counts as
                due in 10 s.
            copy: False if `inputs` do not change before the future is done.

        Raises:
            ArgumentError: the inputs are not the model's, or have no memory of their own, such as
                sparse ones; the priority is out of bounds, or `deadline_s` not a number.
            CapacityError: they exceed `request_bytes`.
            NotFoundError: the model is not loaded.

        The future raises ModelError, OperationTimeoutError, OverloadedError, PeerLostError,
        NotFoundError or UnavailableError.
        """
        request, future = self._request(name, inputs, priority, deadline_s, copies=copy)
        self._owner.call(lambda: self._daemon.submit(request))
        return future

    def infer(
        self,
        name: str,
        inputs: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the model's outputs by name; a single tensor is named "output". As :meth:`submit`,
        but blocks.
        """
        self._owner.check_can_wait()
        request, future = self._request(name, inputs, priority, deadline_s, copies=False)
        with _torch.span("torchrelay.switching.infer"):
            answered = SimpleQueue[Future[Reply]]()  # a signal handler may interrupt the wait
            future.when_done(answered.put)
            try:
                self._owner.post(lambda: self._daemon.submit(request), request.fail)
                return answered.get().result().outputs
            except BaseException:
                future.cancel()  # after Ctrl-C it would still run
                raise

    def generate(
        self,
        name: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        priority: int = 0,
    ) -> TokenStream:
        """Return the continuation of `prompt`, an iterator of tokens as they are generated.

        Models take turns between two tokens; what is generated does not depend on that. Closing or
        dropping the iterator ends the sequence.

        Args:
            prompt: a text, if the model has a tokenizer, or its tokens.
            max_tokens: None: as many as the context has room for.
            temperature: 0: always the likeliest token.
            top_p: draw of the likeliest tokens of so much probability only.
            top_k: draw of so many of the likeliest tokens only; 0: of all.
            seed: of the random numbers; the same one gives the same text.
            stop: texts that end it, and are not part of it.
            ignore_eos: go on after the token that ends a text.
            logprobs: return the log-probability of each token, and of so many of the likeliest.
            priority: from -1000 to 1000. A model with a sequence of higher priority goes first.

        Raises:
            ArgumentError: an argument is wrong, or the model does not generate.
            NotFoundError: the model is not loaded.
            OverloadedError: `queue_limit` sequences are there.
            UnsupportedError: the model has no tokenizer.
        """
        model = self.stored(name) or self._store.get(name)
        ids = ids_of(model, prompt)
        sampling = sampling_of(
            model,
            len(ids),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        return self._continue(model, ids, sampling, stop, priority)

    def _continue(
        self,
        model: StoredModel,
        prompt: tuple[int, ...],
        sampling: Sampling,
        stop: Sequence[str],
        priority: int,
        on_event: Callable[[Emitted | Exception], object] | None = None,
    ) -> TokenStream:
        """Generate a sequence, whose events come to `on_event` in the owner's thread, if given."""
        _check_priority(priority)
        events, text = SimpleQueue[Emitted | Exception](), text_after(model, stop)
        sequence = TokenSequence(model.name, prompt, sampling, on_event or events.put, priority)
        self._owner.call(lambda: self._daemon.generate(sequence))
        return TokenStream(sequence, events, text, self._end_sequence)

    def _end_sequence(self, sequence: TokenSequence) -> None:
        if not self._owner.is_foreign:
            self._owner.post(lambda: self._daemon.generation.cancel(sequence))

    def train(
        self,
        name: str,
        factory: Callable[..., Any] | str,
        *,
        steps: int,
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        save_every: int = 0,
        resume: str | Path | None = None,
    ) -> TrainingHandle:
        """Run `steps` training steps while no request runs; return a handle.

        A request, or a model to load, preempts the task at the end of a step: its state is written
        to host memory and it resumes, in whatever worker, bit for bit. A worker that dies costs the
        steps since the last state.

        Args:
            factory: builds the task: an object with `step(index)`, `state_dict()` and
                `load_state_dict(state)`.
            save_every: also write the state back every so many steps; 0: only when preempted.
                After an error, :meth:`TrainingHandle.state` has the last one.
            resume: a file of :meth:`TrainingHandle.save` to go on from.

        Raises:
            ArgumentError: an argument is wrong.
            StorageError: `resume` is no such file.
        """
        for least, what, count in ((1, "steps", steps), (0, "save_every", save_every)):
            if not isinstance(count, int) or count < least:
                raise ArgumentError(f"{what}={count!r}: it must be an integer of at least {least}")
        owner, cancel = self._owner, self._daemon.training.cancel
        task = TrainingHandle(
            name,
            Factory.of(factory, kwargs, seed),
            steps,
            save_every,
            on_cancel=lambda one: owner.call(lambda: cancel(one)),
        )
        if resume is not None:
            task._resume(resume)
        owner.call(lambda: self._daemon.train(task))
        return task

    def _end_requests(self) -> None:
        """Fail what is queued or runs, and refuse more."""
        self._owner.post(lambda: self._daemon.drain(0.0))

    def status(self) -> dict[str, Any]:
        """Return the resident models, and queued, running and finished requests, as JSON values."""
        return self._owner.read(self._daemon.status)

    def close(self, grace_s: float = 10.0) -> None:
        """Finish what is queued, for at most `grace_s`, then end the workers and free the arena.

        Idempotent. In a process forked from the switcher's it only unmaps the arena.
        """
        if self._closed:
            return
        self._owner.check_can_wait()
        self._closed = True
        if not self._owner.is_foreign:
            self._owner.post(lambda: self._daemon.drain(grace_s))
            self._owner.join()
        self._cache.close()

    def _end_block(self, error: BaseException | None) -> None:
        self.close(grace_s=10.0 if error is None else 0.0)

    def _of(self, name: str, property_of: Callable[[Served], T], default: T) -> T:
        """Return what `property_of` says of the model that is loaded, or loading, under `name`."""

        def find() -> T:
            served = self._daemon.catalog.models.get(name)
            return default if served is None else property_of(served)

        return self._owner.read(find)

    def _forget(self, request: Request, future: Future[Reply]) -> None:
        """Take a request off the queue if it was cancelled."""
        if future.cancelled() and not self._owner.is_foreign:
            self._owner.post(lambda: self._daemon.forget(request))

    def _request(
        self,
        name: str,
        inputs: Mapping[str, torch.Tensor],
        priority: int,
        deadline_s: float | None,
        *,
        copies: bool,
    ) -> tuple[Request, OwnersFuture[Reply]]:
        _check_priority(priority)
        check_tensors(inputs)
        self._check_size("the inputs", [value.nbytes for value in inputs.values()])
        wait_s = math.inf if deadline_s is None else deadline_s
        if math.isnan(wait_s):
            raise ArgumentError(f"deadline_s={deadline_s}: it must be a number of seconds")
        plain = {
            key: value.detach().to("cpu", copy=copies) if copies or not value.is_cpu else value
            for key, value in inputs.items()
        }
        deadline, future = time.monotonic() + wait_s, OwnersFuture[Reply](self._owner)
        request = Request(name, plain, future, priority=priority, deadline=deadline)
        future.when_done(partial(self._forget, request))
        return request, future

    def _check_size(self, what: str, sizes: list[int]) -> None:
        size_bytes, limit = sum(map(align, sizes)), self._daemon.options.request_bytes
        if size_bytes > limit:
            raise CapacityError(
                f"{what} take {size_bytes} bytes, a request at most {limit}; make them smaller, or "
                "start with larger request_bytes"
            )


def _check_priority(priority: int) -> None:
    if not (isinstance(priority, int) and abs(priority) <= _MAX_PRIORITY):
        raise ArgumentError(
            f"priority={priority!r}: it must be an integer from -{_MAX_PRIORITY} to {_MAX_PRIORITY}"
        )


def _link(cache: SharedCache, link_gbps: float) -> WorkerLink:
    arena = cache.tensor((cache.size_bytes,), torch.uint8)
    if cache.device.type == "cpu":
        return HostLink(arena, gbytes_per_s=link_gbps)
    if link_gbps:
        raise ArgumentError(f"link_gbps emulates a link on the CPU; {cache.device} has its own")
    from torchrelay.switching.device._cuda import CudaLink  # noqa: PLC0415

    return CudaLink(arena, cache.device)
