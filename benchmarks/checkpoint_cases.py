"""What bench_checkpoint.py measures on several ranks: each case by all rivals, interleaved, checked
before it is timed.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from report import reset_peak, resident_bytes
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchrelay.aggregation  # noqa: F401 - the backend "sml"
from torchrelay.checkpoint import async_save, load, save
from torchrelay.checkpoint.state._tensors import byte_view

__all__ = ["CASES", "COLUMNS", "TENSORS", "Figures", "run_rank", "total_bytes"]

TENSORS = 16
COLUMNS = 1024
_PIECE_BYTES = 16 << 20
_SMALL_TENSORS = 10_000
_UPLOAD_BYTES = 256 << 20
_FEW_ROWS = 1000  # of a smoke test
_DISTINCT = 1 << 24  # consecutive integers that float32 holds exactly

Run = Callable[[], Any]
State = dict[str, torch.Tensor]
# Seconds of each repeat on the slowest rank, by the clock and of its processor, and, for loads,
# peak memory beside the tensors on the rank that took most.
Figures = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Way:
    """What is timed, and what is done untimed before and after it."""

    run: Run
    before: Run = lambda: None
    after: Callable[[Any], None] = lambda result: None  # given what ``run`` returned


Shapes = Callable[[int], dict[str, tuple[int, ...]]]


def even_shapes(rows: int) -> dict[str, tuple[int, ...]]:
    return {f"t{index}": (rows, COLUMNS) for index in range(TENSORS)}


def half_shapes(rows: int) -> dict[str, tuple[int, ...]]:
    return even_shapes(rows // 2)


def gpt2_shapes(rows: int) -> dict[str, tuple[int, ...]]:
    """The parameters of GPT-2, 498 MB; of a small model for few rows."""
    layers, width, words = (12, 768, 50257) if rows > _FEW_ROWS else (2, 48, 300)
    shapes: dict[str, tuple[int, ...]] = {"wte": (words, width), "wpe": (1024, width)}
    for layer in range(layers):
        for name, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes[f"h.{layer}.{name}.weight"] = inputs, outputs
            shapes[f"h.{layer}.{name}.bias"] = (outputs,)
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            shapes[f"h.{layer}.{name}"] = (width,)
    return {**shapes, "ln_f.weight": (width,), "ln_f.bias": (width,)}


def small_shapes(rows: int) -> dict[str, tuple[int, ...]]:
    """10,000 tensors of 1 KiB; fewer for few rows."""
    count = _SMALL_TENSORS if rows > _FEW_ROWS else rows
    return {f"layers.{index // 10}.weight_{index % 10}": (256,) for index in range(count)}


def total_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(4 * math.prod(shape) for shape in shapes.values())


def make_state(shapes: Mapping[str, tuple[int, ...]], dim: int) -> State:
    """Float32 DTensors in memory of their own, sharded along ``dim``, or plain tensors in one
    process; each element has a known value.
    """
    locals_ = {key: _values(shape, dim, index) for index, (key, shape) in enumerate(shapes.items())}
    if dist.get_world_size() == 1:
        return locals_
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        key: DTensor.from_local(
            local,
            mesh,
            [Shard(min(dim, len(shapes[key]) - 1))],
            shape=torch.Size(shapes[key]),
            stride=torch.empty(shapes[key], device="meta").stride(),
        )
        for key, local in locals_.items()
    }


def _values(shape: tuple[int, ...], dim: int, index: int) -> torch.Tensor:
    """This rank's shard of a tensor: positions of its elements, counted from ``index``."""
    numel = math.prod(shape)
    whole = torch.arange(index, index + numel, dtype=torch.int32).reshape(shape)
    shard = whole.chunk(dist.get_world_size(), min(dim, len(shape) - 1))[dist.get_rank()]
    return shard.remainder(_DISTINCT).float().contiguous()


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _fresh(folder: str) -> str:
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return folder


# --- Save


def save_ways(folder: str, rows: int, shapes: Shapes = even_shapes) -> dict[str, Way]:
    """All with fsync; what the save before has left is removed untimed."""
    state = make_state(shapes(rows), 0)
    size_bytes = sum(_local(value).nbytes for value in state.values())

    def way(name: str, run: Callable[[str], None]) -> Way:
        path = f"{folder}/{name}"

        def before() -> None:
            _fresh(path)
            # A virtual machine may have to get memory from its host, which takes longer than the
            # save; with this there is as much as the save needs.
            torch.ones(size_bytes, dtype=torch.uint8)

        return Way(lambda: run(path), before)

    def by_dcp(path: str, threads: int) -> None:
        writer = dcp.FileSystemWriter(path, thread_count=threads)
        dcp.save(state, storage_writer=writer)

    def by_hugging_face(path: str) -> None:
        writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save(state, storage_writer=writer)

    ways = {"torchrelay": way("ours", lambda path: save(state, path))}
    for threads in (1, 2) if shapes is even_shapes else (2,):
        run = functools.partial(by_dcp, threads=threads)
        ways[f"DCP FileSystemWriter, threads: {threads}"] = way("dcp", run)
    if shapes is even_shapes:
        ways["DCP HuggingFaceStorageWriter"] = way("hf", by_hugging_face)
    ways["safetensors on each rank"] = way("st", lambda path: _safetensors_save(state, path))
    ways["torch.save on each rank"] = way("torch", lambda path: _torch_save(state, path))
    ways["floor: write and fsync"] = way("floor", lambda path: _write_zeros(size_bytes, path))
    return ways


def _torch_save(state: State, path: str) -> None:
    os.makedirs(path, exist_ok=True)
    with open(f"{path}/{dist.get_rank()}.pt", "wb") as file:
        torch.save({key: _local(value) for key, value in state.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _safetensors_save(state: State, path: str) -> None:
    os.makedirs(path, exist_ok=True)
    name = f"{path}/{dist.get_rank()}.safetensors"
    save_file({key: _local(value) for key, value in state.items()}, name)
    with open(name, "rb") as file:
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


def load_ways(
    folder: str, rows: int, *, dim: int, cold: bool, shapes: Shapes = even_shapes
) -> dict[str, Way]:
    """Into tensors that are there, from what the case ``save`` left; each result is checked
    here.
    """
    found_shapes = shapes(rows)
    state = make_state(found_shapes, dim)
    rank, size = dist.get_rank(), dist.get_world_size()

    def by_torch() -> None:
        found = torch.load(f"{folder}/torch/{rank}.pt", mmap=True, weights_only=True)
        for key, value in found.items():
            _local(state[key]).copy_(value)

    def by_safetensors() -> None:
        found = load_file(f"{folder}/st/{rank}.safetensors")
        for key, target in state.items():
            _local(target).copy_(found[key])

    before = functools.partial(_evict, folder) if cold else lambda: None
    ways = {
        "torchrelay": Way(lambda: load(state, f"{folder}/ours"), before),
        "torchrelay, overwrite=True": Way(
            lambda: load(state, f"{folder}/ours", overwrite=True), before
        ),
        'torchrelay, verify="header"': Way(
            lambda: load(state, f"{folder}/ours", verify="header"), before
        ),
        "DCP FileSystemReader": Way(lambda: dcp.load(state, checkpoint_id=f"{folder}/dcp"), before),
    }
    if dim == 0 and size < 3:  # each rank's shard is what one rank saved
        ways["torch.load(mmap=True) and copy"] = Way(by_torch, before)
        ways["safetensors and copy"] = Way(by_safetensors, before)
    for name, way in ways.items():
        for value in state.values():
            _local(value).fill_(-1)
        way.run()
        for index, (key, value) in enumerate(state.items()):
            if not torch.equal(_local(value), _values(found_shapes[key], dim, index)):
                raise SystemExit(f"{name}: rank {rank} has loaded a wrong {key}")
    if dim == 0 and size < 3:
        buffer = torch.zeros(sum(_local(value).nbytes for value in state.values()) // 4)
        _read(_data_file(folder), buffer)
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


def stall_ways(folder: str, rows: int, shapes: Shapes = even_shapes) -> dict[str, Way]:
    """What is timed ends when the state may change; the save itself ends untimed, before the next
    is timed.
    """
    state = make_state(shapes(rows), 0)
    plain = [*map(_local, state.values())]
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

    path = f"{folder}/async"
    ways = {
        "torchrelay": Way(
            lambda: async_save(state, path), lambda: _fresh(path), lambda saving: saving.result()
        ),
        "DCP async_save, thread": by_dcp("thread"),
    }
    if shapes is not small_shapes:
        ways["DCP async_save, thread, cached staging"] = by_dcp(
            "cached", async_stager=stager(False)
        )
        process = AsyncCheckpointerType.PROCESS  # it needs a file descriptor for each tensor
        ways["DCP async_save, process, cached staging"] = by_dcp(
            "process", async_stager=stager(True), async_checkpointer_type=process
        )
    return {**ways, "floor: one memcpy": Way(memcpy)}


# --- Object stores


def upload_ways(folder: str, rows: int) -> dict[str, Way]:
    """Against uploads of the same bytes as plain files, to the server at AWS_ENDPOINT_URL."""
    state = make_state(half_shapes(rows), 0)
    fs = fsspec.filesystem("s3")
    bucket = Path(folder).name.lower().replace("_", "-")
    if dist.get_rank() == 0 and not fs.exists(bucket):
        fs.mkdir(bucket)
    dist.barrier()
    locals_ = [*map(_local, state.values())]
    size_bytes = sum(value.nbytes for value in locals_)
    files = -(-size_bytes // _UPLOAD_BYTES)

    def upload(number: int) -> None:
        with fs.open(f"{bucket}/plain/{dist.get_rank()}-{number}", "wb") as file:
            for value in locals_[number::files]:
                file.write(byte_view(value))

    def by_files() -> None:
        with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(upload, range(files)))

    def fresh(name: str) -> None:
        if dist.get_rank() == 0 and fs.exists(f"{bucket}/{name}"):
            fs.rm(f"{bucket}/{name}", recursive=True)
        dist.barrier()
        fs.invalidate_cache()

    return {
        "torchrelay": Way(lambda: save(state, f"s3://{bucket}/ours"), lambda: fresh("ours")),
        "plain files": Way(by_files, lambda: fresh("plain")),
    }


# --- Measuring

LONG_S = 1.5  # what takes longer is measured once


@dataclass(frozen=True)
class Case:
    """A section of the results."""

    title: str
    ranks: int
    ways: Callable[[str, int], dict[str, Way]]
    with_peak: bool = False
    shapes: Shapes = even_shapes
    has_run: bool = False  # whether ``ways`` has run each once, to check what it leaves


def _figures(ways: dict[str, Way], repeats: int, case: Case) -> Figures:
    """Unless the ways have run, the first round warms up: it makes staging memory and processes.
    It counts where it takes long enough not to notice, and if there are no ``repeats``.
    """
    figures: Figures = {name: {"seconds": [], "cpu_seconds": [], "peak_bytes": []} for name in ways}
    measured_once: set[str] = set()
    warm_ups = 0 if case.has_run or not repeats else 1
    for repeat in range(-warm_ups, max(1, repeats)):
        for name, way in ways.items():
            if name in measured_once:
                continue
            way.before()
            gc.collect()
            before = reset_peak() if case.with_peak else 0
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            result = way.run()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            peak = resident_bytes("VmHWM") - before if case.with_peak else 0
            way.after(result)
            whole = time.perf_counter() - start
            slowest = torch.tensor([seconds, cpu, float(peak), whole], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if repeat >= 0 or slowest[0] > LONG_S:
                if slowest[3] > LONG_S:
                    measured_once.add(name)
                figures[name]["seconds"].append(float(slowest[0]))
                figures[name]["cpu_seconds"].append(float(slowest[1]))
                figures[name]["peak_bytes"].append(float(slowest[2]))
    return figures


CASES = {
    "save": Case("Save over 2 ranks, fsync", 2, save_ways),
    "load": Case(
        "Load the same layout on 2 ranks, files in the page cache",
        2,
        functools.partial(load_ways, dim=0, cold=False),
        has_run=True,
    ),
    "cold": Case(
        "Load the same layout on 2 ranks, files not in the page cache",
        2,
        functools.partial(load_ways, dim=0, cold=True),
        has_run=True,
    ),
    "reshard": Case(
        "Load onto 3 ranks, sharded along the other dimension, files in the page cache",
        3,
        functools.partial(load_ways, dim=1, cold=False),
        with_peak=True,
        has_run=True,
    ),
    "replicated": Case(
        "Load a replicated tensor on 2 ranks, file in the page cache",
        2,
        replicated_ways,
        has_run=True,
    ),
    "stall": Case("Stall of an asynchronous save on 2 ranks", 2, stall_ways),
    "model-save": Case(
        "Save the parameters of GPT-2 over 2 ranks, fsync",
        2,
        functools.partial(save_ways, shapes=gpt2_shapes),
        shapes=gpt2_shapes,
    ),
    "model-load": Case(
        "Load the parameters of GPT-2 on 2 ranks, files in the page cache",
        2,
        functools.partial(load_ways, dim=0, cold=False, shapes=gpt2_shapes),
        shapes=gpt2_shapes,
        has_run=True,
    ),
    "model-reshard": Case(
        "Load the parameters of GPT-2 onto 3 ranks, files in the page cache",
        3,
        functools.partial(load_ways, dim=0, cold=False, shapes=gpt2_shapes),
        shapes=gpt2_shapes,
        has_run=True,
    ),
    "small-save": Case(
        "Save 10,000 tensors of 1 KiB in one process, fsync",
        1,
        functools.partial(save_ways, shapes=small_shapes),
        shapes=small_shapes,
    ),
    "small-load": Case(
        "Load 10,000 tensors of 1 KiB in one process, files in the page cache",
        1,
        functools.partial(load_ways, dim=0, cold=False, shapes=small_shapes),
        shapes=small_shapes,
        has_run=True,
    ),
    "small-stall": Case(
        "Stall of an asynchronous save of 10,000 tensors of 1 KiB",
        1,
        functools.partial(stall_ways, shapes=small_shapes),
        shapes=small_shapes,
    ),
    "upload": Case(
        "Save half as much over 2 ranks to an S3 server on this machine",
        2,
        upload_ways,
        shapes=half_shapes,
    ),
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
        case = CASES[name]
        inside = f"{folder}/{name.partition('-')[0]}-cases" if "-" in name else folder
        os.makedirs(inside, exist_ok=True)
        start = time.perf_counter()
        figures = _figures(case.ways(inside, rows), repeats, case)
        if rank == 0:
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
            Path(folder, f"{name}.figures").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
