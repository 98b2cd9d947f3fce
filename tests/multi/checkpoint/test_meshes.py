"""Tensors over meshes that differ from rank to rank, and ties that do: one copy of each block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.checkpoint import async_save, load, save, verify
from torchrelay.checkpoint.engine._background import saver as _async_state
from torchrelay.errors import MismatchError
from torchrelay.world import World


def _start(world: World) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=world.connect(), rank=world.rank, world_size=world.size)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 96)
        self.down = torch.nn.Linear(96, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.register_buffer("steps", torch.tensor(0))


def _parallel(mesh: Any, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model some parameters of which are tensor-parallel, with FSDP2 or DDP over the rest."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model: Any = _Model()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "fsdp":
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.sin(parameter.detach() * 40)
    optimizer.step()
    return model, optimizer


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of this rank's tensors."""
    found = dict(state["model"].state_dict())
    for number, moments in state["optimizer"].state_dict()["state"].items():
        found.update({f"{number}.{name}": value for name, value in moments.items()})
    return {
        key: (value.to_local() if hasattr(value, "to_local") else value).detach().clone()
        for key, value in found.items()
    }


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.timeout(300)
@pytest.mark.processes(4, timeout_s=250)
def test_tensor_parallel_in_part(tmp_path: Path, world: World) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    _start(world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = sum(p.numel() * p.element_size() for p in _Model().parameters())
    for kind in ("fsdp", "ddp"):
        model, optimizer = _parallel(mesh, kind)
        state = {"model": model, "optimizer": optimizer}
        expected = _tensors(state)
        save(state, tmp_path / kind, fsync=False)
        async_save(state, tmp_path / f"{kind}-later").result(200)
        for name in (kind, f"{kind}-later"):
            assert _bytes(tmp_path / name) < 3 * whole + 20_000  # nothing twice
            fresh, its_optimizer = _parallel(mesh, kind)
            with torch.no_grad():
                for parameter in fresh.parameters():
                    parameter.to_local().fill_(7) if hasattr(parameter, "to_local") else None
            its_optimizer.state.clear()
            found = {"model": fresh, "optimizer": its_optimizer}
            assert load(found, tmp_path / name) == ([], [])
            for key, value in _tensors(found).items():
                assert torch.equal(value, expected[key]), key
            for parameter, its in its_optimizer.state.items():
                assert type(its["exp_avg"]) is type(parameter.data)  # sharded as it
    dist.barrier()
    if world.rank == 0:
        plain = _Model()
        load(plain, tmp_path / "fsdp", prefix="model.", no_dist=True)
        verify(tmp_path / "ddp")
    _async_state.close()


@pytest.mark.processes(4)
def test_submeshes(tmp_path: Path, world: World) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    _start(world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(1024.0).reshape(32, 32)
    two = DeviceMesh("cpu", [0, 1])  # ranks 2 and 3 are outside

    def state(value: torch.Tensor) -> dict[str, Any]:
        def cut(mesh: Any, placement: Any) -> Any:
            return distribute_tensor(value.clone(), mesh, [placement], src_data_rank=None)

        made = {
            "tp": cut(mesh["tp"], Shard(0)),
            "dp": cut(mesh["dp"], Shard(1)),
            "copies": cut(mesh["tp"], Replicate()),
        }
        if world.rank < 2:
            made["two"] = cut(two, Shard(0))
        return made

    for way in ("save", "async_save"):
        if way == "save":
            save(state(whole), tmp_path / way)
        else:
            async_save(state(whole), tmp_path / way).result(60)
        dist.barrier()
        assert _bytes(tmp_path / way) < 4 * whole.nbytes + 4000
        found = state(torch.zeros(32, 32))
        load(found, tmp_path / way)
        for key, value in state(whole).items():
            assert torch.equal(found[key].to_local(), value.to_local()), key
        alone = {key: torch.zeros(32, 32) for key in ("tp", "dp", "copies", "two")}
        load(alone, tmp_path / way)
        assert all(torch.equal(value, whole) for value in alone.values())
    _async_state.close()


@pytest.mark.processes(2)
def test_ties_on_one_rank_only(tmp_path: Path, world: World) -> None:
    """As where rank 0 has a real model, whose weights are tied, and others did ``to_empty()``."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    _start(world)
    weight = torch.arange(300.0).reshape(30, 10)
    tied = {"embed": weight, "other": torch.ones(1000), "head": weight}
    apart = {key: value.clone() for key, value in tied.items()}
    save(tied if world.rank == 0 else apart, tmp_path / "one")
    found = {key: torch.zeros_like(value) for key, value in tied.items()}
    load(found, tmp_path / "one")
    assert all(torch.equal(found[key], tied[key]) for key in tied)

    save(tied, tmp_path / "both")
    dist.barrier()
    assert _bytes(tmp_path / "both") < weight.nbytes + 4000 + 2000 < _bytes(tmp_path / "one") + 700

    # A rank without any rows of the tensors does not know that they are tied.
    mesh = init_device_mesh("cpu", (2,))
    row = distribute_tensor(torch.ones(1, 500), mesh, [Shard(0)], src_data_rank=None)
    save({"a": row, "b": row.detach(), "c": torch.ones(2)}, tmp_path / "uneven")
    dist.barrier()
    assert _bytes(tmp_path / "uneven") < row.numel() * 4 + 1500
    both = {"a": torch.zeros(1, 500), "b": torch.zeros(1, 500)}
    load(both, tmp_path / "uneven")
    assert bool(both["a"].all()) and bool(both["b"].all())


@pytest.mark.processes(2)
def test_wrappers_under_dtensors_are_stored_by_shard(world: World, tmp_path: Path) -> None:
    """As torchao's optimizers have them under FSDP2; another layout is refused on all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.two_tensor import TwoTensor

    _start(world)
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()

    def local(tensor: DTensor) -> Any:
        return tensor.to_local()

    def made(start: float, placement: Any) -> DTensor:
        one = torch.arange(6.0).reshape(3, 2) + start + rank * isinstance(placement, Shard)
        return DTensor.from_local(TwoTensor(one, -one), mesh, [placement], run_check=False)

    for name, placement, other in (("s", Shard(0), Replicate()), ("r", Replicate(), Shard(0))):
        saved, found = made(1.0, placement), made(9.0, placement)
        save({"x": saved}, tmp_path / name)
        assert load({"x": found}, tmp_path / name) == ([], [])
        assert torch.equal(local(found).a, local(saved).a)
        assert torch.equal(local(found).b, local(saved).b)
        with pytest.raises(MismatchError, match="another layout"):
            load({"x": made(9.0, other)}, tmp_path / name)


class _Old(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)


class _New(_Old):
    """Has a weight ten times as large."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata["version"] < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.processes(2)
def test_versions_of_sharded_modules(world: World, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    from torchrelay.deferred import deferred_init

    _start(world)
    torch.manual_seed(0)
    old: Any = torch.nn.Sequential(_Old(), torch.nn.BatchNorm1d(6))
    weight = old[0].weight.detach().clone()
    fully_shard(old)
    save({"model": old}, tmp_path / "c")
    for make in (lambda kind: kind(), deferred_init):
        new: Any = make(lambda: torch.nn.Sequential(_New(), torch.nn.BatchNorm1d(6)))
        fully_shard(new)
        assert load({"model": new}, tmp_path / "c") == ([], [])
        assert torch.equal(new[0].weight.full_tensor(), weight * 10)

    # Each rank has a stage of a pipeline; only one has a module with a version of its own.
    kinds = (torch.nn.BatchNorm1d, torch.nn.LayerNorm)
    stage = torch.nn.ModuleDict({str(world.rank): kinds[world.rank](6)})
    save({"model": stage}, tmp_path / "stages")
    whole = torch.nn.ModuleDict({str(rank): kind(6) for rank, kind in enumerate(kinds)})
    assert load({"model": whole}, tmp_path / "stages") == ([], [])
