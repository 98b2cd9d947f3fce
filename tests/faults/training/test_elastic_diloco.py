"""DiLoCo over the members of an elastic job: they are lost in each of its phases, and come late."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import free_port
from torchrelay.errors import PeerLostError
from torchrelay.training import DiLoCo, Elastic, ElasticLoader
from torchrelay.world import World
from waiting import eventually

if TYPE_CHECKING:
    from ranks import RunProcesses

EVERY, BATCH, STEPS = 4, 32, 16
# By rank and version: what happens to it, in place of or after which call.
FAULTS = {
    (0, 3): ("fails", "synchronize"),
    (0, 5): ("fails", "agreement"),
    (0, 7): ("fails", "sum"),
    (1, 9): ("dies", "sum"),
    (2, 11): ("dies", "vote"),
    (0, 13): ("fails", "agreement"),
}


class Job:
    def __init__(
        self, rank: int, folder: Path, addresses: list[str], parts: int, **options: Any
    ) -> None:
        self.rank, self.folder = rank, folder
        torch.manual_seed(rank)
        layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)
        self.model = nn.Sequential(*layers)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.diloco = DiLoCo(
            [self.model] if parts == 1 else [layers[0], layers[2]],
            self.inner,
            outer,
            EVERY,
            process_group=lambda: self.elastic.group,
            **options,
        )
        self.are_equal = not options
        self.faults, self.fault, self.is_broken = dict(FAULTS), ("", ""), False
        data = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
        self.loader = ElasticLoader(torch.utils.data.TensorDataset(data), BATCH)
        self.elastic = Elastic(
            {"loader": self.loader},
            {"model": self.model, "inner": self.inner, "diloco": self.diloco},
            address=addresses[rank],
            peers=",".join(addresses),
            timeout_s=20.0,
        )

    def step(self) -> None:
        with self.elastic.step() as step:
            fault = self.faults.pop((self.rank, step.number), ("", ""))
            self.fault, self.is_broken = fault if fault[1] == "synchronize" else ("", ""), False
            with step.guarded():
                self.diloco.synchronize()
            self.fault = fault
            (batch,) = self.loader.take(step)
            for part in batch.tensor_split(EVERY):
                self.inner.zero_grad()
                self.model(part).square().mean().backward()
                with step.guarded():
                    self.inner.step()
            if self.fault[1] == "vote":
                self.die()
        if step.committed:
            self.note(step=step.number, digest=self.digest())

    def note(self, **what: Any) -> None:
        with open(self.folder / f"notes{self.rank}", "a") as file:
            file.write(json.dumps(what | {"rank": self.rank}) + "\n")

    def check(self) -> None:
        if self.is_broken:
            raise PeerLostError("rank 9 was lost", (9,))

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def digest(self) -> str:
        """What is equal on all members."""
        state = self.diloco.state_dict()
        momentum = state["outer_optimizer"]["state"]
        tensors = [one for f in state["fragments"] for one in f["outer"].values()]
        tensors += [one["momentum_buffer"] for one in momentum.values() if one]
        if self.are_equal:
            tensors += [one.detach() for one in self.model.parameters()]
        found = hashlib.sha256(repr([f["completed"] for f in state["fragments"]]).encode())
        for one in tensors:
            found.update(one.numpy().tobytes())
        return found.hexdigest()

    def break_calls(self) -> None:
        """Let the fault of this step happen in the calls of :class:`DiLoCo`."""
        all_reduce, job = dist.all_reduce, self

        class Failing:
            def __init__(self, work: Any) -> None:
                self.work = work

            def wait(self) -> None:
                self.work.wait()
                job.elastic.group.abort()
                job.is_broken = True
                job.check()

        def faulty(
            tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            job.check()
            what, phase = job.fault
            if phase not in (["sum"] if async_op else ["agreement", "synchronize"]):
                return all_reduce(tensor, op, group, async_op)
            job.fault = "", ""
            job.note(fault=phase)
            if what == "dies":
                job.die()
            work = Failing(all_reduce(tensor, op, group, async_op=True))
            if not async_op:
                work.wait()
            return work

        dist.all_reduce = faulty


def _train(world: World, folder: str, addresses: list[str], **options: Any) -> float:
    """Rank 3 comes late."""
    go = Path(folder, "go")
    if world.rank == 3:
        eventually(go.exists)
    job = Job(world.rank, Path(folder), addresses, **options)
    job.break_calls()
    Path(folder, f"listens{world.rank}").touch()
    eventually(lambda: len([*Path(folder).glob("listens*")]) >= 3)
    while job.elastic.version < STEPS:
        job.step()
        if job.elastic.version == 2:
            go.touch()
    return sum(float(one.detach().square().sum()) for one in job.model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"parts": 1},
        {"parts": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
    ],
    ids=["whole", "streaming"],
)
def test_outer_states_stay_equal_and_heal(
    run_processes: RunProcesses, tmp_path: Path, options: dict[str, Any]
) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    results = run_processes(_train, 4, folder=str(tmp_path), addresses=addresses, **options)
    ended = [result.exitcode for result in results]
    assert ended == [0, -signal.SIGKILL, -signal.SIGKILL, 0], [one.error for one in results]
    lines = [line for file in tmp_path.glob("notes*") for line in file.read_text().splitlines()]
    notes = [json.loads(line) for line in lines]
    assert sorted(note["fault"] for note in notes if "fault" in note) == sorted(
        phase for _, phase in FAULTS.values() if phase != "vote"
    )
    steps: dict[int, dict[int, str]] = {number: {} for number in range(STEPS)}
    for note in notes:
        if "step" in note:
            steps[note["step"]][note["rank"]] = note["digest"]
    for number, noted in steps.items():
        assert len({*noted.values()}) == 1, f"step {number}: {noted}"
    assert len({one for noted in steps.values() for one in noted.values()}) == STEPS
    assert {*steps[STEPS - 1]} == {0, 3}
