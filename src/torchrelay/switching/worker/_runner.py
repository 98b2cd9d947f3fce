"""What a worker does: keeps modules ready, and runs one request at a time on read-only weights."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchrelay import _torch
from torchrelay._helper import Channel
from torchrelay.errors import ArgumentError, ModelError, to_json
from torchrelay.switching.device._cache import SharedCache
from torchrelay.switching.generate import _messages as generate
from torchrelay.switching.models import _code
from torchrelay.switching.models._layout import Grouped
from torchrelay.switching.worker import _messages, _training
from torchrelay.switching.worker._binding import Arrivals, Binding
from torchrelay.switching.worker._profile import Output, Profile, profile_module
from torchrelay.switching.worker._request_buffer import RequestBuffer, Written

if TYPE_CHECKING:
    from torchrelay.switching.generate._slices import Sequences

__all__ = ["ModelRunner"]

_Running = _messages.Run | generate.Generate


class _StoppedError(BaseException):
    """Raised in a request that was stopped. A model's `except Exception` does not catch it."""


class _Loaded:
    """A model's module in this process."""

    def __init__(self, load: _messages.Load, cache: SharedCache) -> None:
        """Build the module."""
        self.load = load
        self.grouped = Grouped(load.layout, load.groups)
        module = load.factory.build_skeleton()
        self.binding = Binding(module, self.grouped, cache.memory)
        self.missing: set[int] = set()  # groups that have not arrived
        # Whether the model runs under plain torch: no inference mode, no waiting operators.
        # Torch neither compiles nor uses compiled code while a dispatch mode is active.
        self.is_plain = _torch.is_compiled(module)
        self.retry: _Loaded | None = None  # the module of second attempts

    def is_of(self, load: _messages.Load) -> bool:
        """Return whether this is what `load` asks for."""
        return self.load.version == load.version and self.load.groups == load.groups

    def close(self) -> None:
        """Unmap its memory: other models get that, whoever still refers to the tensors."""
        self.binding.leave()
        if self.retry is not None:
            self.retry.close()


class ModelRunner:
    """The state of a worker process."""

    def __init__(self, channel: Channel, cache: SharedCache, buffers: list[RequestBuffer]) -> None:
        self._channel = channel
        self._buffers = buffers
        self._cache = cache
        self._device = cache.device
        self._models: dict[str, _Loaded] = {}
        self._failed: dict[str, str] = {}  # why a model is not in `_models`
        self._request_id = 0
        self._sequences: Sequences | None = None  # of models that generate
        # Messages for a slice that came while it waited for groups.
        self._early: deque[tuple[Any, list[int]]] = deque()
        self._waits: dict[int, tuple[float, float]] = {}  # of the request's groups, as in Result

    def run(self) -> None:
        """Serve messages until the daemon sends Exit or has exited."""
        self._channel.send(_messages.Ready())
        while True:
            message, descriptors = self._receive()
            if isinstance(message, _messages.Exit):
                return
            if isinstance(message, _messages.Load):
                self._load(message)
            elif isinstance(message, _Running | _messages.Train):
                self._request_id = message.request_id
                try:
                    if isinstance(message, _messages.Run):
                        self._run(message)
                    elif isinstance(message, generate.Generate):
                        self._generate(message, descriptors)
                    else:
                        _training.run(message, descriptors, self._channel, self._was_stopped)
                except BaseException as error:  # a model's, of whatever kind
                    self._channel.send(_messages.Failed(_described(error)))
                    self._check_device()
            # What belongs to a request that has ended meanwhile is of no use any more.
            elif isinstance(message, generate.Join):
                for one in descriptors:
                    os.close(one)

    def _receive(self, timeout_s: float | None = None) -> tuple[Any, list[int]]:
        """Return the next message; None after `timeout_s`. Forget models, and give up memory,
        whenever asked to.
        """
        while True:
            message, descriptors = self._channel.receive(timeout_s) or (None, [])
            if isinstance(message, _messages.Unload):
                self._forget(message.model)
            elif isinstance(message, _messages.Unmap):
                self._unmap(message.groups)
            elif isinstance(message, generate.Drop):
                if self._sequences is not None:
                    self._sequences.drop(message.sequence_ids)
            else:
                return message, descriptors

    def _forget(self, name: str) -> None:
        loaded = self._models.pop(name, None)
        if loaded is not None:
            loaded.close()
        if self._sequences is not None:
            self._sequences.forget(name)

    def _unmap(self, places: list[tuple[str, int]]) -> None:
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for name, group in places:
            groups[name].append(group)
        for name in groups.keys() & self._models.keys():
            loaded = self._models[name]
            loaded.binding.leave(groups[name])
            if loaded.retry is not None:
                loaded.retry.binding.leave(groups[name])

    def _was_stopped(self) -> bool:
        """Return whether a message has come that stops the running request or task."""
        while (message := self._receive(0)[0]) is not None:
            if self._stops(message):
                return True
        return False

    def _stops(self, message: object) -> bool:
        return isinstance(message, _messages.Stop) and message.request_id == self._request_id

    def _load(self, load: _messages.Load) -> None:
        name, error = load.model, None
        try:
            loaded = self._models.get(name)
            if loaded is None or not loaded.is_of(load):
                self._forget(name)
                self._models[name] = _Loaded(load, self._cache)
        except BaseException as caught:
            error = _described(caught)
            self._failed[name] = error["message"]
        self._channel.send(_messages.Built(name, error))

    def _run(self, run: _messages.Run) -> None:
        buffer = self._buffers[run.buffer]
        buffer.started = run.request_id
        self._waits = {}
        start = time.monotonic()
        loaded = self._bound(run)
        bound_s = time.monotonic() - start
        results = self._forward(loaded, run)
        profile, written = None, list[Written]()
        if run.is_profile:
            outputs = tuple(
                Output(name, str(value.dtype).removeprefix("torch."), value.dim())
                for name, value in _named(results).items()
            )
            loaded = self._models[run.model]
            profile = Profile() if run.whole else self._profiled(loaded, self._inputs(run))
            profile = profile._replace(outputs=outputs)
        else:
            self._synchronize()  # outputs may be on the host while they are still copied there
            written, _ = buffer.write(_named(results), run.outputs_at)
        first_group = next((computed for _, computed in self._waits.values()), 0.0)
        bound_s = max(bound_s, first_group - start)
        compute_s = time.monotonic() - start - bound_s
        self._channel.send(_messages.Result(written, bound_s, compute_s, self._waits, profile))

    def _generate(self, work: generate.Generate, descriptors: list[int]) -> None:
        """Continue sequences of a model."""
        # Imports transformers, as the model has.
        from torchrelay.switching.generate._slices import Sequences  # noqa: PLC0415

        self._early.clear()
        self._waits = {}
        loaded = self._bound(work)
        if self._sequences is None:
            self._sequences = Sequences(self._channel, self._device)

        def forward(**inputs: Any) -> Any:
            with self._arriving(loaded, work):
                return loaded.binding.module(**inputs)

        def receive() -> tuple[Any, list[int]]:
            if self._early:
                return self._early.popleft()
            return self._received_meanwhile(loaded, work, 0)

        with torch.no_grad() if loaded.is_plain else torch.inference_mode():
            self._sequences.run(work, descriptors, loaded.binding.module, forward, receive)

    def _profiled(self, loaded: _Loaded, inputs: dict[str, torch.Tensor]) -> Profile:
        """Run a model that is in place again and again; one that fails while operators wait gets no
        layers.
        """
        if not loaded.is_plain:
            try:
                with torch.inference_mode():
                    run = partial(loaded.binding.module, **inputs)
                    return profile_module(loaded.binding, run, self._synchronize)
            except Exception:
                self._check_device()
            self._replace(loaded, _Loaded(loaded.load, self._cache))
        return Profile()

    def _bound(self, run: _Running) -> _Loaded:
        """Return the request's model, bound to what has arrived of it; to all of it if no operator
        can wait for the rest.
        """
        loaded = self._models.get(run.model)
        if loaded is None:
            raise ModelError(f"this worker could not build it: {self._failed[run.model]}")
        _code.use(loaded.load.factory.code)
        loaded.missing = set(run.missing)
        whole = run.whole or run.is_profile or loaded.is_plain or len(run.offsets) == 1
        loaded.binding.bind(run.offsets, () if whole else run.missing)
        if whole:
            self._await_all(loaded, run)
        return loaded

    def _forward(self, loaded: _Loaded, run: _messages.Run) -> Any:
        """Run the model while its groups arrive.

        If that fails, build it again, without what the failed attempt left in it, and run it on the
        whole model under plain torch, so that a forward that needs autograd, or reads weights
        without operators, is served too.
        """
        if loaded.is_plain:
            return self._plain(loaded, run)
        module, overlaps = loaded.binding.module, bool(loaded.missing)
        try:
            with torch.inference_mode(), self._arriving(loaded, run):
                return module(**self._inputs(run))
        except Exception as error:
            # What a thread of the model's raised is known by what it lacks then, at its first run.
            if not (overlaps or run.is_profile or isinstance(error, RuntimeError)):
                raise
        self._check_device()  # nothing reads the memory any more
        self._await_all(loaded, run)
        if loaded.retry is None:
            loaded.retry = _Loaded(loaded.load, self._cache)
        retry = loaded.retry
        loaded.binding.leave()
        retry.binding.bind(run.offsets)
        results = self._plain(retry, run)
        retry.is_plain = True
        loaded.retry = None
        self._replace(loaded, retry)
        return results

    def _arriving(
        self, loaded: _Loaded, run: _Running
    ) -> contextlib.AbstractContextManager[object]:
        """Let operators wait for groups that have not arrived, if there are any."""
        if not loaded.missing:
            return contextlib.nullcontext()
        group_of = loaded.grouped.group_of
        return Arrivals(loaded.binding, lambda one: self._await(loaded, group_of[one], run))

    def _plain(self, loaded: _Loaded, run: _messages.Run) -> Any:
        with torch.no_grad():
            return loaded.binding.module(**self._inputs(run))

    def _inputs(self, run: _messages.Run) -> dict[str, torch.Tensor]:
        return _to(self._buffers[run.buffer].read(run.inputs), self._device)

    def _replace(self, loaded: _Loaded, other: _Loaded) -> None:
        """Let `other`, another build of the same model, serve it from now on."""
        loaded.close()
        self._models[loaded.load.model] = other

    def _check_device(self) -> None:
        """End the process if the error broke its CUDA context, in which nothing runs any more."""
        try:
            self._synchronize()
        except RuntimeError as error:
            sys.exit(f"worker {os.getpid()} ends, its CUDA context is broken: {error}")

    def _synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _await(self, loaded: _Loaded, group: int, run: _Running) -> None:
        """Wait for the group, and map what arrives meanwhile."""
        needed = time.monotonic()
        while group in loaded.missing:
            received = self._received_meanwhile(loaded, run, None, needed)
            if received[0] is not None:
                self._early.append(received)

    def _received_meanwhile(
        self, loaded: _Loaded, run: _Running, timeout_s: float | None, needed: float = 0.0
    ) -> tuple[Any, list[int]]:
        """Return the next message for a slice, or None; map a group that has arrived, and raise if
        the request was stopped.
        """
        message, descriptors = self._receive(timeout_s)
        if self._stops(message):
            raise _StoppedError
        if getattr(message, "request_id", None) == self._request_id:
            if not isinstance(message, _messages.GroupCopied):
                return message, descriptors
            loaded.missing.discard(message.group)
            loaded.binding.map(message.group, run.offsets[message.group])
            self._waits[message.group] = needed, time.monotonic()
        for one in descriptors:
            os.close(one)
        return None, []

    def _await_all(self, loaded: _Loaded, run: _Running) -> None:
        for group in sorted(loaded.missing):
            self._await(loaded, group, run)
        if run.missing:  # nothing computes before the last is there
            self._waits = dict.fromkeys(run.missing, (time.monotonic(),) * 2)


def _described(error: BaseException) -> dict[str, Any]:
    """Describe an error of a model; a call with other arguments than it takes is the caller's."""
    found = to_json(error)
    if isinstance(error, TypeError) and "argument" in found["message"]:
        found["type"] = ArgumentError.__name__
    return found


def _named(results: Any) -> dict[str, torch.Tensor]:
    """Return a model's result as tensors by name, without other entries."""
    results = {"output": results} if isinstance(results, torch.Tensor) else results
    if isinstance(results, Mapping):
        pairs = [(str(name), value) for name, value in results.items()]
    elif dataclasses.is_dataclass(results):
        pairs = [(one.name, getattr(results, one.name)) for one in dataclasses.fields(results)]
    elif isinstance(results, tuple | list):
        pairs = [(f"output_{index}", value) for index, value in enumerate(results)]
    else:
        pairs = []
    named = {name: value.detach() for name, value in pairs if isinstance(value, torch.Tensor)}
    if len({name for name, _ in pairs}) < len(pairs):
        raise ModelError("the model returned a dict with keys of the same text, such as 1 and '1'")
    for name, value in named.items():
        if value.layout is not torch.strided or value.is_nested or value.is_meta:
            raise ModelError(
                f"output {name!r} is a {type(value).__name__} of layout {value.layout} on "
                f"{value.device}; return a dense tensor"
            )
    if not named:
        raise ModelError(
            f"the model returned {type(results).__name__} without a tensor; return a tensor, or a "
            "tuple, dict or dataclass of tensors"
        )
    return named


def _to(inputs: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}
