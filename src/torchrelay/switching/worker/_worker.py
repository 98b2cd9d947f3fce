"""The worker process: keeps modules ready, and runs one request at a time on read-only weights.

Forked from a process that the daemon started (:mod:`._fork_server`), with which it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from torchrelay import _torch
from torchrelay._helper import Channel
from torchrelay.errors import ArgumentError, ModelError, PeerLostError, to_json
from torchrelay.switching.device._cache import SharedCache
from torchrelay.switching.models._layout import Grouped
from torchrelay.switching.worker import _messages, _training
from torchrelay.switching.worker._binding import Arrivals, Binding
from torchrelay.switching.worker._fork_server import serve
from torchrelay.switching.worker._profile import Output, Profile, profile_module
from torchrelay.switching.worker._request_buffer import RequestBuffer, Written

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


class _StoppedError(BaseException):
    """Raised in a request that was stopped. A model's `except Exception` does not catch it."""


class _Loaded:
    """A model's module in this process."""

    def __init__(self, load: _messages.Load, cache: SharedCache) -> None:
        """Build the module."""
        self.load = load
        self.grouped = Grouped(load.layout, load.groups)
        module = load.factory.build_skeleton()
        self.binding = Binding(module, self.grouped, cache)
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
            elif isinstance(message, _messages.Run | _messages.Train):
                self._request_id = message.request_id
                try:
                    if isinstance(message, _messages.Run):
                        self._run(message)
                    else:
                        _training.run(message, descriptors, self._channel, self._was_stopped)
                except PeerLostError:  # the daemon
                    raise
                except (Exception, SystemExit, _StoppedError) as error:
                    failed = _messages.Failed(message.request_id, _described(error))
                    self._channel.send(failed)
                    self._check_device()
            # What belongs to a request that has ended meanwhile is of no use any more.

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
            else:
                return message, descriptors

    def _forget(self, name: str) -> None:
        loaded = self._models.pop(name, None)
        if loaded is not None:
            loaded.close()

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
        except (Exception, SystemExit) as caught:
            self._failed[name] = str(caught)
            error = _described(caught)
        self._channel.send(_messages.Built(name, load.version, error))

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
        self._channel.send(
            _messages.Result(run.request_id, written, bound_s, compute_s, self._waits, profile)
        )

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

    def _bound(self, run: _messages.Run) -> _Loaded:
        """Return the request's model, bound to what has arrived of it; to all of it if no operator
        can wait for the rest.
        """
        loaded = self._models.get(run.model)
        if loaded is None:
            raise ModelError(f"this worker could not build it: {self._failed[run.model]}")
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
        group_of = loaded.grouped.group_of
        waiting: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if overlaps:
            waiting = Arrivals(loaded.binding, lambda one: self._await(loaded, group_of[one], run))
        try:
            with torch.inference_mode(), waiting:
                return module(**self._inputs(run))
        except Exception as error:
            if not overlaps and not isinstance(error, RuntimeError):
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

    def _await(self, loaded: _Loaded, group: int, run: _messages.Run) -> None:
        """Wait for the group, and map what arrives meanwhile."""
        needed = time.monotonic()
        while group in loaded.missing:
            message, _ = self._receive()
            if self._stops(message):
                raise _StoppedError
            if (
                isinstance(message, _messages.GroupCopied)
                and message.request_id == self._request_id
            ):
                loaded.missing.discard(message.group)
                loaded.binding.arrive(message.group, run.offsets[message.group])
                self._waits[message.group] = needed, time.monotonic()

    def _await_all(self, loaded: _Loaded, run: _messages.Run) -> None:
        for group in sorted(loaded.missing):
            self._await(loaded, group, run)
        if run.missing:  # nothing computes before the last is there
            self._waits = dict.fromkeys(run.missing, (time.monotonic(),) * 2)


def _described(error: BaseException) -> dict[str, Any]:
    """Describe an error of a model; a call with other arguments than it takes is the caller's."""
    if isinstance(error, TypeError) and "argument" in str(error):
        error = ArgumentError(str(error))
    return to_json(error)


def _named(results: Any) -> dict[str, torch.Tensor]:
    """Return a model's result as tensors by name, without other entries."""
    if isinstance(results, torch.Tensor):
        return {"output": results.detach()}
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
    if not named:
        raise ModelError(
            f"the model returned {type(results).__name__} without a tensor; return a tensor, or a "
            "tuple, dict or dataclass of tensors"
        )
    return named


def _to(inputs: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}


def _prepare_cuda(device: torch.device, arena_bytes: int, workers: int) -> None:
    """Create the CUDA context and library handles, and bound this worker's activations.

    Each worker gets the same share of what the arena leaves: none can take another's memory.
    """
    torch.cuda.set_device(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    share = max(total_bytes - arena_bytes, 0) / total_bytes / workers
    torch.cuda.set_per_process_memory_fraction(share, device)
    ones = torch.ones(8, 8, device=device)
    (ones @ ones).cpu()


def _parts(channel: Channel, count: int) -> Iterator[int]:
    """Yield the descriptors of the arena, in order; each is open until the next is asked for."""
    first = 0
    while first < count:
        channel.send(_messages.WantParts(first))
        received = channel.receive()
        assert received is not None
        for descriptor in received[1]:
            yield descriptor
            os.close(descriptor)
        first += len(received[1])


def _follow_daemon() -> None:
    """End with the daemon, or with the server that was forked from, which ends with the daemon."""
    # It may be killed while a request computes for long.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C, and systemd's SIGTERM, reach the whole group; the daemon decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not ignored: processes that a model starts would inherit that, and pools end theirs so.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def main() -> None:
    """Serve as what workers are forked from, and run a worker in each such process. The last
    argument is the descriptor of a channel to the daemon.
    """
    _follow_daemon()
    try:
        channel, start, requests = serve(Channel(socket.socket(fileno=int(sys.argv[-1]))))
        _follow_daemon()
        np.random.seed()  # as Python does with its own generator, after a fork
        if start.threads:
            torch.set_num_threads(start.threads)
        cache = SharedCache.from_descriptors(start.arena, _parts(channel, start.arena["parts"]))
        buffers = [RequestBuffer.open(one) for one in requests]
        if cache.device.type == "cuda":
            _prepare_cuda(cache.device, cache.size_bytes, start.workers)
        ModelRunner(channel, cache, buffers).run()
    except PeerLostError:
        sys.exit(0)  # the daemon has exited


if __name__ == "__main__":
    main()
