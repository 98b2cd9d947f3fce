"""Copies of a state that go on while the trainer computes, until an optimizer changes what they
read.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchrelay.errors import ArgumentError

__all__ = ["OverlappedCopy", "finish_copies"]

_pending: set[OverlappedCopy] = set()
_finishing = threading.RLock()


class OverlappedCopy:
    """A copy in a thread of its own. It is finished by whoever is about to change what it reads.

    Only then are versions compared, because torch raises them at the end of an in-place change,
    when the thread may have read half of it.

    Args:
        watched: tensors that nobody changes in place until the copy is finished, and their keys.
        tasks: called in the thread, one after another.
        confirm: called when the copy is finished, if nothing has changed.
    """

    def __init__(
        self,
        watched: Sequence[tuple[str, torch.Tensor]],
        tasks: Sequence[Callable[[], Any]],
        confirm: Callable[[], Any],
    ) -> None:
        self._tasks, self._confirm = tasks, confirm
        self._watched = [(key, tensor, tensor._version) for key, tensor in watched]
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="torchrelay-checkpoint")

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # there are too many, or the interpreter is ending
            self._run()
        _pending.add(self)

    def _run(self) -> None:
        try:
            for task in self._tasks:
                task()
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Wait until the copy has ended, and confirm it. Failures are raised by :meth:`result`."""
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        with _finishing:
            if self not in _pending:
                return
            _pending.discard(self)
            watched, self._watched = self._watched, []
            changed = [key for key, tensor, version in watched if tensor._version != version]
            if changed and self._error is None:
                self._error = ArgumentError(
                    f"{changed[0]}: it was changed in place, not by a step of an optimizer, while "
                    "the last save could still be copying it (overlap=True), which has therefore "
                    "failed; call wait_until_copied() before such a change"
                )
            if self._error is None:
                try:
                    self._confirm()
                except Exception as error:
                    self._error = error

    def result(self) -> None:
        """Finish the copy.

        Raises:
            ArgumentError: what it copied was changed in place meanwhile.
            TorchRelayError: as the tasks or ``confirm``.
        """
        self.finish()
        if self._error is not None:
            raise self._error


def finish_copies(*_: Any) -> None:
    """Finish all copies of this process: before a step of any optimizer, whose hook it is, and
    before other changes of this package.
    """
    for one in [*_pending]:
        one.finish()


atexit.register(finish_copies)
os.register_at_fork(after_in_child=_pending.clear)
