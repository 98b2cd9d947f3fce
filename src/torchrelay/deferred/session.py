"""Which fake or deferred contexts this thread is in, and the generators they watch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay import _torch
from torchrelay.deferred import positions
from torchrelay.deferred.graph import Node
from torchrelay.deferred.hooks import hooks
from torchrelay.deferred.positions import Origin, Position, Watch
from torchrelay.errors import UnsupportedError

__all__ = ["Session", "current", "enter"]


class Session:
    """One ``fake_mode`` or ``deferred_init`` of this thread.

    Args:
        deferred: operations are recorded.
        pretend: whether devices that are absent are pretended; None: yes, where they are absent.
    """

    def __init__(self, deferred: bool, pretend: bool | None = None) -> None:
        self.deferred = deferred
        self.pretend = pretend
        self._watches: dict[Any, Watch] = {}

    def draw(
        self, node: Node, generator: torch.Generator | None, device: torch.device, words: int | None
    ) -> None:
        """Gives ``node`` its place in the sequence of the generator it would draw from."""
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
            found = self._watches[key] = positions.acquire(generator)
        return found

    def close(self, end_state: Callable[[Position], torch.Tensor] | None) -> None:
        """Ends the watches. ``end_state`` gives the state for a position; None: back to the state at entry."""
        try:
            for key, watch in self._watches.items():
                if positions.release(watch):
                    stand_in = isinstance(key, torch.device) and key.type != watch.generator.device.type
                    _settle(watch, None if stand_in else end_state)
        finally:
            self._watches.clear()


def _settle(watch: Watch, end_state: Callable[[Position], torch.Tensor] | None) -> None:
    state = watch.entry
    try:
        if end_state is not None:
            state = end_state(watch.position())
    finally:
        watch.generator.set_state(state)
        watch.forget()


class _Stack(threading.local):
    def __init__(self) -> None:
        self.sessions: list[Session] = []


_stack = _Stack()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, also those without a fake argument. One a thread, however deep sessions nest."""

    # Lets calls for absent devices through torch's argument parsing, as they are not going to be touched.
    _mode_key = _torch.fake_mode_key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return hooks.dispatch(func, args, kwargs or {})


def current() -> Session | None:
    """The innermost session of this thread."""
    sessions = _stack.sessions
    return sessions[-1] if sessions else None


@contextmanager
def enter(session: Session) -> Iterator[Session]:
    """Makes ``session`` the innermost of this thread. Closing it is the caller's."""
    mode: _Mode | None = None
    if not _stack.sessions:
        if _torch.fake_mode_active():
            raise UnsupportedError(
                "A torch.export or torch.compile fake mode is active here; leave it before making fake tensors."
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


def _recording() -> bool:
    session = current()
    return session is not None and session.deferred


hooks.recording = _recording
