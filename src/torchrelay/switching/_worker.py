"""The worker process: keeps modules ready, and runs one request at a time on read-only weights.

Started by the daemon (:mod:`._process`). It ends when the daemon does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.errors import CapacityError, ModelError, PeerLostError
from torchrelay.switching import _training
from torchrelay.switching._binding import Arrivals, Binding
from torchrelay.switching._cache import SharedCache
from torchrelay.switching._channel import Channel, Message, described
from torchrelay.switching._contract import align
from torchrelay.switching._factory import Factory
from torchrelay.switching._groups import Grouped
from torchrelay.switching._layout import Layout
from torchrelay.switching._profile import Profile, profile_module
from torchrelay.switching._request_buffer import RequestBuffer

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


class _CancelledError(BaseException):
    """Raised in a request that was cancelled. A model's `except Exception` does not catch it."""


class _Loaded:
    """A model's module in this process, bound to its groups in the arena."""

    def __init__(self, binding: Binding, grouped: Grouped) -> None:
        self.binding = binding
        self.grouped = grouped
        self.missing: set[int] = set()  # groups that have not arrived
        # Whether the model runs under plain torch: no inference mode, no waiting operators.
        # Torch neither compiles nor uses compiled code while a dispatch mode is active.
        self.is_plain = _torch.is_compiled(binding.module)
        self._places: list[int] = []

    def regroup(self, grouped: Grouped) -> None:
        self.grouped = grouped
        self._places = []

    def bind(self, places: list[int], missing: list[int]) -> None:
        """Bind the groups to the addresses `places`, except for those that are `missing`; costs
        nothing if they are there already.
        """
        if places != self._places or missing or self.missing:
            self._places, self.missing = places, set(missing)
            for group in range(len(places)):
                self._move(group)
        self.binding.check()

    def arrive(self, group: int) -> None:
        """Bind a group that is in its place now."""
        self.missing.discard(group)
        self._move(group)

    def _move(self, group: int) -> None:
        for storage, offset in self.grouped.places(group):
            if group in self.missing:
                self.binding.unbind(storage)
            else:
                self.binding.bind(storage, self._places[group] + offset)


class Worker:
    """The state of a worker process."""

    def __init__(self, channel: Channel, cache: SharedCache, buffer: RequestBuffer) -> None:
        self._channel = channel
        self._buffers = [buffer]
        self._arena = cache.tensor((cache.size_bytes,), torch.uint8)
        self._device = cache.device
        self._nowhere = cache.nowhere()
        self._models: dict[str, _Loaded] = {}
        self._failed: dict[str, str] = {}  # why a model is not in `_models`
        self._request_id = 0
        self._operations: dict[str, Callable[[Message, list[int]], None]] = {
            "load": self._load,
            "unload": self._unload,
            "infer": self._infer,
            "profile": self._profile,
            "train": self._train,
        }

    def run(self) -> None:
        """Serve messages until the daemon sends exit or has exited."""
        self._channel.send({"op": "ready", "pid": os.getpid()})
        while True:
            received = self._channel.receive(None)
            assert received is not None
            message, descriptors = received
            if message["op"] == "exit":
                return
            # What belongs to a request that has ended meanwhile is of no use any more.
            operation = self._operations.get(message["op"])
            if operation is not None:
                operation(message, descriptors)

    def _load(self, message: Message, _: list[int]) -> None:
        name = message["model"]
        try:
            loaded = self._models.get(name)
            if loaded is None or message["replace"]:
                factory = Factory(message["factory"], message["kwargs"], message["seed"])
                layout = Layout.from_json(message["layout"])
                module = factory.build_skeleton().eval()
                binding = Binding(module, layout, self._arena.device, self._nowhere)
                loaded = _Loaded(binding, Grouped.one_group(layout))
            groups = tuple(map(tuple, message["groups"]))
            loaded.regroup(Grouped(loaded.grouped.layout, groups))
        except (Exception, SystemExit) as error:
            self._models.pop(name, None)
            self._failed[name] = str(error)
            self._channel.send({"op": "load_failed", "model": name, **described(error)})
            return
        self._models[name] = loaded
        self._channel.send({"op": "loaded", "model": name})

    def _unload(self, message: Message, _: list[int]) -> None:
        self._models.pop(message["model"], None)

    def _infer(self, message: Message, descriptors: list[int]) -> None:
        buffer = self._start(message, descriptors)
        with self._reporting(message):
            start = time.perf_counter()
            loaded = self._bound(message)
            bound_s = time.perf_counter() - start
            results = self._forward(loaded, lambda: self._inputs(buffer, message))
            outputs = {name: value.cpu() for name, value in _named(results).items()}
            compute_s = time.perf_counter() - start - bound_s
            self._channel.send(
                {
                    "op": "result",
                    "id": message["id"],
                    "outputs": _store(buffer, outputs, message["outputs_at"]),
                    "bind_s": bound_s,
                    "compute_s": compute_s,
                }
            )

    def _profile(self, message: Message, descriptors: list[int]) -> None:
        buffer = self._start(message, descriptors)
        with self._reporting(message):
            loaded = self._bound(message)
            self._await_all(loaded)
            self._forward(loaded, lambda: self._inputs(buffer, message))
            profile = Profile(())  # one group
            if not loaded.is_plain:
                inputs = self._inputs(buffer, message)
                with torch.inference_mode():
                    profile = profile_module(
                        loaded.binding.module,
                        loaded.grouped.layout,
                        lambda: loaded.binding.module(**inputs),
                        torch.cuda.synchronize if self._device.type == "cuda" else lambda: None,
                    )
            self._channel.send({"op": "result", "id": message["id"], "profile": profile.to_json()})

    def _bound(self, message: Message) -> _Loaded:
        """Return the request's model, bound to what has arrived of it."""
        loaded = self._models.get(message["model"])
        if loaded is None:
            raise ModelError(f"this worker could not build it: {self._failed[message['model']]}")
        arena = self._arena.data_ptr()
        loaded.bind([arena + offset for offset in message["offsets"]], message["missing"])
        if message["whole"]:
            self._await_all(loaded)
        return loaded

    def _inputs(self, buffer: RequestBuffer, message: Message) -> dict[str, torch.Tensor]:
        return _to(buffer.read(message["inputs"]), self._device)

    def _forward(self, loaded: _Loaded, inputs: Callable[[], dict[str, torch.Tensor]]) -> Any:
        """Run the model while its groups arrive.

        If that fails, run it again on the whole model under plain torch, so that a forward that
        needs autograd, or reads weights without operators, is served too.
        """
        module, overlaps = loaded.binding.module, bool(loaded.missing)
        if not loaded.is_plain:
            group_of = loaded.grouped.group_of
            arrivals = Arrivals(loaded.binding, lambda one: self._await(loaded, group_of[one]))
            try:
                with torch.inference_mode(), arrivals if overlaps else contextlib.nullcontext():
                    return module(**inputs())
            except Exception as error:
                if not overlaps and not isinstance(error, RuntimeError):
                    raise
            if overlaps:
                self._check_device()
        self._await_all(loaded)
        with torch.no_grad():
            results = module(**inputs())
        loaded.is_plain = True
        return results

    def _start(self, message: Message, descriptors: list[int]) -> RequestBuffer:
        """Record that the request has started, and return its buffer."""
        self._buffers += map(RequestBuffer.open, descriptors)
        buffer = self._buffers[message["buffer"]]
        buffer.started = message["id"]
        return buffer

    def _train(self, message: Message, descriptors: list[int]) -> None:
        with self._reporting(message):
            _training.run(message, descriptors, self._channel)

    @contextlib.contextmanager
    def _reporting(self, message: Message) -> Iterator[None]:
        """Report the error of a request; only the loss of the daemon ends the worker."""
        self._request_id = message["id"]
        try:
            yield
        except PeerLostError:
            raise
        except _CancelledError:
            self._channel.send({"op": "cancelled", "id": message["id"]})
        except (Exception, SystemExit) as error:
            self._channel.send({"op": "failed", "id": message["id"], **described(error)})
            self._check_device()

    def _check_device(self) -> None:
        """End the process if the error broke its CUDA context, in which nothing runs any more."""
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                sys.exit(f"worker {os.getpid()} ends, its CUDA context is broken: {error}")

    def _await(self, loaded: _Loaded, group: int) -> None:
        """Wait for the group, and bind what arrives meanwhile."""
        while group in loaded.missing:
            received = self._channel.receive(None)
            assert received is not None
            message, _ = received
            if message.get("id") != self._request_id:
                continue
            if message["op"] == "cancel":
                raise _CancelledError
            if message["op"] == "arrived":
                loaded.arrive(message["group"])

    def _await_all(self, loaded: _Loaded) -> None:
        for group in sorted(loaded.missing):
            self._await(loaded, group)


def _store(buffer: RequestBuffer, outputs: Mapping[str, torch.Tensor], start: int) -> list[Message]:
    needed = sum(align(tensor.nbytes) for tensor in outputs.values())
    if start + needed > buffer.size_bytes:
        raise CapacityError(
            f"the outputs take {needed} bytes, {buffer.size_bytes - start} of the request "
            "buffer are left; start the server with larger request_bytes"
        )
    return buffer.write(outputs, start)


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


def main() -> None:
    """Run a worker over the descriptors inherited from the daemon."""
    parser = argparse.ArgumentParser()
    for name in ("channel", "arena", "requests", "threads", "workers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--cache", required=True)
    options = parser.parse_args()
    # The daemon may be killed while a request computes for long.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches the whole group; the daemon decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.threads:
        torch.set_num_threads(options.threads)
    channel = Channel(socket.socket(fileno=options.channel))
    try:
        cache = SharedCache.from_descriptor(json.loads(options.cache), [options.arena])
        buffer = RequestBuffer.open(options.requests)
        os.close(options.arena)
        if cache.device.type == "cuda":
            _prepare_cuda(cache.device, cache.size_bytes, options.workers)
        Worker(channel, cache, buffer).run()
    except PeerLostError:
        sys.exit(0)  # the daemon has exited


if __name__ == "__main__":
    main()
