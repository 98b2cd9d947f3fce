"""What ranks do wrong, and states that differ from rank to rank: every rank gets a typed error, or
the same state.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchrelay.errors import (
    ArgumentError,
    CorruptionError,
    MismatchError,
    PeerLostError,
    StorageError,
    UnavailableError,
)
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses


def _start(world: World) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=world.connect(), rank=world.rank, world_size=world.size)


def _rows(value: float) -> Any:
    """A tensor of 4 rows, sharded over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.full((4, 3), value), mesh, [Shard(0)], src_data_rank=None)


@pytest.mark.processes(2)
def test_groups_and_failing_ranks(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    from torchrelay.checkpoint import async_save, load, save, verify

    _start(world)
    state = {"w": _rows(1.0)}
    save(state, tmp_path / "good", fsync=False)

    # A group of some ranks: theirs is saved, what others hold is missed, and others are refused.
    second = dist.new_group([1])
    if world.rank == 1:
        save({"mine": torch.ones(3)}, tmp_path / "second", group=second)
        with pytest.raises(
            MismatchError, match=r"do not hold the whole tensor 'w' .*: its chunks hold 6 of 12"
        ):
            save(state, tmp_path / "part", group=second)
        with pytest.raises(MismatchError, match="do not hold the whole tensor 'w'"):
            save(state, tmp_path / "part", no_dist=True)
    else:
        for call in (save, load, async_save):
            with pytest.raises(ArgumentError, match="rank 0 is not in group="):
                call(state, tmp_path / "second", group=second)
    dist.barrier()
    found = {"mine": torch.zeros(3)}
    load(found, tmp_path / "second")
    assert bool(found["mine"].all())

    # The disk of one rank is full: both have its error, and the checkpoint before is there.
    if world.rank == 1:
        real_open = os.open

        def full(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
            if str(path).endswith(".safetensors") and flags & os.O_CREAT:
                return real_open("/dev/full", os.O_WRONLY)
            return real_open(path, flags, mode, **kwargs)

        monkeypatch.setattr("torchrelay.checkpoint.storage._local.os.open", full)
    with pytest.raises(StorageError, match="No space") as caught:
        save({"w": _rows(2.0)}, tmp_path / "good")
    assert str(caught.value).count("rank ") == (world.rank == 0)  # its own error, or whose it is
    monkeypatch.undo()
    dist.barrier()
    verify(tmp_path / "good")
    blank = {"w": _rows(0.0)}
    load(blank, tmp_path / "good")
    assert bool((blank["w"].to_local() == 1.0).all())
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.processes(2)
def test_a_target_that_one_rank_cannot_fill(tmp_path: Path, world: World) -> None:
    """No rank is changed, and both have the same error, which is not that a rank was lost."""
    from torchrelay.checkpoint import load, save

    _start(world)
    save({"a": torch.ones(2), "b": torch.ones(3), "w": _rows(1.0)}, tmp_path / "good")
    for bad, message in (
        (torch.zeros(1).expand(3), "share memory"),
        (torch.zeros(3, device="meta"), "meta device"),
    ):
        state = {"a": torch.zeros(2), "b": torch.zeros(3), "w": _rows(0.0)}
        if world.rank == 1:
            state["b"] = bad
        with pytest.raises(ArgumentError, match=f"^rank 1: b: .*{message}"):
            load(state, tmp_path / "good")
        assert not state["a"].any() and not state["w"].to_local().any()


@pytest.mark.processes(2)
def test_an_object_whose_state_dict_raises_is_named_on_every_rank(
    tmp_path: Path, world: World
) -> None:
    """With its own error as the cause on the rank that has it; nobody is taken for lost."""
    from torchrelay.checkpoint import async_save, load, save

    class Broken(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            if world.rank == 1:
                raise ZeroDivisionError("nothing to divide by")
            return super().state_dict(*args, **kwargs)

    _start(world)
    good = torch.nn.Linear(2, 2)
    save({"a": {"b": good}}, tmp_path / "x", fsync=False)
    for call in (save, async_save, load):
        with pytest.raises(ArgumentError) as caught:
            call({"a": {"b": Broken(2, 2)}}, tmp_path / "x")
        message = "state_dict() of Broken 'a.b' raised ZeroDivisionError: nothing to divide by"
        is_original = world.rank == 1 and call is not load
        assert str(caught.value) == (message if is_original else f"rank 1: {message}")
        if world.rank == 1:
            own = caught.value if is_original else caught.value.__cause__
            assert own is not None and isinstance(own.__cause__, ZeroDivisionError)
    for broken, name in ((Broken(2, 2), "Broken"), (torch.nn.Sequential(Broken(2, 2)), "Seq")):
        with pytest.raises(ArgumentError, match=rf"state_dict\(\) of {name}\w* raised"):
            save(broken, tmp_path / "x")


@pytest.mark.processes(2)
def test_what_the_coordinator_alone_fails_at_fails_on_all_ranks(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrelay.checkpoint import load, save

    _start(world)
    save({"w": _rows(1.0)}, tmp_path / "x", fsync=False, checksum=False)
    state = {"w": _rows(0.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a checkpoint without checksums
        with pytest.raises(PeerLostError, match=r"UserWarning: rank 0: .*checksum=False"):
            load(state, tmp_path / "x")
    assert not state["w"].to_local().any()
    monkeypatch.setitem(sys.modules, "rich", None)  # of the progress bar
    with pytest.raises(UnavailableError, match="a progress bar needs rich"):
        load(state, tmp_path / "x", verify="header", progress=True)


@pytest.mark.processes(3)
def test_damage_is_found_whoever_verifies_it(tmp_path: Path, world: World) -> None:
    """Ranks of a host share the verification of what they all read."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from torchrelay.checkpoint import load, save

    _start(world)
    # A block of the checkpoint in each row; each rank reads a third of all rows.
    rows, columns = 40, 1 << 18
    if world.rank == 0:
        save({"w": torch.ones(rows, columns)}, tmp_path / "whole", no_dist=True, fsync=False)
    mesh = init_device_mesh("cpu", (3,))
    local = (
        torch.zeros(torch.ones(columns).chunk(3)[world.rank].numel()).expand(rows, -1).contiguous()
    )
    state = {
        "w": DTensor.from_local(local, mesh, [Shard(1)], shape=(rows, columns), stride=(columns, 1))  # type: ignore[arg-type]
    }
    dist.barrier()
    (path,) = (tmp_path / "whole").glob("*.safetensors")
    start = path.stat().st_size - 4 * rows * columns
    for row in (3, 20, 39):
        if world.rank == 0:
            with path.open("r+b") as file:
                file.seek(start + 4 * row * columns + 5)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
        dist.barrier()
        with pytest.raises(
            CorruptionError,
            match=f"tensor 'w' is damaged between bytes {start + 4 * row * columns} ",
        ):
            load(state, tmp_path / "whole")
        assert not state["w"].to_local().any()
        with pytest.raises(CorruptionError, match="tensor 'w' is damaged"):
            load(state, tmp_path / "whole", overwrite=True)
        dist.barrier()
        if world.rank == 0:
            with path.open("r+b") as file:
                file.seek(start + 4 * row * columns + 5)
                file.write(byte)
        dist.barrier()
    load(state, tmp_path / "whole")
    assert bool((state["w"].to_local() == 1).all())


@pytest.mark.processes(2)
def test_options_of_dcps_state_dicts(tmp_path: Path, world: World) -> None:
    """Full state dicts that rank 0 alone has, and flattened optimizers, come back as they were."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    from torchrelay.checkpoint import load, save

    _start(world)

    def trained(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    def values(model: Any, optimizer: Any) -> list[torch.Tensor]:
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        return [value.full_tensor() for value in (*model.parameters(), *moments)]

    saved = trained(0)
    full, flat = (
        StateDictOptions(full_state_dict=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
    )
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name, saved_as, loaded_as in (("full", on_rank_0, full), ("flat", flat, flat)):
        model, optimizer = get_state_dict(*saved, options=saved_as)
        assert bool(model) == (world.rank == 0 or name == "flat")
        save({"model": model, "optimizer": optimizer}, tmp_path / name, fsync=False)
        other = trained(1)
        model, optimizer = get_state_dict(*other, options=loaded_as)
        load({"model": model, "optimizer": optimizer}, tmp_path / name)
        set_state_dict(
            *other, model_state_dict=model, optim_state_dict=optimizer, options=loaded_as
        )
        for one, two in zip(values(*other), values(*saved), strict=True):
            assert torch.equal(one, two), name


@pytest.mark.processes(2)
def test_a_plan_is_for_the_ranks_that_agreed_on_it(tmp_path: Path, world: World) -> None:
    """What one rank alone adds is saved, and what it alone drops is written by the other."""
    from torchrelay.checkpoint import async_save, load, save
    from torchrelay.checkpoint.engine._background import saver

    _start(world)
    state = {f"w{i}": torch.full((10,), float(i)) for i in range(4)}
    changed = {**state, "extra": torch.ones(3)}
    del changed["w1"]
    for write in (save, lambda *args: async_save(*args).result(60)):
        name = tmp_path / getattr(write, "__name__", "")
        write(state, f"{name}-0")
        write(changed if world.rank == 1 else state, f"{name}-1")
        found = {key: torch.zeros_like(value) for key, value in {**changed, **state}.items()}
        load(found, f"{name}-1")
        assert all(torch.equal(found[key], {**changed, **state}[key]) for key in found)
    saver.close()


def _die_while_saving(world: World, folder: str) -> str:
    from torchrelay.checkpoint import save

    _start(world)
    save({"w": _rows(1.0)}, f"{folder}/good", fsync=False)
    if world.rank == 1:
        real_write = os.pwrite

        def write(fd: int, data: Any, offset: int) -> int:
            real_write(fd, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        os.pwrite = write
    try:
        save({"w": _rows(2.0)}, f"{folder}/good", fsync=False)
    except PeerLostError as error:
        return str(error)
    return "saved"


def test_a_rank_that_dies_while_it_saves(tmp_path: Path, run_processes: RunProcesses) -> None:
    from torchrelay.checkpoint import load, save, verify

    first, second = run_processes(_die_while_saving, 2, folder=str(tmp_path))
    assert second.exitcode == -signal.SIGKILL
    assert first.ok, first.error
    assert "another rank was lost" in first.value and "intact" in first.value
    verify(tmp_path / "good")
    found = {"w": torch.zeros(4, 3)}
    load(found, tmp_path / "good")
    assert bool((found["w"] == 1.0).all())
    save({"w": torch.zeros(1)}, tmp_path / "next", fsync=False)
    assert sorted(os.listdir(tmp_path)) == ["good", "next"]


@pytest.mark.processes(2)
def test_all_ranks_read_the_same_checkpoint(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from torchrelay.checkpoint import Reader, load, save
    from torchrelay.checkpoint.engine import _read
    from torchrelay.checkpoint.format._foreign import open_checkpoint

    _start(world)

    def saved(value: float, name: str) -> None:
        if world.rank == 0:
            save({"w": torch.full((3,), value)}, tmp_path / name, no_dist=True, fsync=False)
        dist.barrier()

    def loaded(path: Path) -> float:
        state = {"w": torch.zeros(3)}
        load(state, path)
        return float(state["w"][0])

    for step in range(2):
        saved(float(step), f"step-{step}")
    state = {"w": torch.full((3,), -1.0)}
    mine = tmp_path / f"step-{world.rank}"  # as of latest(), evaluated around a commit
    with pytest.raises(MismatchError, match=r"different checkpoints: rank 0 .*step-0 .*rank 1 "):
        load(state, mine)
    with pytest.raises(dcp.CheckpointException, match="different checkpoints"):
        dcp.load(state, storage_reader=Reader(mine))
    assert bool((state["w"] == -1.0).all())
    assert loaded(tmp_path) == 1.0  # one rank chooses

    # The checkpoint is replaced after rank 0 has opened it and before rank 1 does.
    def opened(path: Any) -> Any:
        monkeypatch.undo()
        if world.rank == 1:
            while not (tmp_path / "opened").exists():
                time.sleep(0.01)
            save({"w": torch.full((3,), 7.0)}, path, no_dist=True, fsync=False)
        folder, read = open_checkpoint(path)
        manifest = read()
        (tmp_path / "opened").touch()
        return folder, lambda: manifest

    monkeypatch.setattr(_read, "open_checkpoint", opened)
    assert loaded(tmp_path / "step-1") == 7.0
