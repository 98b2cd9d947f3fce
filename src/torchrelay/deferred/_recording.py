"""The fake and deferred contexts of a thread, the generators they watch, and recording in them."""

from __future__ import annotations

import threading
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _generators
from torchrelay.deferred._draws import words_drawn
from torchrelay.deferred._generators import Watch
from torchrelay.deferred._graph import External, History, Node, Region, map_tensors
from torchrelay.deferred._operators import Operator
from torchrelay.deferred._replay import Replay
from torchrelay.deferred._tensor import FakeTensor, meta_of
from torchrelay.errors import DeferredError

__all__ = ["FakeSession", "active", "current", "record", "recording"]


class FakeSession:
    """One ``fake_mode`` or ``deferred_init`` of this thread.

    Args:
        deferred: whether operations are recorded.
        pretend: whether absent devices are simulated; None: yes.

    Attributes:
        replay: computes the values that the program reads while it is recorded.
        memory: the storage over which a real tensor was created last.
    """

    def __init__(self, deferred: bool, pretend: bool | None = None) -> None:
        self.deferred = deferred
        self.pretend = pretend
        self._watches: dict[Any, Watch] = {}
        self._entries = [(one, one.get_state()) for one in _torch.default_generators()]
        self.replay = Replay()
        self.memory: torch.UntypedStorage | None = None
        self._read: dict[int, list[External]] = {}

    def is_over_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is over memory of the program, as from ``torch.asarray``."""
        return self.memory is not None and tensor.untyped_storage()._cdata == self.memory._cdata

    def note_read(self, external: External) -> None:
        """Note that a recorded operation reads ``external``, real memory."""
        if external.tensor.layout is torch.strided:
            self._read.setdefault(external.tensor.untyped_storage()._cdata, []).append(external)

    def before_write(self, tensor: torch.Tensor) -> None:
        """Copy what recorded operations read of ``tensor``, which the program is about to write."""
        if self._read and tensor.layout is torch.strided:
            for external in self._read.pop(tensor.untyped_storage()._cdata, ()):
                external.freeze()

    def draw(
        self, node: Node, generator: torch.Generator | None, device: torch.device, words: int | None
    ) -> None:
        """Assign ``node`` its position in the sequence of its generator."""
        key = device if generator is None else id(generator)
        watch = self._watches.get(key)
        if watch is None:
            if generator is None:
                generator = _torch.default_generator(device)
            watch = self._watches[key] = _generators.acquire(generator)
        watch.draw(node, words)

    def stand(self) -> None:
        """Set the generators to their recorded states, for an operation that draws for real."""
        for watch in _generators.watches():
            position = watch.mark(watch.generator.get_state())
            if position is not None:
                watch.generator.set_state(self.replay.generators.state(position))

    def close(self, done: bool) -> None:
        """End the watches and set the generators: to the end of the program if done, else back."""
        try:
            for watch in self._watches.values():
                if _generators.release(watch):
                    self._settle(watch, done)
            watched = {id(watch.generator) for watch in _generators.watches()}
            for generator, state in () if done else self._entries:
                if id(generator) not in watched:
                    generator.set_state(state)  # also if the program set it before it drew
        finally:
            self._watches.clear()
            self._read.clear()
            self.memory = None
            self.replay.forget()

    def _settle(self, watch: Watch, done: bool) -> None:
        state = watch.entry
        try:
            if done:
                state = self.replay.generators.state(watch.position())
        finally:
            watch.generator.set_state(state)
            watch.forget()


class _Stack(threading.local):
    def __init__(self) -> None:
        self.sessions: list[FakeSession] = []


_stack = _Stack()


def active() -> list[FakeSession]:
    """Return the sessions of this thread, the innermost last."""
    return _stack.sessions


def current() -> FakeSession | None:
    """Return the innermost session of this thread."""
    sessions = _stack.sessions
    return sessions[-1] if sessions else None


def recording() -> FakeSession | None:
    """Return the innermost session of this thread that records."""
    for session in reversed(_stack.sessions):
        if session.deferred:
            return session
    return None


def record(
    func: Any,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    writes: tuple[Region, ...] = (),
    outputs: tuple[Region | None, ...] = (),
) -> Node:
    """Append ``func`` to the histories of the storages it writes.

    Returns:
        The entry.

    Raises:
        DeferredError: an argument is a fake tensor without history, from ``fake_mode``.
    """
    results = [region for region in outputs if region is not None]
    several = len(writes) + len(results) > 1
    reads: list[Region] = []
    keeps: list[History] = []
    outside: list[External] = []

    def remember(value: torch.Tensor) -> Region | External | torch.Tensor:
        if operator.is_factory:
            return meta_of(value)
        if not isinstance(value, FakeTensor):
            outside.append(External(value))
            return outside[-1]
        region = value._region
        if not region.storage.deferred:
            raise DeferredError(
                f"{func}: a fake tensor that was made outside deferred_init has no history to "
                f"materialize it from, so it cannot be used with deferred tensors: {value!r}"
            )
        escaped = value._history.escaped
        if escaped is not None:
            outside.append(External(region.of(escaped), escaped))
            return outside[-1]
        if not any(region is written for written in writes):
            reads.append(region)
            keeps.append(value._history)
        elif several:  # computing one of its results computes the others
            keeps.append(value._history)
        return region

    node_args = map_tensors(args, torch.Tensor, remember)
    node_kwargs = map_tensors(kwargs, torch.Tensor, remember) if kwargs else {}
    session = recording() if outside else None
    if session is not None:
        for external in outside:
            session.note_read(external)
    generator = node_kwargs.pop("generator", None)
    if operator.draws and node_args and isinstance(node_args[-1], torch.Generator):
        *node_args, generator = node_args
    node = Node(func, tuple(node_args), node_kwargs, tuple(reads), writes, outputs, tuple(keeps))
    node.overwrites = operator.fills and _is_overwritten(writes[0], node)
    if operator.is_factory and results:
        _fix_attributes(node, operator, results[0])
    if operator.draws:
        _place(node, generator, [*writes, *results])
    node.link(bool(outside))
    return node


def _is_overwritten(target: Region, node: Node) -> bool:
    """Return whether a fill of ``target`` covers its storage, of which ``node`` reads nothing."""
    return (
        target.is_whole
        and not any(region.storage is target.storage for region in node.reads)
        and sum(argument is target for argument in node.args) == 1
    )


def _fix_attributes(node: Node, operator: Operator, result: Region) -> None:
    """Make explicit what a factory took from the current defaults."""
    if operator.takes_dtype:
        node.kwargs["dtype"] = result.dtype
    if operator.takes_device:
        node.kwargs["device"] = result.storage.device


def _place(node: Node, generator: torch.Generator | None, targets: list[Region]) -> None:
    device = targets[0].storage.device if targets else torch.device("cpu")
    counted = device.type == "cpu" or not _torch.device_available(device)
    words = words_drawn(node.func, targets[0], node.args) if counted and targets else None
    session = recording()  # nobody closes what a fake_mode draws
    if session is not None:
        session.draw(node, generator, device, words)
        return
    alone = FakeSession(deferred=True)
    try:
        alone.draw(node, generator, device, words)
    finally:
        alone.close(done=True)
