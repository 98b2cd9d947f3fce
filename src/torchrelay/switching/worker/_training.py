"""Training tasks that are preempted at a step boundary and resume bit for bit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from torchrelay import _native
from torchrelay._helper import Channel
from torchrelay._random import random_state, restore_random, seed_random
from torchrelay.errors import ArgumentError, ModelError, describe
from torchrelay.switching.worker._messages import Saved, Train

__all__ = ["TrainingTask", "read_state", "run"]


class TrainingTask(Protocol):
    """Protocol of a training task, which its factory returns.

    Between steps, everything that later steps depend on must be in :meth:`state_dict`. The random
    states of torch, numpy and `random` are kept besides, so that dropout and shuffling resume where
    they were.
    """

    def step(self, index: int) -> object:
        """Run step `index`, counted from 0; the returned value is ignored."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, as `torch.save` writes and
        `torch.load(weights_only=True)` reads, or NumPy's arrays and numbers.

        What cannot be read back fails the task after its first step.
        """

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Restore a state that :meth:`state_dict` returned, perhaps in another process."""


def run(
    train: Train, descriptors: list[int], channel: Channel, was_stopped: Callable[[], bool]
) -> None:
    """Run a task in a worker until it is done or, between two steps, `was_stopped`."""
    # A process that builds a task must not differ from one that never stopped.
    task = train.factory.build()
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(task, method, None)):
            raise ArgumentError(
                f"{train.factory.reference} returned a {type(task).__name__} without {method}()"
            )
    index = 0
    if descriptors:
        saved = read_state(descriptors[0])
        os.close(descriptors[0])
        task.load_state_dict(saved["task"])
        restore_random(saved["random"])
        index = int(saved["step"])
    else:
        seed_random(train.factory.seed)
    written = first = index
    while index < train.steps:
        try:
            task.step(index)
        except Exception as error:
            raise ModelError(f"step {index} of {train.name} failed: {describe(error)}") from error
        index += 1
        if train.save_every and index - written >= train.save_every:
            _send_state(channel, Saved(index, ended=""), train.name, task)
            written = index
        elif index == first + 1:  # else all steps might be lost
            os.close(_write_state(train.name, task, index))
        # Checked after a step, so a task makes at least one, however often it is preempted.
        if was_stopped():
            break
    ended = "done" if index >= train.steps else "paused"
    _send_state(channel, Saved(index, ended), train.name, task)


def read_state(descriptor: int) -> dict[str, Any]:
    """Return the state in the file behind `descriptor`, which the caller closes; its tensors view
    the file, and are copied where they are changed.

    Raises:
        Exception: what `torch.load` raises.
    """
    with torch.serialization.safe_globals(_numpy_types()):
        state: dict[str, Any] = torch.load(
            f"/proc/self/fd/{descriptor}", weights_only=True, mmap=True
        )
    return state


@functools.cache
def _numpy_types() -> list[Any]:
    """Return what pickles of NumPy's arrays and numbers call."""
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}
    made = [np.ones(1).__reduce__()[0], np.float64(1).__reduce__()[0]]
    return [np.ndarray, np.dtype, *made, *dtypes]


def _send_state(channel: Channel, saved: Saved, name: str, task: TrainingTask) -> None:
    """Send the state in an anonymous file, so that it arrives whole or not at all."""
    descriptor = _write_state(name, task, saved.step)
    try:
        channel.send(saved, [descriptor])
    finally:
        os.close(descriptor)


def _write_state(name: str, task: TrainingTask, step: int) -> int:
    """Return the descriptor of a file with the state, which can be read back.

    Raises:
        ModelError: it cannot.
    """
    descriptor = _native.anonymous_file("torchrelay-training")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            torch.save({"task": task.state_dict(), "random": random_state(), "step": step}, file)
        read_state(descriptor)
    except Exception as error:
        os.close(descriptor)
        reason = describe(error).strip().partition("\n")[0]
        raise ModelError(
            f"the state of {name} after step {step} cannot be saved and read back: "
            f"{reason}; return tensors, numbers, strings, and lists, dicts "
            "and sets of them from state_dict()"
        ) from error
    return descriptor
