"""The worker process: keeps modules ready, and runs one request at a time on read-only weights.

Started by the daemon as ``python -m torchrelay.switching._worker``. It ends when the daemon does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchrelay.errors import CapacityError, ModelError, PeerLostError
from torchrelay.switching import _training
from torchrelay.switching._cache import SharedCache
from torchrelay.switching._channel import Channel, Message, described
from torchrelay.switching._contract import align
from torchrelay.switching._factory import Factory
from torchrelay.switching._groups import Grouped
from torchrelay.switching._layout import Binding, Layout
from torchrelay.switching._profile import profile_module
from torchrelay.switching._request_buffer import RequestBuffer

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


class _CancelledError(BaseException):
    """Raised in a request that was cancelled. A model's `except Exception` does not catch it."""


class _Loaded:
    """A model's module in this process, bound to its groups in the arena."""

    def __init__(self, factory: Factory, layout: Layout) -> None:
        self.layout = layout
        self.binding = Binding(factory.build_skeleton().eval(), layout)
        self.grouped = Grouped.one_group(layout)
        self._offsets: list[int] = []

    def regroup(self, grouped: Grouped) -> None:
        self.grouped = grouped
        self._offsets = []

    def bind(self, arena: torch.Tensor, offsets: list[int]) -> None:
        """Bind the module's tensors to groups at `offsets`; costs nothing if they are there
        already.
        """
        if offsets == self._offsets:
            return
        self._offsets = offsets
        for group, start in enumerate(offsets):
            for storage, offset in self.grouped.places(group):
                size_bytes = self.layout.storages[storage]
                self.binding.bind(storage, arena.narrow(0, start + offset, size_bytes))


class Worker:
    """The state of a worker process."""

    def __init__(self, channel: Channel, cache: SharedCache, buffer: RequestBuffer) -> None:
        self._channel = channel
        self._buffers = [buffer]
        self._arena = cache.tensor((cache.size_bytes,), torch.uint8)
        self._device = cache.device
        self._models: dict[str, _Loaded] = {}
        self._request_id = 0
        self._arrived = 0  # groups of the running request, in the order of their copies
        self._operations: dict[str, Callable[[Message, list[int]], None]] = {
            "load": self._load,
            "unload": self._unload,
            "infer": self._infer,
            "profile": self._profile,
            "train": self._train,
        }

    def run(self) -> None:
        """Serve messages until the daemon sends exit or has ended."""
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
                loaded = _Loaded(factory, Layout.from_json(message["layout"]))
            loaded.regroup(Grouped.from_json(loaded.layout, message["groups"]))
        except Exception as error:
            self._channel.send({"op": "load_failed", "model": name, **described(error)})
            return
        self._models[name] = loaded
        self._channel.send({"op": "loaded", "model": name})

    def _unload(self, message: Message, _: list[int]) -> None:
        self._models.pop(message["model"], None)

    def _infer(self, message: Message, descriptors: list[int]) -> None:
        buffer = self._start(message, descriptors)
        with self._reporting(message):
            loaded = self._models[message["model"]]
            start = time.perf_counter()
            loaded.bind(self._arena, message["offsets"])
            inputs = buffer.read(message["inputs"])
            bound_s = time.perf_counter() - start
            with self._waiting(loaded, message), torch.inference_mode():
                results = loaded.binding.module(**_to(inputs, self._device))
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
            loaded = self._models[message["model"]]
            loaded.bind(self._arena, message["offsets"])
            inputs = _to(buffer.read(message["inputs"]), self._device)
            with self._waiting(loaded, message), torch.inference_mode():
                loaded.binding.module(**inputs)
                profile = profile_module(
                    loaded.binding.module,
                    loaded.layout,
                    lambda: loaded.binding.module(**inputs),
                    torch.cuda.synchronize if self._device.type == "cuda" else lambda: None,
                )
            self._channel.send({"op": "result", "id": message["id"], "profile": profile.to_json()})

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
        except Exception as error:
            self._channel.send({"op": "failed", "id": message["id"], **described(error)})
            self._check_device()

    def _check_device(self) -> None:
        """End the process if the error broke its CUDA context, in which nothing runs any more."""
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                sys.exit(f"worker {os.getpid()} ends, its CUDA context is broken: {error}")

    @contextlib.contextmanager
    def _waiting(self, loaded: _Loaded, message: Message) -> Iterator[None]:
        """Make each module wait for the groups it needs; those of a resident model wait for
        nothing.
        """
        order: list[int] = message["missing"]  # groups in the order in which they will arrive
        if not order:
            yield
            return
        self._arrived = 0
        position = {group: place + 1 for place, group in enumerate(order)}
        handles = []
        for path, groups in loaded.grouped.waits.items():
            needed = max((position[group] for group in groups if group in position), default=0)
            if needed:
                module = loaded.binding.module.get_submodule(path)
                handles.append(module.register_forward_pre_hook(self._waiter(needed), prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _waiter(self, needed: int) -> Callable[[torch.nn.Module, Any], None]:
        def wait(_: torch.nn.Module, __: Any) -> None:
            if self._arrived < needed:
                self._await_groups(needed)

        return wait

    def _await_groups(self, needed: int) -> None:
        while self._arrived < needed:
            received = self._channel.receive(None)
            assert received is not None
            message, _ = received
            if message.get("id") != self._request_id:
                continue
            if message["op"] == "cancel":
                raise _CancelledError
            if message["op"] == "arrived":
                self._arrived += 1


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
        return {"output": results}
    if isinstance(results, Mapping):
        pairs = [(str(name), value) for name, value in results.items()]
    elif isinstance(results, tuple | list):
        pairs = [(f"output_{index}", value) for index, value in enumerate(results)]
    else:
        pairs = []
    named = {name: value for name, value in pairs if isinstance(value, torch.Tensor)}
    if not named:
        raise ModelError(
            f"the model returned {type(results).__name__} without a tensor; return a tensor, or a "
            "tuple or dict of tensors"
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
        sys.exit(0)  # the daemon has ended


if __name__ == "__main__":
    main()
