"""Training tasks in the daemon: they run while no request does."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrelay.errors import (
    ArgumentError,
    ModelError,
    NotFoundError,
    StorageError,
    from_json,
)
from torchrelay.switching.daemon._descriptor import Descriptor
from torchrelay.switching.daemon._fleet import Fleet, WorkerProcess
from torchrelay.switching.daemon._queue import new_id
from torchrelay.switching.daemon._reports import wait_reporting
from torchrelay.switching.models._factory import Factory
from torchrelay.switching.worker import _messages
from torchrelay.switching.worker._training import read_state

__all__ = ["TrainingHandle", "TrainingScheduler"]

_COPY_BYTES = 16 << 20
_MAX_LOSSES = 2  # workers that may die at the same step


@dataclass(eq=False)
class TrainingHandle:
    """A training task that runs whenever no request does.

    `step` is the number of steps whose state has been saved, `preemptions` how often requests
    preempted the task.
    """

    name: str
    factory: Factory
    steps: int
    save_every: int
    on_cancel: Callable[[TrainingHandle], object]
    step: int = 0
    preemptions: int = 0
    _future: Future[dict[str, Any]] = field(default_factory=Future, init=False)
    # Of the daemon: the last state, if any; workers lost since then.
    _state: Descriptor | None = field(default=None, init=False)
    _losses: int = field(default=0, init=False)
    _is_cancelled: bool = field(default=False, init=False)

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the last step and return the task's final `state_dict()`.

        Raises:
            ModelError: the task failed.
            OperationTimeoutError: it is not done after `timeout_s`.
            PeerLostError: its worker died again and again at the same step.
        """
        return wait_reporting(
            self._future,
            timeout_s,
            lambda: f"training task {self.name!r}: at step {self.step} of {self.steps}",
        )

    def state(self) -> dict[str, Any] | None:
        """Return the task's last saved `state_dict()`, also after an error; None if there is none:
        see `save_every`.
        """
        saved = self._state
        return None if saved is None else read_state(saved.number)["task"]

    def save(self, file: str | Path) -> None:
        """Write the last saved state, with its step and random states, to `file`, from which
        `Switcher.train(resume=file)` goes on. Also after an error.

        Raises:
            NotFoundError: no state was saved yet.
            StorageError: the file cannot be written.
        """
        saved = self._state
        if saved is None:
            raise NotFoundError(
                f"training task {self.name!r} has saved no state yet: pass save_every to train()"
            )
        path = Path(file)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with (
                open(f"/proc/self/fd/{saved.number}", "rb") as source,
                temporary.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, _COPY_BYTES)
                target.flush()
                os.fsync(target.fileno())
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(f"the state cannot be written to {path}: {error}") from error

    def cancel(self) -> None:
        """Stop the task; :meth:`result` then raises `CancelledError`."""
        self.on_cancel(self)

    def _resume(self, file: str | Path) -> None:
        """Start from the state in `file`."""
        try:
            self._state = Descriptor(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            self.step = int(read_state(self._state.number)["step"])
        except Exception as error:
            raise StorageError(f"{file} is no state of TrainingHandle.save(): {error}") from error
        if not self.step < self.steps:
            raise ArgumentError(f"{file} is of step {self.step}, and steps={self.steps}")

    def _advance(self, step: int, descriptor: int) -> None:
        """Replace the state by a newer one."""
        self._state, self.step, self._losses = Descriptor(descriptor), step, 0

    def _finish(self) -> None:
        """Set the future to the state."""
        try:
            state = self.state()
            assert state is not None
            self._future.set_result(state)
        except Exception as error:
            self._future.set_exception(error)

    def _fail(self, error: Exception) -> None:
        """Set the future to `error`, unless it is done."""
        if not self.done:
            self._future.set_exception(error)


class TrainingScheduler:
    """Runs one task at a time, in the order of submission."""

    activity = "training"

    def __init__(self, fleet: Fleet) -> None:
        self.waiting: deque[TrainingHandle] = deque()
        self.running: TrainingHandle | None = None
        self._worker: WorkerProcess  # of the running task
        self._is_pausing = False
        self._fleet = fleet

    def cancel(self, task: TrainingHandle) -> None:
        """Stop the task: at once if it waits, at the end of its step if it runs."""
        task._is_cancelled = True
        if task in self.waiting:
            self.waiting.remove(task)
            task._fail(CancelledError())
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
        worker.work_for(self)
        self._run_id = new_id()
        self.running, self._worker, self._is_pausing = task, worker, False
        train = _messages.Train(self._run_id, task.name, task.factory, task.steps, task.save_every)
        worker.send(train, [] if task._state is None else [task._state.number])

    def pause(self) -> None:
        """Pause the running task at the end of its step."""
        if self.running is not None and not self._is_pausing:
            self._is_pausing = True
            self._worker.send(_messages.Stop(self._run_id))

    def on_message(self, worker: WorkerProcess, message: object, descriptors: list[int]) -> None:
        """Handle a message of the running task's worker."""
        task = self.running
        assert task is not None
        if isinstance(message, _messages.Saved):
            task._advance(message.step, descriptors[0])
            if not message.ended:
                return
        worker.release()
        self.running = None
        if isinstance(message, _messages.Failed):
            task._fail(from_json(message.error, ModelError))
        elif isinstance(message, _messages.Saved) and message.ended == "done":
            task._finish()
        elif task._is_cancelled:
            task._fail(CancelledError())
        else:
            task.preemptions += 1
            self.waiting.appendleft(task)

    def on_lost(self, worker: WorkerProcess) -> None:
        """Resume from the last state after a worker died; fail the task if this repeats."""
        task, self.running = self.running, None
        assert task is not None
        task._losses += 1
        if task._is_cancelled:
            task._fail(CancelledError())
        elif task._losses > _MAX_LOSSES:
            did = f"ran task {task.name!r} from step {task.step}; tried {task._losses} times"
            task._fail(worker.loss(did))
        else:
            self.waiting.appendleft(task)

    def fail_all(self, error: Exception) -> None:
        """End every task with `error`."""
        if self.running is not None:
            self.waiting.append(self.running)
        while self.waiting:
            self.waiting.pop()._fail(error)
