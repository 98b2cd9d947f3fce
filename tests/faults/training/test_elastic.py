"""Members of an elastic job that are killed, frozen, cut off, late or wrong: the others go on."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import namespaces
import torchrelay
from ranks import free_port
from torchrelay.errors import ArgumentError, MismatchError, OperationTimeoutError
from torchrelay.training import Elastic, ElasticLoader, Step
from torchrelay.world import World
from waiting import eventually

if TYPE_CHECKING:
    from ranks import RunProcesses

SAMPLES, BATCH = 40, 12


class Job:
    """A member's part of a job, and a folder in which all note what they commit."""

    def __init__(
        self,
        rank: int,
        folder: str,
        addresses: list[str],
        width: int = 4,
        batch: int = BATCH,
        **settings: Any,
    ) -> None:
        self.rank, self.folder = rank, Path(folder)
        torch.manual_seed(100 + rank)
        random.seed(rank)
        np.random.seed(rank)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        generator = torch.Generator().manual_seed(0)
        self.data = torch.utils.data.TensorDataset(
            torch.arange(SAMPLES), torch.randn(SAMPLES, 4, generator=generator)
        )
        self.loader = ElasticLoader(self.data, batch)
        chosen: dict[str, Any] = {"address": addresses[rank], "peers": ",".join(addresses)}
        self.elastic = Elastic(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "loader": self.loader,
            },
            **{**chosen, "timeout_s": 20.0, **settings},
        )

    def step(self, during: Callable[[], None] = lambda: None) -> Step:
        with self.elastic.step() as step:
            batch = self.loader.take(step)
            taken = [] if batch is None else batch[0].tolist()
            self.optimizer.zero_grad()
            if batch is not None:
                self.model(batch[1]).square().mean().backward()
            during()
            step.reduce(self.model)
            step.on_commit(lambda: self.note({"step": step.number, "taken": taken}))
        if step.committed:
            self.optimizer.step()
            self.scheduler.step()
        return step

    def run(self, versions: int, during: Callable[[], None] = lambda: None) -> str:
        while self.elastic.version < versions:
            self.step(during)
        return self.digest()

    def finish(self) -> str:
        """Take some steps more, as many as all others."""
        own, target = self.folder / f"target{self.rank}", self.folder / "target"
        own.write_text(str(self.elastic.version + 5))
        with suppress(FileExistsError):
            os.link(own, target)
        return self.run(int(target.read_text()))

    def note(self, what: dict[str, Any]) -> None:
        line = json.dumps(what | {"rank": self.rank, "members": self.elastic.members}) + "\n"
        with open(self.folder / f"notes{self.rank}", "a") as file:
            file.write(line)

    def digest(self) -> str:
        """All of the state: what is equal here is equal in every bit."""
        states = [
            one.state_dict() for one in (self.model, self.optimizer, self.scheduler, self.loader)
        ]
        found = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, dict):
                value = [*value.items()]
            if isinstance(value, (list, tuple)):
                for one in value:
                    add(one)
            elif isinstance(value, torch.Tensor):
                found.update(value.numpy().tobytes())
            else:
                found.update(repr(value).encode())

        add(states)
        return found.hexdigest()


def notes(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for file in folder.glob("notes*") for line in file.read_text().splitlines()
    ]


def check_samples(folder: Path, versions: int) -> None:
    """Each committed step has taken its samples once, whoever was there; each epoch all of them."""
    steps: dict[int, list[int]] = {number: [] for number in range(versions)}
    for note in notes(folder):
        steps[note["step"]] += note["taken"]
    epoch: list[int] = []
    for number in range(versions):
        assert len(steps[number]) == len({*steps[number]}), f"step {number}: {steps[number]}"
        epoch += steps[number]
        if len(epoch) == SAMPLES:
            assert sorted(epoch) == list(range(SAMPLES))
            epoch = []
    assert len(epoch) == versions % 4 * BATCH


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def addresses() -> list[str]:
    return [f"127.0.0.1:{free_port()}" for _ in range(5)]


def _die_in_turn(world: World, folder: str, addresses: list[str], hosts: str) -> str:
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    job = Job(world.rank, folder, addresses[: world.size], min_size=1)
    eventually(lambda: (job.step(), job.elastic.group.size() == world.size)[1])
    start = job.elastic.version
    Path(folder, f"all{world.rank}").write_text(str(start))
    eventually(lambda: (job.step(), len(list(Path(folder).glob("all*"))) == world.size)[1])

    def during() -> None:
        if job.elastic.group.rank() == 0 and job.elastic.group.size() > 1:
            die()

    return job.run(job.elastic.version + 12, during)


def test_all_but_one_die_one_after_the_other(
    run_processes: RunProcesses, tmp_path: Path, addresses: list[str]
) -> None:
    """The first one first, each within a step."""
    results = run_processes(
        _die_in_turn, 4, folder=str(tmp_path), addresses=addresses, hosts="abab"
    )
    ended = [result.exitcode for result in results]
    assert ended.count(-signal.SIGKILL) == 3, [result.error for result in results]
    assert ended.count(0) == 1, [result.error for result in results]
    check_samples(tmp_path, 1 + max(note["step"] for note in notes(tmp_path)))


def _freeze(world: World, folder: str, addresses: list[str]) -> str:
    job = Job(world.rank, folder, addresses[: world.size], timeout_s=2.5)
    pid = Path(folder, "frozen")
    eventually(lambda: (job.step(), job.elastic.group.size() == world.size)[1])

    def freeze_once() -> None:
        if world.rank == 1 and not pid.exists():
            pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    thawed = Path(folder, "thawed")
    while not (thawed.exists() and job.elastic.group.size() == 3):
        job.step(freeze_once)
        if world.rank == 0 and pid.exists() and job.elastic.group.size() == 2:
            thawed.touch()
            os.kill(int(pid.read_text()), signal.SIGCONT)
    return job.finish()


def test_one_that_is_frozen_is_left_out_and_comes_back(
    run_processes: RunProcesses, tmp_path: Path, addresses: list[str]
) -> None:
    results = run_processes(_freeze, 3, folder=str(tmp_path), addresses=addresses)
    assert all(result.ok for result in results), [result.error for result in results]
    assert len({result.value for result in results}) == 1
    check_samples(tmp_path, 1 + max(note["step"] for note in notes(tmp_path)))


def _join(world: World, folder: str, addresses: list[str]) -> str:
    """Rank 2 comes late; first with another model, another token and another version."""
    go, members = Path(folder, "go"), addresses[: world.size]
    if world.rank == 2:
        eventually(go.exists)
        for wrong, message in (
            ({"width": 5}, "the model is 4 tensors"),
            ({"batch": 6}, "loader: 40 samples in batches of 6, shuffled; optimizer: AdamW"),
            ({"token": "of another job"}, "the token or key of its job"),
            ({"min_size": 3}, "min_size is 3 there"),
        ):
            job = Job(2, folder, members, **wrong)
            with pytest.raises(MismatchError, match=message):
                job.step()
            job.elastic.close()
        torchrelay.__version__, version = "0.0.1", torchrelay.__version__
        job = Job(2, folder, members)
        torchrelay.__version__ = version
        with pytest.raises(MismatchError, match=r"the version of torchrelay is 0\.0\.1 there"):
            job.step()
        job.elastic.close()
    job = Job(world.rank, folder, members)
    while job.elastic.group.size() < world.size:
        job.step()
        if world.rank == 0 and job.elastic.group.size() == 2 and job.elastic.version > 4:
            go.touch()
    return job.run(20)


def test_one_that_is_late_has_all_states_and_wrong_ones_are_refused(
    run_processes: RunProcesses, tmp_path: Path, addresses: list[str]
) -> None:
    results = run_processes(_join, 3, folder=str(tmp_path), addresses=addresses)
    assert all(result.ok for result in results), [result.error for result in results]
    assert len({result.value for result in results}) == 1


def _raise_in_steps(world: World, folder: str, addresses: list[str]) -> Any:
    """Rank 1 raises in the block or, as Ctrl-C does, in the vote, and takes further steps."""
    job = Job(world.rank, folder, addresses[: world.size])
    eventually(lambda: (job.step(), job.elastic.group.size() == world.size)[1])
    start, raised = job.elastic.version, []

    def take(during: Callable[[], None]) -> None:
        with job.elastic.step() as step:
            job.loader.take(step)
            step.reduce(job.model)
            during()

    def fail() -> None:
        raise IndexError("a bad batch")

    def interrupt() -> None:
        def collective(call: Any) -> None:
            call(job.elastic.group).wait()
            raise KeyboardInterrupt

        job.elastic._agreement.collective = collective  # type: ignore[method-assign]

    for after, during in ((3, fail), (6, interrupt)):
        while job.elastic.version < start + after:
            job.step()
        if world.rank == 1:
            version = job.elastic.version
            with pytest.raises((IndexError, KeyboardInterrupt)):
                take(during)
            raised.append(job.elastic.version - version)
            job.elastic._agreement.__dict__.pop("collective", None)
    return job.finish(), raised, job.elastic.group.size()


def test_one_that_raises_in_a_step_can_take_the_next(
    run_processes: RunProcesses, tmp_path: Path, addresses: list[str]
) -> None:
    results = run_processes(_raise_in_steps, 2, folder=str(tmp_path), addresses=addresses)
    assert all(result.ok for result in results), [result.error for result in results]
    (first, none, size), (second, raised, _) = (result.value for result in results)
    assert (first, size, none, raised) == (second, 2, [], [0, 0])


def _normalise(world: World, folder: str, addresses: list[str]) -> Any:
    """Rank 2 comes late, to members whose batches differ. Returns the statistics of all."""
    go, members = Path(folder, "go"), addresses[: world.size]
    if world.rank == 2:
        eventually(go.exists)
    torch.manual_seed(world.rank)
    model: Any = nn.BatchNorm1d(3)
    model.register_buffer("own", torch.full((3,), float(world.rank)))
    taken, means = torch.zeros(3), list[Any]()
    settings: dict[str, Any] = {"address": addresses[world.rank], "peers": ",".join(members)}
    with Elastic({"model": model}, timeout_s=20.0, **settings) as elastic:
        while elastic.group.size() < 3 or len(means) < 5:
            former = model.running_mean.clone()
            with elastic.step() as step:
                x = torch.randn(4, 3)
                model(x)
                if step.size == 3:
                    taken = x.mean(0)
                step.reduce(model)
            if step.size == 2 and elastic.version > 4:
                go.touch()
            if step.size == 3:
                means.append((former.tolist(), taken.tolist(), model.running_mean.tolist()))
        with pytest.raises(ArgumentError, match="belong into the block"):
            step.reduce(model)
        state = {name: value.tolist() for name, value in model.state_dict().items()}
        return means[:5], state


def test_statistics_of_normalisation_are_averaged_and_other_buffers_heal(
    run_processes: RunProcesses, tmp_path: Path, addresses: list[str]
) -> None:
    results = run_processes(_normalise, 3, folder=str(tmp_path), addresses=addresses)
    assert all(result.ok for result in results), [result.error for result in results]
    every = [result.value for result in results]
    assert every[0][1] == every[1][1] == every[2][1]
    for step in range(5):
        former, _, after = (torch.tensor(one) for one in every[0][0][step])
        taken = torch.stack([torch.tensor(means[step][1]) for means, _ in every]).mean(0)
        torch.testing.assert_close(after, 0.9 * former + 0.1 * taken)


def _be_cut(world: World, folder: str, hosts: Any, tie_breaker: str) -> tuple[str, str]:
    """Step until the others are back, or are known to be gone."""
    namespaces.enter(hosts.pids[world.rank])
    os.environ["TORCHRELAY_TRANSPORT_INTERFACE"] = f"10.78.{world.rank}.2"
    os.environ["TORCHRELAY_HOST_ID"] = str(world.rank)
    job = Job(
        world.rank,
        folder,
        [f"10.78.{host}.2:29500" for host in range(world.size)],
        timeout_s=1.5,
        wait_s=5.0 if tie_breaker else 60.0,
        token="secret",
        tie_breaker=tie_breaker,
    )
    while job.elastic.group.size() < world.size:
        job.step()
    Path(folder, f"all{world.rank}").touch()
    what, size = ("cut", 2) if tie_breaker else ("mended", 4)
    try:
        while not (Path(folder, what).exists() and job.elastic.group.size() == size):
            job.step()
        return f"{size} go on", job.finish()
    except OperationTimeoutError as error:
        return "stopped", str(error)


@pytest.mark.skipif(bool(namespaces.missing("nft")), reason=namespaces.missing("nft"))
@pytest.mark.parametrize("tie_breaker", ["10.78.3.2:29500", ""])
def test_of_two_halves_only_that_of_the_tie_breaker_goes_on(
    tie_breaker: str, run_processes: RunProcesses, tmp_path: Path
) -> None:
    """Without one, neither does, until the network is whole again."""
    with namespaces.star(4) as hosts:
        hosts.route()

        def cut_and_mend() -> None:
            eventually(lambda: len(list(tmp_path.glob("all*"))) == 4)
            for here in (0, 1):
                for there in (2, 3):
                    hosts.cut(here, there)
            (tmp_path / "cut").touch()
            if not tie_breaker:
                steps = -1
                while steps < (steps := len(notes(tmp_path))):
                    time.sleep(4.0)
                hosts.mend()
                (tmp_path / "mended").touch()

        thread = threading.Thread(target=cut_and_mend)
        thread.start()
        results = run_processes(
            _be_cut, 4, folder=str(tmp_path), hosts=hosts, tie_breaker=tie_breaker
        )
        thread.join()
    assert all(result.ok for result in results), [result.error for result in results]
    said = [result.value[0] for result in results]
    if tie_breaker:
        assert "which is no majority" in results[0].value[1]
    assert said == (["stopped"] * 2 + ["2 go on"] * 2 if tie_breaker else ["4 go on"] * 4)
    assert len({result.value[1] for result in results[2:]}) == 1
    # Those that stop may have committed a step that those that go on repeat.
    noted = [note for note in notes(tmp_path) if note["rank"] > 1 or not tie_breaker]
    for step in {note["step"] for note in noted}:
        taken = [one for note in noted if note["step"] == step for one in note["taken"]]
        assert len(taken) == len({*taken})
