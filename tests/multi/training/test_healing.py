"""What a new member gets from the others: all kinds of state, and what is refused."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from ranks import free_port
from torchrelay.errors import ArgumentError, ConfigError, UnavailableError, UnsupportedError
from torchrelay.training import AnyPrecisionAdamW, Elastic, _healing
from torchrelay.world import World
from waiting import eventually

if TYPE_CHECKING:
    from ranks import RunProcesses


class Net(nn.Module):
    """Parameters and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.low = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.randn(4, 2).T)
        self.empty = nn.Parameter(torch.empty(0, 4))
        for name, dtype in (("mask", torch.bool), ("small", torch.int8), ("large", torch.int64)):
            self.register_buffer(name, torch.randint(0, 2, (5,)).to(dtype))
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("strided", torch.randn(6, 6)[::2, ::3])

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.first(x))) * self.scale + self.low
        return (y @ self.transposed.T).square().mean()


class Position:
    """A data loader like torchdata's: of its state only the structure is known."""

    def __init__(self) -> None:
        seed = random.randrange(2**70)
        self.state: Any = {
            "seed": seed,
            "epoch": None,
            "workers": [{"worker": 0, "position": seed % 7}, (float(seed), "text", seed % 2 == 0)],
            "ends": [float("inf"), -0.0, 1e-320],
            "nothing": {},
            7: torch.randint(0, 255, (5,), dtype=torch.uint8),
            "array": np.arange(seed % 5 + 1, dtype=np.int16),
        }

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _states() -> tuple[dict[str, Any], Callable[[], None]]:
    """Return states of all kinds, and what trains them for a step."""
    model = Net()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(trained, lr=0.01, amsgrad=True),
        "sgd": torch.optim.SGD(trained, lr=0.01),
        "momentum": torch.optim.SGD(trained, lr=0.01, momentum=0.9),
        "adagrad": torch.optim.Adagrad(trained, lr=0.01),
        "precise": AnyPrecisionAdamW(trained, lr=0.01, use_kahan_summation=True),
        "lbfgs": torch.optim.LBFGS([model.first.weight], lr=0.01, max_iter=2),
    }
    adamw, sgd = optimizers["adamw"], optimizers["sgd"]
    schedulers: dict[str, Any] = {
        "cycle": torch.optim.lr_scheduler.OneCycleLR(adamw, 0.1, total_steps=100),
        "milestones": torch.optim.lr_scheduler.MultiStepLR(optimizers["adagrad"], [2, 2, 3]),
        "sequence": torch.optim.lr_scheduler.SequentialLR(
            sgd,
            [
                torch.optim.lr_scheduler.LinearLR(sgd),
                torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 9),
            ],
            [2],
        ),
    }
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers["momentum"], patience=0)
    scaler, ema = torch.amp.GradScaler("cpu", growth_interval=2), AveragedModel(model)
    clean = torch.amp.GradScaler("cpu", enabled=False)

    def train() -> None:
        x = torch.rand(8, 4) + random.random() + np.random.rand()

        def loss() -> Tensor:
            model.zero_grad()
            value: Tensor = model(x)
            value.backward()
            return value

        value = loss()
        scaler.scale(torch.ones(()))
        scaler.unscale_(adamw)
        scaler.step(adamw)
        scaler.update()
        for name, optimizer in optimizers.items():
            if name == "lbfgs":
                optimizer.step(lambda: float(loss().detach()))
            elif optimizer is not adamw:
                optimizer.step()
        for scheduler in schedulers.values():
            scheduler.step()
        plateau.step(float(value.detach()))
        ema.update_parameters(model)

    position = Position()
    others = {"plateau": plateau, "scaler": scaler, "disabled": clean, "ema": ema, "data": position}
    return {"model": model, **optimizers, **schedulers, **others}, train


def _values(states: dict[str, Any]) -> dict[str, Any]:
    """Return each leaf of the states, with the bits of its tensors."""
    tree = {name: one.state_dict() for name, one in states.items()}

    def bits(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return "array", str(leaf.dtype), leaf.tolist()
        if isinstance(leaf, Tensor):
            data = leaf.contiguous().view(-1).view(torch.uint8).tolist()
            return str(leaf.dtype), [*leaf.shape], data
        return repr(leaf)

    leaves = pytree.tree_flatten_with_path(tree)[0]
    return {pytree.keystr(path): bits(leaf) for path, leaf in leaves}


def _heal(world: World, folder: str, addresses: list[str]) -> Any:
    """Rank 0 founds a job and trains; rank 1 comes later, and has not trained."""
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    np.random.seed(world.rank)
    states, train = _states()
    _healing._LOG_EVERY_S = -1.0
    logging.basicConfig(filename=Path(folder, f"log{world.rank}"), level=logging.INFO)
    go = Path(folder, "go")
    if world.rank == 0:
        for _ in range(4):
            train()
    else:
        eventually(go.exists)
    before = _values(states)
    model = states["model"]
    where = {name: one.data_ptr() for name, one in model.state_dict().items()}
    with Elastic(states, address=addresses[world.rank], peers=",".join(addresses)) as elastic:
        while elastic.group.size() < 2:
            with elastic.step():
                go.touch()
        healed = _values(states)
        train()
        assert model.last.weight is model.first.weight
        assert where == {name: one.data_ptr() for name, one in model.state_dict().items()}
        with elastic.step() as step:
            pass
        assert step.committed
        return before, healed, _values(states)


def test_all_kinds_of_state_heal(run_processes: RunProcesses, tmp_path: Path) -> None:
    """Bit for bit, into the memory of the tensors that the new member has."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    results = run_processes(_heal, 2, folder=str(tmp_path), addresses=addresses)
    assert all(result.ok for result in results), [result.error for result in results]
    (_, first, after), (before, second, and_after) = (result.value for result in results)
    assert second == first
    logged = [tmp_path.joinpath(f"log{rank}").read_text() for rank in range(2)]
    for rank in range(2):
        assert f"rank {rank} has moved 100% of the state" in logged[rank]
        assert "1 members got the state" in logged[rank]
    assert and_after == after
    named = {name for name in first if before.get(name) != first[name]}
    for state in ("model", "adamw", "momentum", "precise", "lbfgs", "cycle", "sequence", "data"):
        assert [name for name in named if name.startswith(f"['{state}']")], state


def _work(elastic: Elastic, model: nn.Module) -> int:
    with elastic.step() as step:
        step.reduce(model)
    return step.size


def _leave_one_of_two(world: World, addresses: list[str]) -> None:
    """Take part in two jobs at once, and leave the first one."""
    model = nn.Linear(2, 2)
    first, second = (
        Elastic({"model": model}, address=own[world.rank], peers=",".join(own))
        for own in (addresses[:2], addresses[2:])
    )
    for elastic in (first, second):
        eventually(lambda: _work(elastic, model) == 2)  # noqa: B023
    first.close()
    first.close()
    with pytest.raises(UnavailableError, match="left the job by close"):
        _work(first, model)
    assert [_work(second, model) for _ in range(3)] == [2] * 3
    second.close()
    assert not dist.is_initialized()


def test_a_process_is_a_member_of_two_jobs(run_processes: RunProcesses) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    results = run_processes(_leave_one_of_two, 2, addresses=addresses)
    assert all(result.ok for result in results), [result.error for result in results]


def _refuse(world: World) -> None:
    store = world.connect(60.0)
    dist.init_process_group("sml", store=store, rank=world.rank, world_size=world.size)
    with pytest.raises(UnsupportedError, match="default process group of 2 ranks"):
        Elastic({"model": nn.Linear(2, 2)}, address="127.0.0.1:0")
    sharded: Any = fully_shard(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="pass replica=GROUP"):
        Elastic({"model": sharded})
    parallel = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="model is a DistributedDataParallel"):
        Elastic({"model": parallel})


def test_several_ranks_that_are_not_said_to_be_a_replica_are_refused(
    run_processes: RunProcesses,
) -> None:
    results = run_processes(_refuse, 2)
    assert all(result.ok for result in results), [result.error for result in results]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("0.0.0.0:0", "no address at which others reach"),
        ("[::]:0", "no address at which others reach"),
        ("127.0.0.1:99999", "99999 is not a port"),
        ("127.0.0.1", "use host:port"),
    ],
)
def test_addresses_at_which_no_member_can_be_are_refused(
    run_processes: RunProcesses, address: str, message: str
) -> None:
    results = run_processes(_listen, 1, address=address, message=message)
    assert all(result.ok for result in results), [result.error for result in results]


def _listen(world: World, address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Elastic({"model": nn.Linear(2, 2)}, address=address, token="secret")


def _wrap(world: World) -> None:
    model = nn.Linear(2, 2)
    with Elastic({"model": model}, address="127.0.0.1:0") as elastic:
        parallel = DistributedDataParallel(model, process_group=elastic.group)
        with (
            pytest.raises(ArgumentError, match="is a DistributedDataParallel"),
            elastic.step() as step,
        ):
            step.reduce(parallel)


def test_a_wrapped_model_is_not_reduced(run_processes: RunProcesses) -> None:
    results = run_processes(_wrap, 1)
    assert all(result.ok for result in results), [result.error for result in results]


class Of:
    def __init__(self, value: Any) -> None:
        self.state_dict = lambda: {"value": value}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, device="meta"), "has no memory"),
        (torch.eye(2).to_sparse(), "has no memory"),
        (b"bytes", "is a bytes, which cannot be sent"),
        ({1, 2}, "is a set, which cannot be sent"),
        (np.float32(1), "is a float32, which cannot be sent"),
    ],
)
def test_what_could_not_be_sent_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"state\['one'\]\['value'\] {message}"):
        Elastic({"one": Of(value)})
