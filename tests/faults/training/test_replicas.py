"""Replicas of several ranks, sharded by FSDP2, on one host or two: one of them loses a rank and
leaves, and one comes back.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import namespaces
from ranks import free_port
from torchrelay.errors import PeerLostError
from torchrelay.training import DiLoCo, Elastic, ElasticLoader
from torchrelay.world import World
from waiting import eventually

if TYPE_CHECKING:
    from ranks import RankResult, RunProcesses

RANKS, INNER_STEPS = 2, 2
SAMPLES = torch.utils.data.TensorDataset(
    torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def trained_alone(steps: int) -> dict[str, torch.Tensor]:
    """What one process that has all samples computes."""
    model, loader = model_of(0), ElasticLoader(SAMPLES, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number in range(steps):
        (x,) = SAMPLES[[*loader.samples(number)]]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


class Part:
    """A rank of a replica. Where there are hosts, each has one rank of each replica."""

    def __init__(self, world: World, folder: str, addresses: list[str], hosts: Any) -> None:
        self.replica, rank = divmod(world.rank, RANKS)
        self.folder = Path(folder)
        if hosts:
            host = (min(self.replica, 1) + rank) % 2
            namespaces.enter(hosts.pids[host])
            for name in ("TORCHRELAY_TRANSPORT_INTERFACE", "GLOO_SOCKET_IFNAME"):
                os.environ[name] = "eth0"
            os.environ["TORCHRELAY_HOST_ID"] = str(host)
        store = dist.FileStore(f"{folder}/store{self.replica}", RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        self.model = model_of(self.replica // 2)  # a late one is wrong until it is healed
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.loader = ElasticLoader(SAMPLES, 8)
        shared, local = self.states()
        self.elastic = Elastic(
            shared,
            local,
            replica=dist.group.WORLD,
            address=addresses[min(self.replica, 1)],
            peers=",".join(addresses),
            token="secret",
            timeout_s=80.0,  # nobody is silent
        )

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return those that are equal on all members, and others."""
        states = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        return states, {}

    def step(self, during: Any = lambda: None) -> None:
        with self.elastic.step() as step:
            (x,) = self.loader.take(step)
            self.optimizer.zero_grad()
            self.model(x.tensor_split(RANKS)[dist.get_rank()]).square().mean().backward()
            during()
            step.reduce(self.model)
        if step.committed:
            self.optimizer.step()

    def tensors(self) -> list[Any]:
        """Return what is equal on all members."""
        return [*self.model.parameters(), *self.optimizer.state_dict()["state"].values()]

    def bits(self) -> str:
        """Of this rank's part of them."""
        found = hashlib.sha256()
        for one in self.tensors():
            for value in one.values() if isinstance(one, dict) else [one]:
                local = value.to_local() if isinstance(value, DTensor) else value
                found.update(local.detach().numpy().tobytes())
        return found.hexdigest()

    def parameters(self) -> dict[str, Any]:
        return {
            name: value.full_tensor().tolist() for name, value in self.model.state_dict().items()
        }


class LocalPart(Part):
    """A rank of a replica that takes inner steps on its own."""

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.diloco = DiLoCo(
            [self.model],
            self.optimizer,
            outer,
            INNER_STEPS,
            process_group=lambda: self.elastic.group,
        )
        local = {"model": self.model, "inner": self.optimizer, "diloco": self.diloco}
        return {"loader": self.loader}, local

    def step(self, during: Any = lambda: None) -> None:
        with self.elastic.step() as step:
            with step.guarded():
                self.diloco.synchronize()
            (x,) = self.loader.take(step)
            parts = x.tensor_split(RANKS)[dist.get_rank()].tensor_split(INNER_STEPS)
            for index, part in enumerate(parts):
                self.optimizer.zero_grad()
                self.model(part).square().mean().backward()
                if index == INNER_STEPS - 1:
                    during()  # after which the other rank of its replica synchronises
                with step.guarded():
                    self.optimizer.step()

    def tensors(self) -> list[Any]:
        outer = self.diloco.state_dict()
        (fragment,) = outer["fragments"]
        momentum = outer["outer_optimizer"]["state"].values()
        return [*self.model.parameters(), *fragment["outer"].values(), *momentum]


def _lose_a_rank(
    world: World, folder: str, addresses: list[str], hosts: Any = None, is_local: bool = False
) -> Any:
    """Rank 1 of replica 1 dies in a step; replica 2 comes to its address when it has left."""
    lost = Path(folder, "lost")
    if world.rank >= 2 * RANKS:
        eventually(lost.exists)
    part = (LocalPart if is_local else Part)(world, folder, addresses, hosts)

    group = part.elastic.group
    while group.size() < 2:  # the first replica waits for the second, the third for the first
        part.step()
    if part.replica == 1:
        for _ in range(3):
            part.step()

        def die() -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(PeerLostError, match="one of its ranks is lost"):
            part.step(die)
        return "left"
    while part.replica == 0 and group.size() == 2:
        part.step()
    lost.touch()
    if part.replica == 0:
        eventually(Path(folder, "store2").exists)
    while group.size() < 2:
        part.step()
    for _ in range(5):
        part.step()
    return part.bits(), part.elastic.version, part.parameters()


def test_a_replica_that_loses_a_rank_leaves_and_another_gets_its_state_shard_by_shard(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    check(run_processes(_lose_a_rank, 3 * RANKS, folder=str(tmp_path), addresses=addresses))


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_the_ranks_of_a_replica_are_on_two_hosts(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    with namespaces.star(2) as hosts:
        hosts.route()
        addresses = [f"10.78.{host}.2:29500" for host in range(2)]
        check(
            run_processes(
                _lose_a_rank, 3 * RANKS, folder=str(tmp_path), addresses=addresses, hosts=hosts
            )
        )


def test_replicas_synchronise_by_diloco(run_processes: RunProcesses, tmp_path: Path) -> None:
    """Of the replica that goes on, one rank has applied what the other could not complete."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    results = run_processes(
        _lose_a_rank, 3 * RANKS, folder=str(tmp_path), addresses=addresses, is_local=True
    )
    check(results, is_local=True)


def check(results: list[RankResult], is_local: bool = False) -> None:
    first, second = results[:RANKS], results[2 * RANKS :]
    assert all(result.ok for result in (*first, *second)), [result.error for result in results]
    assert results[2].value == "left", results[2].error
    assert results[3].exitcode == -signal.SIGKILL
    assert [result.value for result in first] == [result.value for result in second]
    assert first[0].value[0] != first[1].value[0]
    _, steps, parameters = first[0].value
    if is_local:
        return
    for name, expected in trained_alone(steps).items():
        torch.testing.assert_close(torch.tensor(parameters[name]), expected)
