"""State dicts and checkpoints of distributed modules: over ``sml`` as over Gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.world import World

# PyTorch warns of its own deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore")


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))


def wrapped(kind: str, seed: int = 0) -> nn.Module:
    module = plain(seed)
    if kind == "fsdp1":
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "fsdp2":
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return module
    return nn.parallel.DistributedDataParallel(module)


def trained(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def tensors(state: object) -> list[torch.Tensor]:
    """All tensors of a nested state dict, whole, in order."""
    if isinstance(state, torch.Tensor):
        whole = state.full_tensor() if hasattr(state, "full_tensor") else state
        return [whole.detach().clone()]
    if isinstance(state, dict):
        return [tensor for key in sorted(state, key=str) for tensor in tensors(state[key])]
    return []


def broadcast_from_rank_0(kind: str, rank: int) -> list[torch.Tensor]:
    """Rank 0 has the whole state of another module; all ranks load it."""
    source = wrapped(kind, seed=5)
    whole = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(source, trained(source), options=whole)
    expected = tensors(model) + tensors(optimizer)  # what is set may be changed
    target = wrapped(kind)
    target_optimizer = trained(target)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target, model if rank == 0 else {}, options=options)
    set_optimizer_state_dict(
        target, target_optimizer, optimizer if rank == 0 else {}, options=options
    )
    loaded = get_state_dict(target, target_optimizer, options=whole)
    found = tensors(loaded[0]) + tensors(loaded[1])
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    return found


def fsdp1_optimizer(folder: Path) -> list[torch.Tensor]:
    module = wrapped("fsdp1")
    optimizer = trained(module)
    found = tensors(FullyShardedDataParallel.optim_state_dict(module, optimizer))
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": module.state_dict(),
            "optim": FullyShardedDataParallel.optim_state_dict(module, optimizer),
        }
        dcp.save(state, checkpoint_id=folder)
        read = dcp.optimizer.load_sharded_optimizer_state_dict(
            state["model"],
            "optim",
            dcp.FileSystemReader(folder),
        )
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(module, optimizer, read["optim"])
        optimizer.load_state_dict(loaded)
    again = tensors(FullyShardedDataParallel.optim_state_dict(module, optimizer))
    assert len(found) > 4 and all(map(torch.equal, found, again))
    return found


def checkpoints(folder: Path) -> list[torch.Tensor]:
    """An asynchronous save, read into a module on the meta device."""
    module = wrapped("fsdp2", seed=3)
    saved = tensors(module.state_dict())
    dcp.async_save({"model": module.state_dict()}, checkpoint_id=folder).result()  # type: ignore[union-attr]
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    fully_shard(empty, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {"model": empty.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    loaded = tensors(state["model"])
    assert len(saved) == 4 and all(map(torch.equal, saved, loaded))
    return loaded


@pytest.mark.processes(2, timeout_s=300)
def test_state_dicts_are_those_of_gloo(world: World, tmp_path: Path) -> None:
    store = world.connect(60)
    results = {}
    for backend in ("gloo", "sml"):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(backend, store),
            rank=world.rank,
            world_size=world.size,
        )
        results[backend] = fsdp1_optimizer(tmp_path / f"{backend}-optim") + checkpoints(
            tmp_path / backend
        )
        for kind in ("fsdp1", "fsdp2", "ddp"):
            results[backend] += broadcast_from_rank_0(kind, world.rank)
        dist.barrier()
        dist.destroy_process_group()
    assert len(results["sml"]) == len(results["gloo"]) > 50
    assert all(map(torch.equal, results["sml"], results["gloo"]))
