"""The fake and deferred contexts of a thread, and the generators they watch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay import _torch
from torchrelay.deferred import _positions
from torchrelay.deferred._graph import External, Node
from torchrelay.deferred._hooks import hooks
from torchrelay.deferred._positions import Origin, Position, Watch
from torchrelay.deferred._replay import Replay
from torchrelay.errors import UnsupportedError

__all__ = ["Session", "current", "enter", "recording"]


class Session:
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
        watch = self._watch(generator, device)
        before = watch.position()
        if words is None:
            after = Position(Origin(before.origin.device, None, before, node))
        else:
            after = Position(before.origin, before.words + words)
        node.position, node.after = before, after
        watch.advance(after)

    def _watch(self, generator: torch.Generator | None, device: torch.device) -> Watch:
        key = device if generator is None else id(generator)
        found = self._watches.get(key)
        if found is None:
            if generator is None:
                generator = _torch.default_generator(device)
            found = self._watches[key] = _positions.acquire(generator)
        return found

    def stand(self) -> None:
        """Set the generators to their recorded states, for an operation that draws for real."""
        for watch in _positions.watches():
            position = watch.mark()
            if position is not None:
                watch.generator.set_state(self.replay.generators.state(position))

    def close(self, done: bool) -> None:
        """End the watches and set the generators: to the end of the program if done, else back."""
        try:
            for key, watch in self._watches.items():
                if _positions.release(watch):
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
        self.sessions: list[Session] = []


_stack = _Stack()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Receives every operation, also those without a fake argument. One per thread."""

    # Lets calls for absent devices through torch's argument parsing, as they are not going to be
    # touched.
    _mode_key = _torch.fake_mode_key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if kind is not hooks.fake and _is_foreign(kind):
                return NotImplemented  # a tensor subclass takes its own part first
        return hooks.dispatch(func, args, kwargs or {})


def _is_foreign(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of ``kind`` dispatch operations themselves and are not fake."""
    dispatches = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return dispatches and not issubclass(kind, hooks.fake)


def current() -> Session | None:
    """Return the innermost session of this thread."""
    sessions = _stack.sessions
    return sessions[-1] if sessions else None


def recording() -> Session | None:
    """Return the innermost session of this thread that records."""
    for session in reversed(_stack.sessions):
        if session.deferred:
            return session
    return None


@contextmanager
def enter(session: Session) -> Iterator[Session]:
    """Make ``session`` the innermost of this thread; the caller closes it."""
    mode: _Mode | None = None
    if not _stack.sessions:
        if _torch.fake_mode_active():
            raise UnsupportedError(
                "A torch.export or torch.compile fake mode is active here; leave it before making "
                "fake tensors."
            )
        mode = _Mode()  # type: ignore[no-untyped-call]
        mode.__enter__()  # type: ignore[no-untyped-call]
    _stack.sessions.append(session)
    try:
        yield session
    finally:
        _stack.sessions.pop()
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
