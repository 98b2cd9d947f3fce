"""What several ranks save in one layout loads into any other, bit for bit, through save/load and
through DCP.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchrelay.errors import CorruptionError, MismatchError
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def _values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Different bits in every element, as far as the dtype has them."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.float64) % 251 - 125
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    if dtype.is_complex:
        return torch.complex(numbers, -2 * numbers).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _start(world: World, backend: str = "gloo") -> None:
    import torch.distributed as dist

    if backend == "sml":
        import torchrelay.aggregation  # noqa: F401
    dist.init_process_group(backend, store=world.connect(), rank=world.rank, world_size=world.size)


def _sharded(tensor: torch.Tensor, mesh: Any, placements: Any) -> Any:
    """A DTensor that takes its part of ``tensor``, which every rank has."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)


def _full(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _state(mesh: Any, layout: str) -> dict[str, Any]:
    """Every dtype under one layout; sizes that no number of ranks here divides."""
    from torch.distributed.tensor import Replicate, Shard

    placements: dict[str, Any] = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "replicated": [Replicate()],
        "plain": None,
    }
    chosen = placements[layout]
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        whole = _values(dtype, 7, 11, 3)
        state[str(dtype)] = whole if chosen is None else _sharded(whole, mesh, chosen)
    strided = _values(torch.float32, 6, 10).t()
    tied = _values(torch.float32, 5, 5)
    state["nested"] = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "list": [strided, {"lr": 0.1}],
    }
    state["tied"], state["tied too"] = tied, tied
    state["values"] = (1, None, True, "text", [2.5, float("nan")], {"a": (), 3: 4})
    return state


def _blank(state: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if isinstance(state, dict):
        return {key: _blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_blank(value) for value in state]
    if isinstance(state, DTensor):
        blank: Any = state.clone()
        blank.to_local().view(torch.uint8).fill_(7) if blank.to_local().numel() else None
        return blank
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def _assert_same(found: Any, expected: Any, key: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            _assert_same(found[name], value, f"{key}.{name}")
    elif isinstance(expected, torch.Tensor):
        assert _bits(_local(found)) == _bits(_local(expected)), key
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other, key)
    else:
        assert repr(found) == repr(expected), key  # nan equals itself


@pytest.mark.processes(2)
def test_two_ranks_save_in_every_layout(tmp_path: Path, world: World) -> None:
    """Saved through our save and through DCP, read back by the other; tied and replicated tensors
    once.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    from torchrelay.checkpoint import Reader, Writer, load, save, verify

    _start(world)
    mesh = init_device_mesh("cpu", (2,))
    for layout in ("rows", "columns", "replicated", "plain"):
        state = _state(mesh, layout)
        save(state, tmp_path / f"save-{layout}")
        dcp.save(state, storage_writer=Writer(tmp_path / f"dcp-{layout}"))
        through_dcp, through_load = _blank(state), _blank(state)
        dcp.load(through_dcp, storage_reader=Reader(tmp_path / f"save-{layout}"))
        load(through_load, tmp_path / f"dcp-{layout}")
        _assert_same(through_dcp, state)
        _assert_same(through_load, state)
        verify(tmp_path / f"save-{layout}")
        verify(tmp_path / f"dcp-{layout}")
        logical = sum(
            t.numel() * t.element_size() for t in state.values() if isinstance(t, torch.Tensor)
        )
        stored = sum(f.stat().st_size for f in (tmp_path / f"save-{layout}").glob("*.safetensors"))
        assert stored < logical + 16_000  # headers; nothing twice
    _check_interleaved_rows(world, mesh, tmp_path)
    _check_sharded_tensors(world, mesh, tmp_path)
    sizes = [f.stat().st_size for f in (tmp_path / "save-plain").glob("*.safetensors")]
    assert len(sizes) == 2 and min(sizes) > 0.3 * sum(sizes)  # both ranks write what both have
    _check_one_rank_alone(world, tmp_path)


def _check_one_rank_alone(world: World, tmp_path: Path) -> None:
    """A rank saves and loads by itself, as a server does inside a job, while the others do
    something else.
    """
    import torch.distributed as dist

    from torchrelay.checkpoint import async_save, load, save
    from torchrelay.errors import ArgumentError

    if world.rank == 1:
        state = {"w": torch.arange(5.0)}
        save(state, tmp_path / "alone", no_dist=True)
        async_save(state, tmp_path / "later", no_dist=True).result(60)
        for name in ("alone", "later"):
            found = {"w": torch.zeros(5)}
            load(found, tmp_path / name, no_dist=True)
            assert torch.equal(found["w"], state["w"])
        with pytest.raises(ArgumentError, match="not both"):
            load(found, tmp_path / "alone", group=dist.group.WORLD, no_dist=True)


def _check_sharded_tensors(world: World, mesh: Any, tmp_path: Path) -> None:
    """The predecessor of DTensor is saved and loaded like it, and one as the other."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.tensor import Shard

    from torchrelay.checkpoint import load, save

    whole = _values(torch.float32, 10, 6)
    rows = whole[5 * world.rank :][:5]
    place = ShardMetadata([5 * world.rank, 0], [5, 6], f"rank:{world.rank}/cpu")
    sharded = init_from_local_shards([LocalShard(rows.clone(), place)], 10, 6)
    save({"w": sharded}, tmp_path / "sharded")
    (local,) = sharded.local_shards()
    local.tensor.zero_()
    load({"w": sharded}, tmp_path / "sharded")
    assert torch.equal(local.tensor, rows)
    columns = _sharded(torch.zeros(10, 6), mesh, [Shard(1)])
    load({"w": columns}, tmp_path / "sharded")
    assert torch.equal(columns.to_local(), whole.chunk(2, 1)[world.rank])


@pytest.mark.processes(2)
def test_checkpoints_that_dcp_wrote_on_two_ranks(tmp_path: Path, world: World) -> None:
    """In every layout, read into every layout, by load and through DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    from torchrelay.checkpoint import Reader, load

    _start(world)
    mesh = init_device_mesh("cpu", (2,))
    for saved in ("rows", "columns", "replicated", "plain"):
        dcp.save(_state(mesh, saved), checkpoint_id=tmp_path / saved)
        for layout in ("rows", "columns", "replicated", "plain"):
            expected = _state(mesh, layout)
            through_load, through_dcp = _blank(expected), _blank(expected)
            load(through_load, tmp_path / saved)
            _assert_same(through_load, expected)
            dcp.load(through_dcp, storage_reader=Reader(tmp_path / saved))
            _assert_same(through_dcp, expected)


@pytest.mark.processes(2)
def test_safetensors_files_that_dcp_wrote_on_two_ranks(tmp_path: Path, world: World) -> None:
    """Each rank's shards are in a file of its own; without one of them, nothing is loaded."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    from torchrelay.checkpoint import load
    from torchrelay.errors import CorruptionError

    _start(world)
    mesh = init_device_mesh("cpu", (2,))
    whole = {
        "rows": (_values(torch.float32, 5, 6), Shard(0)),
        "columns": (_values(torch.bfloat16, 6, 5), Shard(1)),
        "one_row": (_values(torch.float64, 1, 3), Shard(0)),
        "replicated": (_values(torch.int64, 7), Replicate()),
    }
    state = {key: _sharded(values, mesh, [at]) for key, (values, at) in whole.items()}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=True)
    dcp.save(state, storage_writer=writer)
    found = {key: torch.zeros_like(values) for key, (values, _) in whole.items()}
    load(found, tmp_path / "hf")
    for key, (values, _) in whole.items():
        assert torch.equal(found[key], values), key
    dist.barrier()
    if world.rank == 0:
        (first,) = (tmp_path / "hf").glob("shard-00001-*")
        first.unlink()
    dist.barrier()
    with pytest.raises(CorruptionError, match="the files of all ranks must"):
        load({"columns": torch.zeros(6, 5, dtype=torch.bfloat16)}, tmp_path / "hf")


@pytest.mark.processes(2)
def test_an_asynchronous_save_of_dcp(tmp_path: Path, world: World) -> None:
    """Through our writer, of CPU tensors that change before it has ended."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from torchrelay.checkpoint import Writer, load, verify

    _start(world)
    mesh = init_device_mesh("cpu", (2,))
    whole = _values(torch.float32, 4000, 300)
    state = {"w": _sharded(whole, mesh, [Shard(0)]), "plain": whole.clone()}
    for step in range(2):
        saving: Any = dcp.async_save(state, storage_writer=Writer(tmp_path / f"step-{step}"))
        for value in state.values():
            _local(value).add_(1)
        saving.result()
        verify(tmp_path / f"step-{step}")
        found = {key: torch.zeros(4000, 300) for key in state}
        load(found, tmp_path / f"step-{step}")
        for key in state:
            assert torch.equal(found[key], whole + step), key


def _check_interleaved_rows(world: World, mesh: Any, tmp_path: Path) -> None:
    """A strided shard is several blocks of the tensor; DCP's planner takes it for one."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    from torchrelay.checkpoint import load, save

    whole = _values(torch.float32, 8, 3)
    rows = [[0, 1, 4, 5], [2, 3, 6, 7]][world.rank]
    placements = [_StridedShard(0, split_factor=2)]
    strided = DTensor.from_local(
        whole[rows], mesh, placements, shape=whole.shape, stride=whole.stride()
    )
    save({"w": strided}, tmp_path / "strided")
    plain = {"w": torch.zeros(8, 3)}
    load(plain, tmp_path / "strided")
    assert torch.equal(plain["w"], whole)
    strided.to_local().zero_()
    load({"w": strided}, tmp_path / "strided")
    assert torch.equal(strided.to_local(), whole[rows])


def _load_elsewhere(world: World, tmp_path: str, backend: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from torchrelay.checkpoint import load

    _start(world, backend)
    mesh = init_device_mesh("cpu", (world.size,))
    for saved in ("rows", "columns", "replicated", "plain"):
        for layout in ("rows", "columns", "replicated", "plain"):
            expected = _state(mesh, layout)
            found = _blank(expected)
            load(found, f"{tmp_path}/save-{saved}", max_buffer_bytes=4096)
            _assert_same(found, expected)


def _save_for_others(world: World, tmp_path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from torchrelay.checkpoint import save

    _start(world)
    mesh = init_device_mesh("cpu", (2,))
    for layout in ("rows", "columns", "replicated", "plain"):
        save(_state(mesh, layout), f"{tmp_path}/save-{layout}", fsync=False)


def test_saved_on_two_loads_on_one_three_and_four(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    saved = run_processes(_save_for_others, 2, tmp_path=str(tmp_path))
    assert all(result.ok for result in saved), [result.error for result in saved]
    for size, backend in ((1, "gloo"), (3, "gloo"), (4, "sml")):
        loaded = run_processes(_load_elsewhere, size, tmp_path=str(tmp_path), backend=backend)
        assert all(result.ok for result in loaded), [result.error for result in loaded]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(10, 14)
        self.down = torch.nn.Linear(14, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _trained(mesh: Any, layout: str) -> tuple[Any, Any]:
    """A model and an AdamW that has taken a step, under FSDP2, tensor parallelism, or both."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model: Any = _Model()
    if layout in ("tp", "2d"):
        tp = mesh["tp"] if layout == "2d" else mesh
        parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout in ("fsdp", "2d"):
        fully_shard(model, mesh=mesh["dp"] if layout == "2d" else mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():  # gradients that do not depend on the layout
        parameter.grad = torch.sin(parameter.detach() * 40)
    optimizer.step()
    return model, optimizer


def _whole_state(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    states = get_state_dict(model, optimizer)
    return {"model": states[0], "optimizer": states[1]}


def _bytes_of(state: dict[str, Any]) -> dict[str, bytes]:
    found = {key: _bits(_full(value)) for key, value in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        found.update({f"{name}.{key}": _bits(_full(value)) for key, value in values.items()})
    return found


def _train_and_save(world: World, tmp_path: str) -> dict[str, bytes]:
    from torch.distributed.device_mesh import init_device_mesh

    from torchrelay.checkpoint import save

    _start(world)
    found = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    for layout in ("fsdp", "tp", "2d"):
        state = _whole_state(*_trained(mesh if layout == "2d" else line, layout))
        save(state, f"{tmp_path}/{layout}", fsync=False)
        if layout == "fsdp":
            found = _bytes_of(state)
    return found


def _load_trained(world: World, tmp_path: str) -> list[dict[str, bytes]]:
    from torch.distributed.device_mesh import init_device_mesh

    from torchrelay.checkpoint import load

    _start(world)
    line = init_device_mesh("cpu", (world.size,))
    square: Any = None
    if world.size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for saved in ("fsdp", "tp", "2d"):
        for layout in ("tp", "2d") if world.size == 4 else ("fsdp", "plain"):
            state = _whole_state(*_trained(square if layout == "2d" else line, layout))
            moments = [v for of in state["optimizer"]["state"].values() for v in of.values()]
            for value in (*state["model"].values(), *moments):
                _local(value).zero_()
            load(state, f"{tmp_path}/{saved}")
            found.append(_bytes_of(state))
    return found


@pytest.mark.timeout(300)
def test_model_and_optimizer_under_fsdp_tp_and_both(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    saved = run_processes(_train_and_save, 4, timeout_s=120, tmp_path=str(tmp_path))
    assert all(result.ok for result in saved), [result.error for result in saved]
    for size in (1, 3, 4):
        loaded = run_processes(_load_trained, size, timeout_s=120, tmp_path=str(tmp_path))
        assert all(result.ok for result in loaded), [result.error for result in loaded]
        for found in loaded[0].value:
            assert found == saved[0].value


@pytest.mark.processes(2)
def test_an_error_on_one_rank_is_raised_on_every_rank(tmp_path: Path, world: World) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from torchrelay.checkpoint import Reader, latest, load, save, verify

    _start(world)
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": _sharded(_values(torch.float32, 8, 4), mesh, [Shard(0)]), "b": torch.ones(3)}
    save(state, tmp_path / "good", fsync=False)

    with pytest.raises(MismatchError, match=r"rank: rank 0 has 0, rank 1 has 1"):
        save({**state, "rank": world.rank}, tmp_path / "bad")
    with pytest.raises(MismatchError, match="b: rank 0"):
        save({"b": torch.ones(3 + world.rank)}, tmp_path / "bad")
    with pytest.raises(ValueError, match=r"not builtins\.object"):
        save({"x": object() if world.rank == 1 else 1}, tmp_path / "bad")
    assert latest(tmp_path).endswith("good")
    assert not (tmp_path / "bad").exists()
    dist.barrier()

    save(
        {f"rank {world.rank}": torch.full((2,), world.rank), "b": torch.ones(3)},
        tmp_path / "own keys",
    )
    own = {f"rank {world.rank}": torch.zeros(2, dtype=torch.int64)}
    load(own, tmp_path / "own keys")
    assert own[f"rank {world.rank}"].tolist() == [world.rank] * 2

    # Damage what only rank 1 reads: nobody's state changes.
    dist.barrier()
    if world.rank == 0:
        path = tmp_path / "good" / "data-00001-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    found = {"w": _sharded(torch.zeros(8, 4), mesh, [Shard(0)]), "b": torch.zeros(3)}
    with pytest.raises(CorruptionError, match="data-00001-00000"):
        load(found, tmp_path / "good")
    with pytest.raises(dcp.CheckpointException, match="data-00001-00000"):
        dcp.load(found, storage_reader=Reader(tmp_path / "good"))
    assert not found["w"].to_local().any() and not found["b"].any()
    with pytest.raises(CorruptionError):
        verify(tmp_path / "good")
