"""The fake and deferred contexts of a thread, and the generators they watch."""

from __future__ import annotations

import threading
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _generators
from torchrelay.deferred._generators import Watch
from torchrelay.deferred._graph import External, Node
from torchrelay.deferred._replay import Replay

__all__ = ["FakeSession", "active", "current", "recording"]


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
        self._watch(generator, device).draw(node, words)

    def _watch(self, generator: torch.Generator | None, device: torch.device) -> Watch:
        key = device if generator is None else id(generator)
        found = self._watches.get(key)
        if found is None:
            if generator is None:
                generator = _torch.default_generator(device)
            found = self._watches[key] = _generators.acquire(generator)
        return found

    def stand(self) -> None:
        """Set the generators to their recorded states, for an operation that draws for real."""
        for watch in _generators.watches():
            position = watch.mark(watch.generator.get_state())
            if position is not None:
                watch.generator.set_state(self.replay.generators.state(position))

    def close(self, done: bool) -> None:
        """End the watches and set the generators: to the end of the program if done, else back."""
        try:
            for key, watch in self._watches.items():
                if _generators.release(watch):
                    stand_in = (
                        isinstance(key, torch.device) and key.type != watch.generator.device.type
                    )
                    self._settle(watch, done and not stand_in)
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
