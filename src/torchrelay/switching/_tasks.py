"""Training tasks in the daemon, and their handles for callers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torchrelay.errors import OperationTimeoutError, TorchRelayError
from torchrelay.switching._factory import Factory
from torchrelay.switching._training import read_state

__all__ = ["Task", "TrainingHandle"]


@dataclass
class Task:
    """A training task. Owned by the daemon's thread, but for `future`."""

    name: str
    factory: Factory
    steps: int
    save_every: int
    future: Future[dict[str, Any]] = field(default_factory=Future)
    step: int = 0
    preemptions: int = 0
    losses: int = 0  # workers that died since the task last got on
    cancelled: bool = False
    _state: int = -1

    @property
    def state(self) -> list[int]:
        """The file descriptor of the last state, if any."""
        return [self._state] if self._state >= 0 else []

    def advance(self, step: int, descriptor: int) -> None:
        """Replace the state by a newer one, and close the old one."""
        self.close()
        self._state, self.step, self.losses = descriptor, step, 0

    def finish(self) -> None:
        """Read the state, set the future to it, and close it."""
        try:
            self.future.set_result(read_state(self._state)["task"])
        except Exception as error:
            self.future.set_exception(error)
        self.close()

    def fail(self, error: TorchRelayError) -> None:
        """Set the future to `error`, unless it is done, and close the state."""
        if not self.future.done():
            self.future.set_exception(error)
        self.close()

    def cancel(self) -> None:
        """Cancel the future and close the state."""
        self.future.cancel()
        self.close()

    def to_json(self) -> dict[str, Any]:
        """Return what a worker needs besides the state."""
        return {
            "task": self.name,
            "factory": self.factory.reference,
            "kwargs": self.factory.kwargs,
            "seed": self.factory.seed,
            "steps": self.steps,
            "save_every": self.save_every,
        }

    def close(self) -> None:
        if self._state >= 0:
            with contextlib.suppress(OSError):
                os.close(self._state)
            self._state = -1


class TrainingHandle:
    """A training task that runs whenever no request does."""

    def __init__(self, task: Task, cancel: Callable[[Task], None]) -> None:
        self._task = task
        self._cancel = cancel

    @property
    def name(self) -> str:
        return self._task.name

    @property
    def step(self) -> int:
        """The number of steps whose state has been saved."""
        return self._task.step

    @property
    def preemptions(self) -> int:
        """How often requests preempted the task."""
        return self._task.preemptions

    @property
    def done(self) -> bool:
        return self._task.future.done()

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the last step and return the task's final `state_dict()`.

        Raises:
            ModelError: the task failed.
            OperationTimeoutError: it is not done after `timeout_s`.
            PeerLostError: its worker died again and again at the same step.
        """
        try:
            return self._task.future.result(timeout_s)
        except TimeoutError as error:
            if self._task.future.done():
                raise
            raise OperationTimeoutError(
                f"training task {self.name!r} is at step {self.step} of {self._task.steps} after "
                f"{timeout_s} s"
            ) from error

    def cancel(self) -> None:
        """Stop the task; :meth:`result` then raises `CancelledError`."""
        self._cancel(self._task)
