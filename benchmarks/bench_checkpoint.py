"""Saving and loading against torch's own ways: rates, the stall of an asynchronous save, a shard of
gpt2-medium, planning.

    python benchmarks/bench_checkpoint.py           # about 5 minutes, 5 GB of disk
    python benchmarks/bench_checkpoint.py --smoke      # small, one iteration; writes nothing

Rivals run in the same run, interleaved, with fsync wherever ours has it; every result is checked
before it is timed. ``--folder`` names a folder on the disk to measure, which keeps checkpoints and
figures; by default a temporary one. With it, ``--parts save,load`` runs only some parts; the
results are written once the folder has the figures of all. ``load``, ``cold`` and ``reshard`` need
what ``save`` left, ``model-`` and ``small-`` cases what theirs left. ``upload`` starts an S3 server
(moto).
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_deferred import MODEL
from checkpoint_cases import CASES, COLUMNS, LONG_S, TENSORS, Figures, run_rank, total_bytes
from checkpoint_shard import load_eager, load_shard, save_model
from report import free_port, gigabytes, parser_of, save, subplots, table, write
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.multiprocessing.spawn import start_processes

from torchrelay._boxes import Box
from torchrelay.checkpoint._types import DTYPES, DataFile, TensorDescription
from torchrelay.checkpoint.engine._output import ChunkRecord
from torchrelay.checkpoint.engine._read import MAX_BUFFER_BYTES, segments_of
from torchrelay.checkpoint.engine._written import Written, assemble
from torchrelay.checkpoint.format._manifest import Head, chunk_text, from_bytes
from torchrelay.checkpoint.plan._plan import Description, PlannedChunk, StateLayout, deal

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "checkpoint.png"
OVERWRITE = "torchrelay, overwrite=True"
UNVERIFIED = 'torchrelay, verify="header"'
PLAN_RANKS = (32, 128)
PRELOAD = [
    "torchrelay.checkpoint._dcp",
    "torch.distributed.fsdp",
    "transformers.models.gpt2.modeling_gpt2",
]
PLAN_ROWS = 4  # of each tensor on each rank


# --- A shard of a model


def fresh(
    function: Callable[[str, str], dict[str, Any]], model: str, folder: str
) -> dict[str, Any]:
    """What ``function`` measures in a process of its own."""
    with ProcessPoolExecutor(1, mp.get_context("forkserver")) as pool:
        return pool.submit(function, model, folder).result()


def shard_rows(model: str, folder: str) -> Iterator[list[str]]:
    fresh(save_model, model, folder)
    for function, name in (
        (load_shard, "deferred, torchrelay reads 1/16"),
        (load_eager, "eager, DCP reads all of it"),
    ):
        found = fresh(function, model, folder)
        peak, size = found["peak_bytes"], found["model_bytes"]
        seconds = f"{found['seconds']:.2f} s"
        yield [name, seconds, gigabytes(peak), gigabytes(size), f"{peak / size:.2f}"]


# --- Planning for many ranks


@dataclass
class Plan:
    """Seconds of planning, without communication."""

    save_s: float  # what rank 0 does: who writes what, and the metadata of all ranks' chunks
    encode_s: float  # what rank 0 does besides to write the metadata; of ours, part of save_s
    read_s: float  # what every rank does to read the metadata
    load_s: float  # what every rank does to find what it reads


def plan_ours(ranks: int, tensors: int) -> Plan:
    """``tensors`` tensors sharded by rows over ``ranks``, loaded on half as many."""
    names = [f"t{i}" for i in range(tensors)]
    size_bytes = PLAN_ROWS * COLUMNS * 4
    shape = (PLAN_ROWS * ranks, COLUMNS)
    files = [f"data-{rank:05d}-00000.safetensors" for rank in range(ranks)]
    boxes = [Box((PLAN_ROWS * rank, 0), (PLAN_ROWS, COLUMNS)) for rank in range(ranks)]

    def part(file: str, box: Box) -> Written:
        starts = range(512, 512 + tensors * size_bytes, size_bytes)
        chunks = [
            ChunkRecord((name,), box, chunk_text(box, file, name, start, bytes(4), size_bytes))
            for name, start in zip(names, starts, strict=True)
        ]
        return Written({file: DataFile(512 + tensors * size_bytes, 512, 0)}, chunks)

    others = [part(file, box) for file, box in zip(files[1:], boxes[1:], strict=True)]
    dtype = DTYPES["float32"]
    held = [(PlannedChunk((name,), dtype, shape, boxes[0], size_bytes), (0,)) for name in names]
    layout = StateLayout(dict.fromkeys(names, TensorDescription("float32", shape)), {})
    everyone = [Description(layout, {})]

    def plan_save() -> bytes:
        deal(held, 0)
        return assemble(everyone, [part(files[0], boxes[0]), *others], Head(0, "0", "step-1"))[0]

    save_s, data = seconds_of(plan_save)
    read_s, manifest = seconds_of(lambda: from_bytes(data, "the manifest"))
    wanted = Box((PLAN_ROWS * ranks // 2, 0), (2 * PLAN_ROWS, COLUMNS))
    load_s, found = seconds_of(
        lambda: [segments_of(name, entry, wanted) for name, entry in manifest.tensors.items()]
    )
    assert all(len(segments) == 2 for segments in found)
    return Plan(save_s, 0.0, read_s, load_s)


def plan_dcp(ranks: int, tensors: int) -> Plan:
    """The same by the functions that DCP's default planners call."""
    size, sizes = torch.Size((PLAN_ROWS * ranks, COLUMNS)), torch.Size((PLAN_ROWS, COLUMNS))
    properties = TensorProperties(torch.float32)

    def item(name: str, rank: int) -> WriteItem:
        offsets = torch.Size((PLAN_ROWS * rank, 0))
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, size)
        return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)

    plans = [SavePlan([item(f"t{i}", rank) for i in range(tensors)]) for rank in range(ranks)]
    save_s, (_, metadata) = seconds_of(
        lambda: create_default_global_save_plan(dedup_save_plans(plans))
    )
    metadata.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", 512 + i * 16384, 16384)
        for rank, plan in enumerate(plans)
        for i, item in enumerate(plan.items)
    }
    encode_s, data = seconds_of(lambda: pickle.dumps(metadata))
    read_s, metadata = seconds_of(lambda: pickle.loads(data))
    offsets = torch.Size((PLAN_ROWS * ranks // 2, 0))
    wanted = [ChunkStorageMetadata(offsets, torch.Size((2 * PLAN_ROWS, COLUMNS)))]
    stored: dict[str, Any] = metadata.state_dict_metadata
    load_s, found = seconds_of(
        lambda: [
            create_read_items_for_chunk_list(name, one, wanted) for name, one in stored.items()
        ]
    )
    assert all(len(items) == 2 for items in found)
    return Plan(save_s, encode_s, read_s, load_s)


def seconds_of(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def plan_rows(plans: dict[int, tuple[Plan, Plan]], tensors: int) -> Iterator[list[str]]:
    for ranks, (ours, theirs) in plans.items():
        saves = (ours.save_s, theirs.save_s, theirs.encode_s)
        loads = (ours.read_s, theirs.read_s, ours.load_s, theirs.load_s)
        per_chunk = 1e6 * (ours.save_s + ours.read_s + ours.load_s) / (ranks * tensors)
        yield [str(ranks), *(f"{figure:.2f}" for figure in (*saves, *loads)), f"{per_chunk:.1f}"]


# --- The results


def rank_rows(figures: Figures, size_bytes: int, with_peak: bool) -> Iterator[list[str]]:
    ours = statistics.median(figures["torchrelay"]["seconds"])
    for name, found in figures.items():
        seconds = found["seconds"]
        median = statistics.median(seconds)
        times = [f"{median * 1e3:.0f} ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"]
        peak = [f"{max(found['peak_bytes']) / 1e6:.0f}"] if with_peak else []
        cpu = f"{statistics.median(found['cpu_seconds']) * 1e3:.0f}"
        rate = f"{size_bytes / median / 1e9:.2f}"
        yield [name, *times, cpu, rate, f"{median / ours:.2f}", *peak]


def reached_rows(
    found: dict[str, Figures], plans: dict[int, tuple[Plan, Plan]]
) -> Iterator[list[str]]:
    """The figures that were to be reached, each against the rival that it names, at the best of its
    settings.
    """

    def fastest(case: str, *starts: str) -> float:
        return min(
            statistics.median(figures["seconds"])
            for name, figures in found[case].items()
            if name.startswith(starts)
        )

    def ours(case: str) -> float:
        return statistics.median(found[case]["torchrelay"]["seconds"])

    theirs = fastest("save", "DCP", "torch.save")
    yield ["save", "the fastest rival's time / ours", f"{theirs / ours('save'):.2f}", "≥ 1.5"]
    yield [
        "save",
        "the floor's time / ours",
        f"{fastest('save', 'floor') / ours('save'):.2f}",
        "≥ 0.8",
    ]
    yield [
        "load, same layout",
        "DCP's time / ours",
        f"{fastest('load', 'DCP') / ours('load'):.2f}",
        "≥ 2",
    ]
    floor = fastest("load", "floor")
    yield ["load, same layout", "the floor's time / ours", f"{floor / ours('load'):.2f}", "≥ 0.8"]
    for way in (OVERWRITE, UNVERIFIED):
        for rival, theirs, least in (
            ("DCP", fastest("load", "DCP"), "≥ 2"),
            ("the floor", floor, "≥ 0.8"),
        ):
            case = f"load, same layout, {way.partition(', ')[2]}"
            yield [case, f"{rival}'s time / ours", f"{theirs / fastest('load', way):.2f}", least]
    cold = fastest("cold", "floor") / ours("cold")
    yield ["load, not in the page cache", "the floor's time / ours", f"{cold:.2f}", "≥ 0.8"]
    theirs = fastest("reshard", "DCP")
    yield ["load, other layout", "DCP's time / ours", f"{theirs / ours('reshard'):.2f}", "≥ 3"]
    peak = max(found["reshard"]["torchrelay"]["peak_bytes"])
    limit = f"≤ {MAX_BUFFER_BYTES / 1e6:.0f} MB"
    yield ["load, other layout", "peak memory beside the tensors", f"{peak / 1e6:.0f} MB", limit]
    yield ["stall", "ours / DCP's", f"{ours('stall') / fastest('stall', 'DCP'):.2f}", "≤ 0.2"]
    yield [
        "stall",
        "one memcpy's time / ours",
        f"{fastest('stall', 'floor') / ours('stall'):.2f}",
        "≥ 0.8",
    ]
    ratio = fastest("model-load", "safetensors") / fastest("model-load", OVERWRITE)
    title = f"{CASES['model-load'].title}, overwrite=True"
    yield [title, "safetensors's time / ours", f"{ratio:.2f}", "≥ 0.77"]
    for case, rival, least in (
        ("model-load", "safetensors", "≥ 0.77"),
        ("model-save", "safetensors", "≥ 1"),
        ("model-reshard", "DCP", "≥ 2"),
        ("small-save", "safetensors", "≥ 0.83"),
        ("small-load", "safetensors", "≥ 0.67"),
        ("upload", "plain files", "≥ 0.8"),
    ):
        ratio = fastest(case, rival) / ours(case)
        yield [CASES[case].title, f"{rival}'s time / ours", f"{ratio:.2f}", least]
    yield [CASES["small-stall"].title, "ours", f"{1e3 * ours('small-stall'):.0f} ms", "≤ 25 ms"]
    for ranks in (min(plans), max(plans)):
        mine, theirs_plan = plans[ranks]
        ratios = (theirs_plan.save_s / mine.save_s, theirs_plan.load_s / mine.load_s)
        yield [
            f"plan for {ranks} ranks",
            "DCP's planner's time / ours, save and load",
            " and ".join(f"{ratio:.1f}" for ratio in ratios),
            "linear",
        ]


def plot(
    found: dict[str, Figures], plans: dict[int, tuple[Plan, Plan]], tensors: int, image: Path
) -> None:
    """Times of each case beside the floor, and planning over the number of ranks."""
    figure, (left, right) = subplots(1, 2, figsize=(10, 3.6))
    families = {
        "torchrelay": "torchrelay",
        UNVERIFIED: UNVERIFIED,
        "DCP": "DCP",
        "torch.": "torch.save, torch.load",
        "floor": "floor",
    }
    cases = ("save", "load", "reshard", "stall")
    width = 1 / (len(families) + 1)
    for index, (start, label) in enumerate(families.items()):
        for place, case in enumerate(cases):
            times = [
                statistics.median(f["seconds"])
                for n, f in found[case].items()
                if n == start or (n.startswith(start) and start != "torchrelay")
            ]
            if times:
                left.bar(
                    place + index * width, 1e3 * min(times), width, color=f"C{index}", label=label
                )
    left.set(ylabel="ms", xticks=[place + 2 * width for place in range(len(cases))])
    left.set_xticklabels(cases)
    handles, labels = left.get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    left.legend([shown[label] for label in families.values()], families.values(), fontsize="small")
    ranks = list(plans)
    for side, label in enumerate(("torchrelay", "DCP")):
        for key, line in (("save_s", "o-"), ("load_s", "s--")):
            values = [getattr(pair[side], key) for pair in plans.values()]
            right.plot(
                ranks, values, line, color=f"C{side}", label=f"{label}, {key.removesuffix('_s')}"
            )
    right.set(
        xscale="log",
        yscale="log",
        xlabel=f"ranks, {tensors} tensors",
        ylabel="planning, s",
        xticks=ranks,
    )
    right.set_xticklabels(map(str, ranks))
    right.minorticks_off()
    right.legend(frameon=False)
    save(figure, image)


@dataclass(frozen=True)
class Setup:
    """What is measured, and where."""

    folder: str
    size_mb: int
    repeats: int
    model: str
    tensors: int
    plan_ranks: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Of each tensor; divisible by 2 and 3 ranks."""
        return self.size_mb * (1 << 20) // (TENSORS * COLUMNS * 4) // 6 * 6

    def figures(self, part: str) -> Path:
        return Path(self.folder) / f"{part}.figures"


@contextmanager
def s3_server() -> Iterator[None]:
    """A server on this machine, in a process of its own, which the environment names."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(free_port())]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{command[-1]}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield
        finally:
            server.terminate()


def measure(setup: Setup, parts: list[str]) -> None:
    """Leaves the figures of ``parts`` in the folder."""
    for ranks in sorted({case.ranks for case in CASES.values()}):
        names = [part for part in parts if part in CASES and CASES[part].ranks == ranks]
        if names:
            arguments = (ranks, names, setup.folder, setup.rows, setup.repeats)
            start_processes(run_rank, arguments, ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
    if "shard" in parts:
        for path in Path(setup.folder).iterdir():  # room for two whole models
            if path.is_dir():
                shutil.rmtree(path)
        rows = list(shard_rows(setup.model, setup.folder))
        setup.figures("shard").write_text(json.dumps(rows))
    if "plan" in parts:
        plans = {
            ranks: [asdict(plan(ranks, setup.tensors)) for plan in (plan_ours, plan_dcp)]
            for ranks in setup.plan_ranks
        }
        setup.figures("plan").write_text(json.dumps(plans))


def report(setup: Setup, image: Path) -> list[str]:
    """The results, from the figures of all parts."""
    found: dict[str, Figures] = {
        name: json.loads(setup.figures(name).read_text()) for name in CASES
    }
    shards = json.loads(setup.figures("shard").read_text())
    plans = {
        int(ranks): (Plan(**ours), Plan(**theirs))
        for ranks, (ours, theirs) in json.loads(setup.figures("plan").read_text()).items()
    }
    plot(found, plans, setup.tensors, image)
    sections = []
    for name, case in CASES.items():
        heads = ["", "ms", "CPU ms", "GB/s", "time / ours"]
        if case.with_peak:
            heads.append("peak beside the tensors, MB")
        size_bytes = total_bytes(case.shapes(setup.rows)) // (
            TENSORS if name == "replicated" else 1
        )
        lines = list(rank_rows(found[name], size_bytes, case.with_peak))
        sections += [f"## {case.title}", table(heads, lines)]
    return [
        table(["case", "figure", "reached", "to reach"], list(reached_rows(found, plans))),
        f"A state of {setup.size_mb} MiB in {TENSORS} float32 tensors, one thread of torch on each "
        f"rank. Times are of the slowest rank, medians (least to most) of {setup.repeats} "
        f"interleaved runs after one that checks or warms up; of what takes over {LONG_S:g} s, "
        "one. The floors write zeros with the same fsync (what `dd bs=16M conv=fsync` does), read "
        "one file on each rank, and copy the state once.",
        *sections,
        f"## Load 1/16 of {setup.model} in a fresh process, files in the page cache",
        table(["", "time", "peak memory", "the shard", "peak / shard"], shards),
        f"## Planning for {setup.tensors} tensors, without communication",
        "Seconds on one core. Save: what rank 0 does, for ours all of it until the bytes of the "
        "manifest, for DCP its planner, and besides the pickling of its metadata. Read: what each "
        "rank does to parse and check the manifest, or to unpickle the metadata, unchecked. Load: "
        "what each rank does to find what it reads.",
        table(
            [
                "ranks",
                "save",
                "save, DCP's planner",
                "and its pickling",
                "read",
                "read, DCP",
                "load",
                "load, DCP",
                "ours, µs for each chunk",
            ],
            list(plan_rows(plans, setup.tensors)),
        ),
    ]


PARTS = (*CASES, "shard", "plan")


def main() -> None:
    parser = parser_of(__doc__, "small, one iteration, nothing written")
    parser.add_argument("--size-mb", type=int, default=512, help="of the state, over all ranks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default=MODEL, help="of bench_deferred.py")
    parser.add_argument(
        "--folder", help="where to write, and to keep figures; by default a temporary folder"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="only these of %(default)s")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts {options.parts}: they are {', '.join(PARTS)}")

    # A clean process imports what takes long once; the others are forked from it.
    mp.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        setup = Setup(folder, options.size_mb, options.repeats, options.model, 1000, PLAN_RANKS)
        if options.smoke:
            setup = Setup(folder, 12, 0, "tiny", 20, (4, 8))
        os.makedirs(folder, exist_ok=True)
        with (
            s3_server() if "upload" in parts else nullcontext()
        ):  # before ranks get the environment
            measure(setup, parts)
        missing = [part for part in PARTS if not setup.figures(part).exists()]
        if missing:
            print(f"{folder}: the figures of {', '.join(missing)} are missing")
            return
        results = report(setup, Path(temporary) / "plot.png" if options.smoke else IMAGE)
    if options.smoke:
        print("\n\n".join(results))
    else:
        write("checkpoint", "checkpoint: saving and loading", *results)


if __name__ == "__main__":
    main()
