"""Training tasks in the daemon: they run while no request does."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torchrelay.errors import ModelError, OperationTimeoutError, PeerLostError, from_json
from torchrelay.switching import _messages
from torchrelay.switching._factory import Factory
from torchrelay.switching._fleet import Fleet, WorkerProcess
from torchrelay.switching._queue import new_id
from torchrelay.switching._training import read_state

__all__ = ["Task", "TrainingHandle", "TrainingScheduler"]

_MAX_LOSSES = 2  # workers that may die at the same step


@dataclass(eq=False)
class Task:
    """A training task. Owned by the daemon, but for `future`."""

    name: str
    factory: Factory
    steps: int
    save_every: int
    future: Future[dict[str, Any]] = field(default_factory=Future)
    step: int = 0
    preemptions: int = 0
    losses: int = 0  # workers that died since the task last advanced
    cancelled: bool = False
    state: list[int] = field(default_factory=list)  # the descriptor of the last state, if any

    def advance(self, step: int, state: list[int]) -> None:
        """Replace the state by a newer one."""
        self.drop_state()
        self.state, self.step, self.losses = state, step, 0

    def drop_state(self) -> None:
        """Close the state. Idempotent."""
        while self.state:
            os.close(self.state.pop())

    def finish(self) -> None:
        """Set the future to the state, which is closed."""
        try:
            self.future.set_result(read_state(self.state[0])["task"])
        except Exception as error:
            self.future.set_exception(error)
        self.drop_state()

    def fail(self, error: Exception) -> None:
        """Set the future to `error`, unless it is done, and close the state."""
        if not self.future.done():
            self.future.set_exception(error)
        self.drop_state()

    def cancel(self) -> None:
        self.future.cancel()
        self.drop_state()


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


class TrainingScheduler:
    """Runs one task at a time, in the order of submission. The loop's lock protects it."""

    def __init__(self, fleet: Fleet) -> None:
        self.waiting: deque[Task] = deque()
        self.running: Task | None = None
        self.worker: WorkerProcess | None = None  # of the running task
        self._is_pausing = False
        self._fleet = fleet

    def submit(self, task: Task) -> None:
        self.waiting.append(task)

    def cancel(self, task: Task) -> None:
        """Stop the task: at once if it waits, at the end of its step if it runs."""
        task.cancelled = True
        if task in self.waiting:
            self.waiting.remove(task)
            task.cancel()
        elif self.running is task:
            self.pause()

    def start_next(self) -> None:
        """Start or resume a task on an idle worker, if there are both."""
        if self.running is not None or not self.waiting:
            return
        worker = self._fleet.idle("")
        if worker is None:
            return
        task = self.waiting.popleft()
        worker.request_id = request_id = new_id()
        self.running, self.worker, self._is_pausing = task, worker, False
        train = _messages.Train(request_id, task.name, task.factory, task.steps, task.save_every)
        worker.send(train, task.state)

    def pause(self) -> None:
        """Pause the running task at the end of its step."""
        if self.worker is not None and not self._is_pausing:
            self._is_pausing = True
            self.worker.send(_messages.Stop(self.worker.request_id))

    def on_message(self, message: object, descriptors: list[int]) -> None:
        """Handle a message of the running task's worker."""
        task, worker = self.running, self.worker
        assert task is not None and worker is not None
        if isinstance(message, _messages.Saved):
            task.advance(message.step, descriptors)
            if not message.ended:
                return
        worker.release()
        self.running = self.worker = None
        if isinstance(message, _messages.Failed):
            task.fail(from_json(message.error, ModelError))
        elif isinstance(message, _messages.Saved) and message.ended == "done":
            task.finish()
        elif task.cancelled:
            task.cancel()
        else:
            task.preemptions += 1
            self.waiting.appendleft(task)

    def on_lost(self, worker: WorkerProcess, reason: str) -> None:
        """Resume from the last state after a worker died; fail the task if this repeats."""
        task = self.running
        if task is None or self.worker is not worker:
            return
        self.running = self.worker = None
        task.losses += 1
        if task.cancelled:
            task.cancel()
        elif task.losses > _MAX_LOSSES:
            text = f"worker {worker.pid} {reason} while it ran task {task.name!r}"
            task.fail(PeerLostError(f"{text}, {task.losses} times at the same step"))
        else:
            self.waiting.appendleft(task)

    def fail_all(self, error: Exception) -> None:
        """End every task with `error`."""
        for task in [*([self.running] if self.running else []), *self.waiting]:
            task.fail(error)
        self.waiting.clear()
