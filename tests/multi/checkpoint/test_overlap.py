"""Saves that copy while training goes on: each checkpoint is that of its step, or there is none."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from memory_jobs import open_job
from torchrelay.checkpoint import Checkpointer, load, save
from torchrelay.errors import ArgumentError
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

WIDTH = 700  # a state of 4 MB and more, which takes longer to copy than a step to begin

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-6, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
}


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 8)
        self.calls = torch.nn.Buffer(torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        result: torch.Tensor = self.last(self.first(x).relu())
        return result


def _job(optimizer: str, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net = _Net()
    if sharded:
        fully_shard(net, mesh=DeviceMesh("cpu", [0, 1]))
    return {"net": net, "optimizer": OPTIMIZERS[optimizer](net.parameters()), "step": 0}


def _values(state: dict[str, Any]) -> list[torch.Tensor]:
    """A copy of all tensors."""
    kept = [*state["optimizer"].state_dict()["state"].values()]
    tensors = [
        *state["net"].state_dict().values(),
        *(one for each in kept for one in each.values()),
    ]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return [one.clone() for one in local if one is not None]


def _backward(state: dict[str, Any]) -> None:
    state["net"](torch.randn(2, WIDTH)).square().sum().backward()


def _train(state: dict[str, Any]) -> None:
    _backward(state)
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def _same(state: dict[str, Any], values: list[torch.Tensor]) -> bool:
    found = _values(state)
    return len(found) == len(values) and all(map(torch.equal, found, values))


class _Program:
    """A random program, and what it must find."""

    def __init__(self, world: World, path: str, optimizer: str, seed: int) -> None:
        self._random, self._where = random.Random(seed), (world, path, [0] * world.size)
        self._optimizer, self._sharded = optimizer, world.size > 1
        self._checkpointer = open_job(*self._where, overlap=True)
        self._state = _job(optimizer, self._sharded)
        self._number = 0
        self._whole: tuple[int | None, list[torch.Tensor]] = (None, [])
        self._open: tuple[int, list[torch.Tensor]] | None = None  # what the last save may copy
        self._is_damaged = False

    def run(self, length: int) -> None:
        calls = [self.train, self.train, self.save, self.save, self.edit, self.buffer, self.load]
        calls += [self.clip, self.wait, self.copied, self.reopen, self.forget_optimizer]
        for call in self._random.choices(calls, k=length):
            call()
        self.reopen()
        self.load()

    def _closed(self, *, stepped: bool = False) -> None:
        """The last save has ended, or fails."""
        if self._open is not None and not self._is_damaged:
            self._whole, self._open = self._open, None
        elif not stepped:
            self._open, self._is_damaged = None, False

    def _call(self, function: Callable[[], object]) -> bool:
        """Call what raises the failure of the last save; whether it did."""
        if not self._is_damaged:
            function()
            self._closed()
            return False
        with pytest.raises(ArgumentError, match=r"net\.first\.bias: it was changed in place"):
            function()
        self._closed()
        return True

    def train(self) -> None:
        _train(self._state)
        self._closed(stepped=True)

    def clip(self) -> None:
        _backward(self._state)
        torch.nn.utils.clip_grad_norm_(self._state["net"].parameters(), 0.1)

    def save(self) -> None:
        self._number += 1
        self._state["step"] = self._number
        values = _values(self._state)
        if not self._call(lambda: self._checkpointer.save(self._state, step=self._number)):
            self._open = (self._number, values)

    def edit(self) -> None:
        with torch.no_grad():
            self._state["net"].first.bias.mul_(1.5)
        self._is_damaged = self._open is not None

    def buffer(self) -> None:
        self._state["net"].calls.add_(7)

    def forget_optimizer(self) -> None:
        """What the last save copies is let go."""
        optimizer = self._state["optimizer"]
        optimizer.load_state_dict(optimizer.state_dict())

    def wait(self) -> None:
        self._call(self._checkpointer.wait)

    def copied(self) -> None:
        self._checkpointer.wait_until_copied()
        self._closed(stepped=True)

    def reopen(self) -> None:
        self._call(self._checkpointer.close)
        self._checkpointer = open_job(*self._where, overlap=True)

    def load(self) -> None:
        self._closed()
        self._state = _job(self._optimizer, self._sharded)
        assert self._checkpointer.load(self._state) == self._whole[0]
        self._number = self._whole[0] or self._number
        if self._whole[0] is not None:
            assert _same(self._state, self._whole[1]), f"step {self._whole[0]} is torn"
            assert self._state["step"] == self._whole[0]

    def close(self) -> None:
        self._checkpointer.close(drop=True)


def _programs(world: World, path: str, optimizer: str) -> None:
    torch.set_num_threads(1)
    for seed in range(4):
        program = _Program(world, f"{path}-{seed}", optimizer, seed)
        program.run(60)
        program.close()


@pytest.mark.parametrize(
    ("optimizer", "size"), [("sgd", 1), ("adamw", 2), ("foreach", 1), ("fused", 1), ("fused", 2)]
)
def test_each_checkpoint_is_that_of_its_step(
    environ: dict[str, str], path: str, run_processes: RunProcesses, optimizer: str, size: int
) -> None:
    ranks = run_processes(_programs, size, environ=environ, path=path, optimizer=optimizer)
    assert all(one.ok for one in ranks), ranks


def _killed(world: World, path: str, moment: str) -> None:
    """Step 2 is saved, and the trainer killed before or after the next step of its optimizer."""
    checkpointer = open_job(world, path, [0, 1], overlap=True, partner=True)
    state = _job("fused", sharded=True)
    for step in (1, 2):
        _train(state)
        state["step"] = step
        checkpointer.save(state, step=step)
        torch.save(_values(state), f"{path}-{world.rank}-{step}")
        if step == 1:
            checkpointer.wait()
    if moment == "copied":
        assert checkpointer._copying is not None
        checkpointer._copying._thread.join()
    if moment == "stepped":
        _train(state)
        world.connect().set(f"stepped{world.rank}", "")
        world.connect().wait([f"stepped{rank}" for rank in range(world.size)])
    os.kill(os.getpid(), signal.SIGKILL)


def _resumed(world: World, path: str, expected: int) -> None:
    checkpointer = open_job(world, path, [0, 1], overlap=True, partner=True)
    state = _job("fused", sharded=True)
    assert checkpointer.load(state) == expected == state["step"]
    assert _same(state, torch.load(f"{path}-{world.rank}-{expected}"))
    _train(state)
    checkpointer.save(state, step=3)
    checkpointer.close(drop=True)


@pytest.mark.parametrize(("moment", "expected"), [("saved", 1), ("copied", 1), ("stepped", 2)])
def test_a_trainer_that_is_killed(
    environ: dict[str, str], path: str, run_processes: RunProcesses, moment: str, expected: int
) -> None:
    run_processes(_killed, 2, environ=environ, path=path, moment=moment)
    ranks = run_processes(_resumed, 2, environ=environ, path=path, expected=expected)
    assert all(one.ok for one in ranks), ranks


@pytest.fixture
def job(environ: dict[str, str], path: str) -> Any:
    """A state that was saved as step 0, and may be copied still; its checkpointer."""
    state = _job("fused", sharded=False)
    _train(state)
    checkpointer = Checkpointer(path, disk_every=None, overlap=True)
    checkpointer.save(state, step=0)
    yield state, checkpointer
    checkpointer._leave()
    checkpointer.close(drop=True)


def _loads(checkpointer: Checkpointer, values: list[torch.Tensor]) -> bool:
    state = _job("fused", sharded=False)
    return checkpointer.load(state) == 0 and _same(state, values)


def test_an_optimizer_that_is_not_in_the_state(job: Any) -> None:
    """Fused ones raise no versions."""
    state, checkpointer = job
    values = _values(state)
    _backward(state)
    torch.optim.SGD(state["net"].parameters(), 1.0, fused=True).step()
    assert _loads(checkpointer, values)


def test_a_step_that_is_skipped(job: Any) -> None:
    state, checkpointer = job
    values, scaler = _values(state), torch.amp.GradScaler("cpu")
    scaler.scale(state["net"](torch.full((2, WIDTH), torch.inf)).sum()).backward()
    scaler.step(state["optimizer"])
    assert _same(state, [state["net"].calls, *values[1:]])
    checkpointer.wait()
    assert _loads(checkpointer, values)


def test_a_load_of_another_checkpoint(job: Any, path: str) -> None:
    """Fills tensors by their addresses, which raises no versions."""
    state, checkpointer = job
    values = _values(state)
    save(_job("fused", sharded=False), f"{path}-other")
    load(state, f"{path}-other", strict=False)
    assert not _same(state, values) and _loads(checkpointer, values)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step(job: Any) -> None:
    state, checkpointer = job
    values = _values(state)
    _backward(state)
    torch.compile(state["optimizer"].step, backend="aot_eager")()
    assert _loads(checkpointer, values)


def test_tensors_that_are_tied_by_their_memory(job: Any) -> None:
    state, checkpointer = job
    checkpointer.wait()
    state["net"].last.tied = torch.nn.Parameter(state["net"].first.weight.data)
    checkpointer.save(state, step=1)
    with torch.no_grad():
        state["net"].last.tied.zero_()
    with pytest.raises(ArgumentError, match=r"first.weight: it was .* wait_until_copied\(\)"):
        checkpointer.wait()
    assert checkpointer.load(_job("fused", sharded=False)) == 0


def test_no_thread_can_be_started(job: Any) -> None:
    state, checkpointer = job
    checkpointer.wait()
    _train(state)
    values, usual = _values(state), threading.stack_size(1 << 47)
    try:
        checkpointer.save(state, step=1)
    finally:
        threading.stack_size(usual)
    _train(state)
    state = _job("fused", sharded=False)
    assert checkpointer.load(state) == 1 and _same(state, values)


def test_nothing_overlaps_without_an_optimizer(job: Any) -> None:
    state, checkpointer = job
    values = _values(state)
    checkpointer.save({**state, "optimizer": state["optimizer"].state_dict()}, step=1)
    assert checkpointer._copying is None
    with torch.no_grad():
        state["net"].first.weight.zero_()
    state["optimizer"] = OPTIMIZERS["fused"](state["net"].parameters())
    assert checkpointer.load(state) == 1 and _same(state, values)
