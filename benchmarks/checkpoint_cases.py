"""What bench_checkpoint.py measures on several ranks: each case by all rivals, interleaved, checked
before it is timed.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from report import reset_peak, resident_bytes
from safetensors.torch import load_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchrelay.aggregation  # noqa: F401 - the backend "sml"
from torchrelay.checkpoint import async_save, load, save
from torchrelay.checkpoint._tensors import byte_view

__all__ = ["CASES", "COLUMNS", "TENSORS", "Figures", "run_rank"]

TENSORS = 16
COLUMNS = 1024
_PIECE_BYTES = 16 << 20
_DISTINCT = 1 << 24  # consecutive integers that float32 holds exactly

Run = Callable[[], Any]
State = dict[str, DTensor]
# Seconds of each repeat on the slowest rank and, for loads, peak memory beside the tensors on the
# rank that took most.
Figures = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Way:
    """What is timed, and what is done untimed before and after it."""

    run: Run
    before: Run = lambda: None
    after: Callable[[Any], None] = lambda result: None  # given what ``run`` returned


def make_state(rows: int, dim: int) -> State:
    """Float32 DTensors ``(rows, COLUMNS)`` in memory of their own, sharded along ``dim``; each
    element has a known value.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for index in range(TENSORS):
        local = _values(rows, dim, index)
        state[f"t{index}"] = DTensor.from_local(
            local, mesh, [Shard(dim)], shape=torch.Size((rows, COLUMNS)), stride=(COLUMNS, 1)
        )
    return state


def _values(rows: int, dim: int, index: int) -> torch.Tensor:
    """This rank's shard of a tensor: positions of its elements, counted from ``index``."""
    whole = torch.arange(index, index + rows * COLUMNS, dtype=torch.int32).reshape(rows, COLUMNS)
    shard = whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return shard.remainder(_DISTINCT).float().contiguous()


def _fresh(folder: str) -> str:
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return folder


# --- Save


def save_ways(folder: str, rows: int) -> dict[str, Way]:
    """All with fsync; what the save before has left is removed untimed."""
    state = make_state(rows, 0)
    size_bytes = sum(value.to_local().nbytes for value in state.values())

    def way(name: str, run: Callable[[str], None]) -> Way:
        path = f"{folder}/{name}"
        return Way(lambda: run(path), before=lambda: _fresh(path))

    def by_dcp(path: str, threads: int) -> None:
        writer = dcp.FileSystemWriter(path, thread_count=threads)
        dcp.save(state, storage_writer=writer)

    def by_hugging_face(path: str) -> None:
        writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save(state, storage_writer=writer)

    ways = {"torchrelay": way("ours", lambda path: save(state, path))}
    for threads in (1, 2, 4):
        run = functools.partial(by_dcp, threads=threads)
        ways[f"DCP FileSystemWriter, threads: {threads}"] = way("dcp", run)
    ways["DCP HuggingFaceStorageWriter"] = way("hf", by_hugging_face)
    ways["torch.save on each rank"] = way("torch", lambda path: _torch_save(state, path))
    ways["floor: write and fsync"] = way("floor", lambda path: _write_zeros(size_bytes, path))
    return ways


def _torch_save(state: State, path: str) -> None:
    os.makedirs(path, exist_ok=True)
    with open(f"{path}/{dist.get_rank()}.pt", "wb") as file:
        torch.save({key: value.to_local() for key, value in state.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _write_zeros(size_bytes: int, path: str) -> None:
    """What ``dd bs=16M conv=fsync`` does."""
    os.makedirs(path, exist_ok=True)
    zeros = bytes(_PIECE_BYTES)
    with open(f"{path}/{dist.get_rank()}", "wb", buffering=0) as file:
        for start in range(0, size_bytes, len(zeros)):
            file.write(zeros[: size_bytes - start])
        os.fsync(file.fileno())


# --- Load


def load_ways(folder: str, rows: int, *, dim: int, cold: bool) -> dict[str, Way]:
    """Into tensors that are there, from what the case ``save`` left; each result is checked
    here.
    """
    state = make_state(rows, dim)
    rank, size = dist.get_rank(), dist.get_world_size()

    def by_torch() -> None:
        found = torch.load(f"{folder}/torch/{rank}.pt", mmap=True, weights_only=True)
        for key, value in found.items():
            state[key].to_local().copy_(value)

    def by_safetensors() -> None:
        found = load_file(_data_file(folder))
        for key, target in state.items():
            target.to_local().copy_(
                found[next(name for name in found if name.split("@")[0] == key)]
            )

    before = functools.partial(_evict, folder) if cold else lambda: None
    ways = {
        "torchrelay": Way(lambda: load(state, f"{folder}/ours"), before),
        'torchrelay, verify="header"': Way(
            lambda: load(state, f"{folder}/ours", verify="header"), before
        ),
        "DCP FileSystemReader": Way(lambda: dcp.load(state, checkpoint_id=f"{folder}/dcp"), before),
    }
    if dim == 0 and size == 2:  # each rank's shard is what one rank saved
        ways["torch.load(mmap=True) and copy"] = Way(by_torch, before)
        ways["safetensors and copy"] = Way(by_safetensors, before)
    for name, way in ways.items():
        for value in state.values():
            value.to_local().fill_(-1)
        way.run()
        for index, (key, value) in enumerate(state.items()):
            if not torch.equal(value.to_local(), _values(rows, dim, index)):
                raise SystemExit(f"{name}: rank {rank} has loaded a wrong {key}")
    if dim == 0 and size == 2:
        buffer = torch.zeros(sum(value.to_local().nbytes for value in state.values()) // 4)
        ways["floor: read"] = Way(lambda: _read(_data_file(folder), buffer), before)
    return ways


def replicated_ways(folder: str, rows: int) -> dict[str, Way]:
    """What every rank wants all of: read by each, or each byte by one rank that broadcasts it."""
    plain = torch.zeros(rows * COLUMNS)
    state = {"w": torch.arange(rows * COLUMNS, dtype=torch.int32).remainder(_DISTINCT).float()}
    save(state, f"{folder}/replicated")
    path = next(Path(folder, "replicated").glob("*.safetensors"))
    first = plain.numel() // 2 * dist.get_rank()
    halves = plain.chunk(2)
    header = path.stat().st_size - plain.nbytes
    dist.barrier()

    def broadcast(group: Any) -> None:
        _read(path, halves[dist.get_rank()], header + 4 * first)
        for source, half in enumerate(halves):
            dist.broadcast(half, source, group=group)

    shared_memory = dist.new_group(backend="sml")
    ways = {
        "torchrelay": Way(lambda: load({"w": plain}, f"{folder}/replicated", verify="none")),
        "each half read once, broadcast by gloo": Way(lambda: broadcast(None)),
        "each half read once, broadcast by sml": Way(lambda: broadcast(shared_memory)),
    }
    for name, way in ways.items():
        plain.fill_(-1)
        way.run()
        if not torch.equal(plain, state["w"]):
            raise SystemExit(f"{name}: rank {dist.get_rank()} has read wrong values")
    return ways


def _data_file(folder: str) -> str:
    return f"{folder}/ours/data-{dist.get_rank():05d}-00000.safetensors"


def _read(path: str | Path, into: torch.Tensor, offset: int = 0) -> None:
    view = byte_view(into)
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        for start in range(0, len(view), _PIECE_BYTES):
            file.readinto(view[start : start + _PIECE_BYTES])


def _evict(folder: str) -> None:
    """Removes the files, which are all on the disk, from the page cache."""
    if dist.get_rank() == 0:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
    dist.barrier()


# --- Stall of an asynchronous save


def stall_ways(folder: str, rows: int) -> dict[str, Way]:
    """What is timed ends when the state may change; the save itself ends untimed, before the next
    is timed.
    """
    state = make_state(rows, 0)
    plain = [value.to_local() for value in state.values()]
    copies = [torch.zeros_like(value) for value in plain]

    def memcpy() -> None:
        for value, copy in zip(plain, copies, strict=True):
            copy.copy_(value)

    def by_dcp(name: str, **options: Any) -> Way:
        path = f"{folder}/async-{name}"

        def run() -> Any:
            return dcp.async_save(state, checkpoint_id=path, **options)

        return Way(run, lambda: _fresh(path), lambda saving: saving.result())

    def stager(shared: bool) -> DefaultStager:
        """Keeps its memory from one save to the next."""
        return DefaultStager(StagingOptions(False, shared, False, False))

    process = AsyncCheckpointerType.PROCESS
    path = f"{folder}/async"
    return {
        "torchrelay": Way(
            lambda: async_save(state, path), lambda: _fresh(path), lambda saving: saving.result()
        ),
        "DCP async_save, thread": by_dcp("thread"),
        "DCP async_save, thread, cached staging": by_dcp("cached", async_stager=stager(False)),
        "DCP async_save, process, cached staging": by_dcp(
            "process", async_stager=stager(True), async_checkpointer_type=process
        ),
        "floor: one memcpy": Way(memcpy),
    }


# --- Measuring


def _figures(ways: dict[str, Way], repeats: int, with_peak: bool) -> Figures:
    """The first round warms up: it makes staging memory and processes."""
    figures: Figures = {name: {"seconds": [], "peak_bytes": []} for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            way.before()
            gc.collect()
            before = reset_peak() if with_peak else 0
            dist.barrier()
            start = time.perf_counter()
            result = way.run()
            seconds = time.perf_counter() - start
            peak = resident_bytes("VmHWM") - before if with_peak else 0
            way.after(result)
            slowest = torch.tensor([seconds, float(peak)], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if repeat:
                figures[name]["seconds"].append(float(slowest[0]))
                figures[name]["peak_bytes"].append(float(slowest[1]))
    return figures


@dataclass(frozen=True)
class Case:
    """A section of the results."""

    title: str
    ranks: int
    ways: Callable[[str, int], dict[str, Way]]
    with_peak: bool = False


CASES = {
    "save": Case("Save over 2 ranks, fsync", 2, save_ways),
    "load": Case(
        "Load the same layout on 2 ranks, files in the page cache",
        2,
        functools.partial(load_ways, dim=0, cold=False),
    ),
    "cold": Case(
        "Load the same layout on 2 ranks, files not in the page cache",
        2,
        functools.partial(load_ways, dim=0, cold=True),
    ),
    "reshard": Case(
        "Load onto 3 ranks, sharded along the other dimension, files in the page cache",
        3,
        functools.partial(load_ways, dim=1, cold=False),
        with_peak=True,
    ),
    "replicated": Case(
        "Load a replicated tensor on 2 ranks, file in the page cache", 2, replicated_ways
    ),
    "stall": Case("Stall of an asynchronous save on 2 ranks", 2, stall_ways),
}


def run_rank(rank: int, ranks: int, names: list[str], folder: str, rows: int, repeats: int) -> None:
    """Runs the cases ``names`` as one of ``ranks`` ranks; rank 0 leaves their :data:`Figures` in
    ``folder``.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{os.getppid()}-{ranks}", ranks)
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where DCP's writer processes meet
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for name in names:
        figures = _figures(CASES[name].ways(folder, rows), repeats, CASES[name].with_peak)
        if rank == 0:
            Path(folder, f"{name}.figures").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
