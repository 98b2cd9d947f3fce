"""Scheduling of training tasks: they run while no request does."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torchrelay.errors import PeerLostError, TorchRelayError
from torchrelay.switching._channel import Message, error_of
from torchrelay.switching._fleet import Fleet
from torchrelay.switching._process import WorkerProcess
from torchrelay.switching._tasks import Task

__all__ = ["TrainingScheduler"]

_MAX_LOSSES = 2  # workers that may die at the same step


@dataclass
class _Running:
    """The running task, and whether its worker was asked to pause it."""

    task: Task
    worker: WorkerProcess
    pausing: bool = False


class TrainingScheduler:
    """Runs one task at a time, in the order of submission. Owned by the loop's thread."""

    def __init__(self, fleet: Fleet) -> None:
        self.waiting: deque[Task] = deque()
        self._running: _Running | None = None
        self._fleet = fleet

    @property
    def running(self) -> Task | None:
        return self._running.task if self._running is not None else None

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

    def start_next(self, request_id: int) -> None:
        """Start or resume a task on an idle worker, if there are both."""
        worker = self._fleet.idle("")
        if self._running is not None or not self.waiting or worker is None:
            return
        task = self.waiting.popleft()
        worker.request_id = request_id
        self._running = _Running(task, worker)
        worker.send({"op": "train", "id": request_id, **task.to_json()}, task.state)

    def pause(self) -> None:
        """Pause the running task at the end of its step."""
        if self._running is not None and not self._running.pausing:
            self._running.pausing = True
            worker = self._running.worker
            worker.send({"op": "pause", "id": worker.request_id})

    def on_message(self, worker: WorkerProcess, message: Message, descriptors: list[int]) -> bool:
        """Handle a message of the training worker; return False if it is another worker's."""
        if self._running is None or worker is not self._running.worker:
            return False
        task = self._running.task
        if message["op"] in ("saved", "paused", "trained"):
            task.advance(message["step"], *descriptors)
        if message["op"] != "saved":
            worker.release()
            self._running = None
            self._ended(task, message)
        return True

    def on_lost(self, worker: WorkerProcess, reason: str) -> None:
        """Resume from the last state after a worker died; fail the task if this repeats."""
        if self._running is None or self._running.worker is not worker:
            return
        task, self._running = self._running.task, None
        task.losses += 1
        if task.cancelled:
            task.cancel()
        elif task.losses > _MAX_LOSSES:
            text = f"worker {worker.pid} {reason} while it ran task {task.name!r}"
            task.fail(PeerLostError(f"{text}, for the {task.losses}. time"))
        else:
            self.waiting.appendleft(task)

    def fail_all(self, error: TorchRelayError) -> None:
        """End every task with `error`."""
        running = [self._running.task] if self._running is not None else []
        for task in [*running, *self.waiting]:
            task.fail(error)
        self.waiting.clear()

    def _ended(self, task: Task, message: Message) -> None:
        if message["op"] == "trained":
            task.finish()
        elif message["op"] != "paused":
            task.fail(error_of(message))
        elif task.cancelled:
            task.cancel()
        else:
            task.preemptions += 1
            self.waiting.appendleft(task)
