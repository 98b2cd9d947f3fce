"""What a trainer keeps between asynchronous saves: plans, staging memory, and the process that
writes from it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from torchrelay import _native, _telemetry
from torchrelay._helper import HelperProcess, module_command
from torchrelay.buffers import Segment
from torchrelay.checkpoint._types import Sizes
from torchrelay.checkpoint.engine._engine import Save
from torchrelay.checkpoint.engine._writer_process import WriteJob
from torchrelay.checkpoint.plan._inventory import Planner
from torchrelay.checkpoint.plan._plan import Plan
from torchrelay.checkpoint.state._tensors import address_of, plain
from torchrelay.checkpoint.storage._contract import split
from torchrelay.errors import (
    ArgumentError,
    OperationTimeoutError,
    PeerLostError,
    StorageError,
    from_json,
)

__all__ = ["SaveHandle", "Saver", "Staging", "saver"]

_logger = logging.getLogger("torchrelay.checkpoint")
_SMALL_BYTES = 256 << 10  # of a copy that is not worth several threads


class SaveHandle:
    """A save in progress. If the handle is dropped, the next save raises its error."""

    def __init__(
        self, save: Save, job: WriteJob, helper: HelperProcess, ended: Counter[bool]
    ) -> None:
        self.path = job.path
        self._ended = ended  # how many saves have ended, by whether they failed
        self._save, self._save_id, self._rank = save, job.save_id, job.rank
        self._helper = helper
        self._origin = _native.Origin()
        self._lock, self._is_waiting = threading.RLock(), False
        self._done = threading.Event()
        self._error: Exception | None = None
        self._raised = False
        self._is_left = False

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not. Does not block."""
        return self._wait(0.0)

    def result(self, timeout_s: float | None = None) -> str:
        """Wait until the checkpoint is committed by all ranks; return its path.

        Raises:
            ArgumentError: another process has begun the save, and forked this one; or this thread
                is waiting for it already, as where a signal interrupts it.
            OperationTimeoutError: it is not within ``timeout_s``; it goes on.
            PeerLostError: the writer process, or another rank's, was killed. The checkpoint is
                discarded. Or this process has left the writer to itself, as it does when it exits.
            StorageError: it could not be written, here or on another rank.
        """
        if not self._wait(timeout_s):
            raise OperationTimeoutError(
                f"{self.path}: the save has not ended within {timeout_s:g} s; it goes on"
            )
        if self._error is not None:
            self._raised = True
            raise self._error
        return self.path

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait for the result; return whether it has arrived."""
        if self._done.is_set():
            return True
        if self._origin.is_forked:
            raise ArgumentError(
                f"{self.path}: process {self._origin.pid} started the save; only it can wait for it"
            )
        begun = time.monotonic()
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            return False  # another thread waits, too
        was_waiting, self._is_waiting = self._is_waiting, True
        try:
            if self._done.is_set():
                return True
            if was_waiting:
                if timeout_s == 0:
                    return False
                raise ArgumentError(
                    f"{self.path}: this thread is waiting for the save already, and a signal has "
                    "interrupted it; wait, or start the next save, after the handler has returned"
                )
            left_s = timeout_s and max(0.0, timeout_s - (time.monotonic() - begun))
            try:
                received = self._helper.channel.receive(left_s)
            except PeerLostError:
                self._error = self._lost()
            else:
                if received is None:
                    return False
                failure, _ = received
                self._error = None if failure is None else from_json(failure)
            self._ended[self._error is not None] += 1
            if self._error is None:
                _logger.info("%s is committed", self.path)
            else:
                _logger.error("an asynchronous save has failed: %s", self._error)
            self._done.set()
            return True
        finally:
            self._is_waiting = was_waiting
            self._lock.release()

    def _lost(self) -> PeerLostError | None:
        """Return the error for a channel that has ended, None if the save was committed all the
        same; kill the process unless it was left.
        """
        unknown = f"'torchrelay checkpoint ls {split(self.path)[0]}' lists it once it is committed"
        if self._is_left:
            return PeerLostError(
                f"{self.path}: the writer process was left before it reported the end of the save; "
                f"{unknown}"
            )
        reason = self._helper.exit_reason()
        self._helper.kill()  # if it has only closed its end
        is_committed = None
        with suppress(StorageError):
            is_committed = self._save.is_committed(self._save_id)
        what = f"{self.path}: rank {self._rank}: the writer process has died (it {reason})"
        if is_committed:
            _logger.warning("%s; the checkpoint is committed", what)
            return None
        end = unknown if is_committed is None else "the checkpoint is discarded by the next save"
        return PeerLostError(f"{what}; {end}", ranks=(self._rank,))

    def _leave(self) -> None:
        """End the channel and all waiting; the process goes on with the save."""
        self._is_left = True
        self._helper.channel.shut_down()
        self._wait(None)


class Staging:
    """A shared segment that is reused from save to save, and replaced when a save needs more.

    It is page-locked for copies from CUDA tensors, which then run at the rate of the link.
    """

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self.is_new = False  # until the writer process has the segment
        self._locked: torch.Tensor | None = None  # over all of the segment, if it is page-locked

    @property
    def fd(self) -> int:
        assert self._segment is not None
        return self._segment.fd

    def copy(self, tensors: Sequence[torch.Tensor], starts: Sizes, sizes: Sizes) -> None:
        """Copy tensors of ``sizes`` bytes to ``starts``. Blocks until they may change."""
        addresses = np.array([*map(address_of, tensors)], np.uint64)
        devices = {
            tensors[i].device for i in np.flatnonzero(addresses == 0).tolist() if tensors[i].is_cuda
        }
        end = int((starts + sizes).max(initial=0))
        self.reserve(end, locked=bool(devices))
        if self._segment is None:
            return  # there are no bytes
        small = (addresses != 0) & (sizes <= _SMALL_BYTES)
        whole = self._segment.tensor((self._segment.size_bytes,), torch.uint8)
        targets = starts[small] + np.uint64(whole.data_ptr())
        _native.copy_memory(targets, addresses[small], sizes[small])
        with torch.no_grad():
            for i in np.flatnonzero(~small).tolist():
                tensor = plain(tensors[i])
                target = self._segment.tensor(tensor.shape, tensor.dtype, int(starts[i]))
                target.copy_(tensor, non_blocking=tensor.is_cuda)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def copier(
        self, tensors: Sequence[torch.Tensor], starts: Sizes, sizes: Sizes
    ) -> Callable[[], None]:
        """Return what copies tensors that are contiguous in host memory to ``starts``, in any
        thread and without the GIL. The caller keeps them, and the segment, until then.
        """
        assert self._segment is not None
        target = self._segment.tensor((self._segment.size_bytes,), torch.uint8).data_ptr()
        addresses = np.array([*map(address_of, tensors)], np.uint64)
        return partial(_native.copy_memory, starts + np.uint64(target), addresses, sizes)

    def reserve(self, size_bytes: int, *, locked: bool) -> None:
        """Ensure that the segment has ``size_bytes``."""
        if size_bytes > 0 and (self._segment is None or self._segment.size_bytes < size_bytes):
            self.close()  # before the new one is made, so that there are never two
            self._segment = Segment.create(size_bytes, "torchrelay-checkpoint")
            self.is_new = True
        if locked and self._locked is None and self._segment is not None:
            memory = self._segment.tensor((self._segment.size_bytes,), torch.uint8)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if code:
                _logger.warning(
                    "the copy for asynchronous saves, %d bytes, cannot be page-locked (CUDA error "
                    "%d); saves are right, but stall longer",
                    memory.nbytes,
                    code,
                )
            else:
                self._locked = memory

    def close(self) -> None:
        """Release the memory."""
        locked, self._locked = self._locked, None
        if locked is not None:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(locked.data_ptr())
        self._segment = None


class Saver:
    """What this process keeps from save to save: plans, the writer process, which runs one save at
    a time, and the staging memory that both map.
    """

    def __init__(self) -> None:
        self.planner = Planner()
        self._lock, self._is_starting = threading.RLock(), False
        self.helper: HelperProcess | None = None
        self.staging = Staging()
        self.last: SaveHandle | None = None
        self.ended: Counter[bool] = Counter()  # how many saves have, by whether they failed
        self._sent: Plan | None = None  # what the process has

    def _reset(self) -> None:
        self.helper, self.staging, self.last, self._sent = None, Staging(), None, None

    @contextmanager
    def turn(self, path: str, *, waits: bool) -> Iterator[None]:
        """Let no other thread start a save. First waits for the previous save, and raises its error
        unless its handle already has.

        Raises:
            ArgumentError: this thread is starting one already, as where a signal interrupts it; or
                another one is, and this one does not wait.
        """
        lock = self._lock
        has_lock = lock.acquire(blocking=waits)
        if not has_lock or self._is_starting:
            if has_lock:
                lock.release()
            raise ArgumentError(
                f"{path}: another async_save() has not returned in this thread, or in another one, "
                "for which several ranks do not wait, as they could block each other; let one "
                "thread start one save at a time"
            )
        self._is_starting = True
        try:
            if self.last is not None and not self.last._raised:
                self.last.result()
            self.last = None  # not before: until then the process reads the staging memory
            yield
        finally:
            self._is_starting = False
            lock.release()

    def raise_failure(self) -> None:
        """Raise the error of the last save if it has ended with one that its handle has not raised.
        Does not block.
        """
        last = self.last
        if last is not None and not last._raised and last.done():
            last.result()

    def samples(self) -> Iterator[_telemetry.MetricSample]:
        """Yield how many asynchronous saves of this process have ended, and how."""
        if self.last is not None:
            self.last.done()  # learns of what has ended
        for failed, outcome in ((False, "committed"), (True, "failed")):
            meaning = f"Asynchronous saves that have {'failed' if failed else 'been committed'}"
            name = f"checkpoint_saves_{outcome}"
            yield _telemetry.MetricSample(name, meaning, "counter", self.ended[failed], {})

    def start(self) -> HelperProcess:
        """Start the process, unless it runs."""
        if self.helper is not None:
            self.helper.wait(0)
            if self.helper.exit_code is not None:
                self.close()
        if self.helper is None:
            # new session: Ctrl-C is for the trainer; what is staged is still written
            command = module_command("torchrelay.checkpoint.engine._writer_process")
            self.helper = HelperProcess(command, new_session=True)
        return self.helper

    def submit(self, save: Save, job: WriteJob, plan: Plan, fds: Sequence[int]) -> SaveHandle:
        """Send a job, duplicates of the descriptors ``fds``, and what the process lacks."""
        assert self.helper is not None
        if plan is not self._sent:
            job = replace(job, plan=plan)
        if self.staging.is_new:
            job, fds = replace(job, new_staging=True), (self.staging.fd, *fds)
        handle = SaveHandle(save, job, self.helper, self.ended)
        try:
            self.helper.channel.send(job, fds)
        except PeerLostError:
            self.helper.kill()  # if it has not died: the handle finds its end closed
        self.last, self._sent, self.staging.is_new = handle, plan, False
        return handle

    def close(self) -> None:
        """Let the process finish its current job and end."""
        helper, staging, last = self.helper, self.staging, self.last
        self._reset()
        if helper is not None:
            if last is not None:
                last._leave()
            helper.channel.shut_down()  # also if a forked child has it open
            helper.channel.close()
            helper.wait(None)
            staging.close()

    def forget(self) -> None:
        """In a forked child: the process is the parent's."""
        if self.helper is not None:
            self.helper.abandon()
        self._lock, self._is_starting = threading.RLock(), False  # a thread that had it is not here
        self._reset()


saver = Saver()
atexit.register(saver.close)
os.register_at_fork(after_in_child=saver.forget)
_telemetry.publish(saver.samples)
