"""Deferred initialisation of gpt2-medium: building, materializing whole, a shard, on four ranks
under FSDP2.

    python benchmarks/bench_deferred.py                      # about 3 minutes, 5 GB of memory
    python benchmarks/bench_deferred.py --model gpt2-xl  # 6.2 GB; writes nothing
    python benchmarks/bench_deferred.py --smoke              # a tiny model, once; writes nothing

Each materialization runs in a fresh process, which reports its time and its peak memory: the most
resident memory after imports (VmHWM) less what was resident then. It also reports a digest of each
tensor that it made, which must be that of the eager module's.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from report import (
    free_port,
    gigabytes,
    parser_of,
    reset_peak,
    resident_bytes,
    save,
    spread,
    subplots,
    table,
    write,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay.deferred import deferred_init, materialize_module, materialize_tensor
from torchrelay.demo.model import ComplEx

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "deferred-shards.png"
MODELS = {
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}
MODEL = "gpt2-medium"  # 1.4 GB
SEED = 20
SMALL_REPEATS = 10
RANKS = 4
# glibc keeps freed blocks below a size that it adapts; fixed, the peak does not depend on what it
# has learned.
MMAP_BYTES = 1 << 20
Digests = dict[str, str]


def builder(model: str) -> Callable[[], nn.Module]:
    """What builds the model."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - not needed by all works

    config = GPT2Config(**cast(dict[str, Any], MODELS[model]))
    return lambda: GPT2LMHeadModel(config)


# --- In fresh processes


def measured(work: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    """Its seconds and peak memory, and the bytes of what it made."""
    before = reset_peak()
    start = time.perf_counter()
    module = work()
    seconds = time.perf_counter() - start
    peak = resident_bytes("VmHWM") - before
    return module, {"seconds": seconds, "peak_bytes": peak, "model_bytes": model_bytes(module)}


def model_bytes(module: nn.Module) -> int:
    """The bytes of its tensors, tied ones once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in module.state_dict().values()
    }
    return sum(storages.values())


def part(tensor: torch.Tensor, count: int) -> tuple[slice, ...] | None:
    """The last of ``count`` equal parts of the rows: the one farthest into the random numbers."""
    return None if tensor.dim() == 0 else (slice((count - 1) * len(tensor) // count, len(tensor)),)


def digests(module: nn.Module, count: int = 1) -> Digests:
    """A digest of each tensor's last of ``count`` parts."""
    return {name: digest(t[part(t, count) or ...]) for name, t in module.state_dict().items()}


def digest(tensor: torch.Tensor) -> str:
    """Of the values' bytes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


def work_eager(model: str, counts: list[int]) -> dict[str, Any]:
    build = builder(model)
    torch.manual_seed(SEED)
    module, figures = measured(build)
    return {**figures, "digests": {count: digests(module, count) for count in counts}}


def work_deferred(model: str, counts: list[int]) -> dict[str, Any]:
    (count,) = counts
    build = builder(model)
    torch.manual_seed(SEED)
    start = time.perf_counter()
    module = deferred_init(build)
    build_seconds = time.perf_counter() - start

    def work() -> nn.Module:
        materialize_module(
            module, shard=None if count == 1 else lambda _, tensor: part(tensor, count)
        )
        return module

    _, figures = measured(work)
    # The shard is all there is now.
    return {**figures, "build_seconds": build_seconds, "digests": {count: digests(module)}}


def work_build(model: str, counts: list[int]) -> dict[str, Any]:
    """Interleaved in one process, as nothing here takes memory."""
    build = builder(model)
    seconds: dict[str, list[float]] = {"deferred_init": [], "meta device": [], "FakeTensorMode": []}

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return build()

    def with_fake_tensors() -> nn.Module:
        with FakeTensorMode():
            return build()

    rivals = {"deferred_init": lambda: deferred_init(build), "meta device": on_meta}
    rivals["FakeTensorMode"] = with_fake_tensors
    (repeats,) = counts
    for repeat in range(repeats + 1):
        for name, rival in rivals.items():
            gc.collect()
            start = time.perf_counter()
            module = rival()
            elapsed = time.perf_counter() - start
            if repeat:  # the first one warms up
                seconds[name].append(elapsed)
            del module
    return {"seconds": seconds}


READS, READ_ROWS = 320, (30, 512)


def power_iteration(rows: int) -> tuple[float, torch.Tensor]:
    """An initialisation that reads :data:`READS` values, as those do that look for a largest
    singular value.
    """
    matrix, vector = torch.randn(rows, rows), torch.randn(rows)
    for _ in range(READS // 2):
        vector = matrix @ vector
        vector = vector / vector.norm().item()
        if (matrix @ vector).norm().item() < 0:
            break
    return (matrix @ vector).norm().item(), vector


def work_reading(model: str, counts: list[int]) -> dict[str, Any]:
    """Seconds of an initialisation that reads values all the time, interleaved; its results must be
    eager's.
    """
    seconds: dict[str, list[float]] = {"deferred": [], "eager": []}
    rows, repeats = counts
    for repeat in range(repeats + 1):
        results = {}
        for name, measured_seconds in seconds.items():
            torch.manual_seed(SEED)
            start = time.perf_counter()
            if name == "eager":
                norm, vector = power_iteration(rows)
            else:
                norm, vector = deferred_init(power_iteration, rows)
                materialize_tensor(vector)
            elapsed = time.perf_counter() - start
            results[name] = norm, digest(vector)
            if repeat:  # the first one warms up
                measured_seconds.append(elapsed)
        if results["deferred"] != results["eager"]:
            raise SystemExit(
                f"reading values: {results['deferred']} is not eager's {results['eager']}"
            )
    return {"seconds": seconds}


class PassingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and executes them: the least that a dispatch mode in Python costs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def linear_layers(count: int, width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


SMALL: dict[str, Callable[[], nn.Module]] = {
    "the demo's model": lambda: ComplEx(20_000, 10, 64),
    "an encoder layer of 512": lambda: nn.TransformerEncoderLayer(512, 8),
    "12 linear layers of 512": linear_layers(12, 512),
    "24 linear layers of 512": linear_layers(24, 512),
    "12 linear layers of 64": linear_layers(12, 64),
}


def work_small(model: str, counts: list[int]) -> dict[str, Any]:
    """Seconds to build and materialize each of :data:`SMALL`, interleaved with eager construction,
    and with that under a mode that only passes operations on.
    """
    (repeats,) = counts
    cases: dict[str, dict[str, Any]] = {}
    for name, build in SMALL.items():
        seconds: dict[str, list[float]] = {"deferred": [], "eager": [], "passed on": []}
        count = 0
        for repeat in range(repeats + 2):
            made: dict[str, Digests] = {}
            for rival, measured_seconds in seconds.items():
                gc.collect()
                torch.manual_seed(SEED)
                start = time.perf_counter()
                if rival == "deferred":
                    module = deferred_init(build)
                    materialize_module(module)
                elif rival == "eager":
                    module = build()
                else:
                    with PassingMode() as mode:
                        module = build()
                    count = mode.count
                elapsed = time.perf_counter() - start
                made[rival] = digests(module)
                if repeat >= 2:  # the first ones warm up
                    measured_seconds.append(elapsed)
            if made["deferred"] != made["eager"]:
                raise SystemExit(f"{name}: the deferred module is not the eager one")
        cases[name] = {"seconds": seconds, "operations": count}
    return {"cases": cases}


def work_floor(model: str, counts: list[int]) -> dict[str, Any]:
    """Seconds for one billion normal random numbers, the least there is to do for an element."""
    tensor = torch.empty(20_000_000).normal_()
    start = time.perf_counter()
    tensor.normal_()
    return {"seconds_per_element": (time.perf_counter() - start) / tensor.numel()}


def work_fsdp(model: str, counts: list[int]) -> dict[str, Any]:
    """One rank under FSDP2: its peak memory; on rank 0 also digests of all tensors as gathered from
    all ranks.
    """
    build = builder(model)
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)

    before = reset_peak()
    start, processor = time.perf_counter(), time.process_time()
    module = deferred_init(build)
    for block in cast(Any, module).transformer.h:
        fully_shard(block)
    fully_shard(module)
    materialize_module(module)
    figures: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor,
        "peak_bytes": resident_bytes("VmHWM") - before,
    }
    gathered = {}
    for name, tensor in module.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            gathered[name] = digest(whole)
    dist.barrier()
    dist.destroy_process_group()
    return {**figures, "digests": {1: gathered} if gathered else {}}


WORKS = {
    "eager": work_eager,
    "deferred": work_deferred,
    "build": work_build,
    "reading": work_reading,
    "small": work_small,
    "floor": work_floor,
    "fsdp": work_fsdp,
}


# --- The main process


def start(
    work: str, model: str, counts: list[int], environ: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        __file__,
        "--work",
        work,
        "--model",
        model,
        "--counts",
        *map(str, counts),
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})}
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with code {process.returncode}")  # type: ignore[arg-type]
    return dict(json.loads(output.splitlines()[-1]))


def run(work: str, model: str, counts: list[int]) -> dict[str, Any]:
    return result(start(work, model, counts))


def run_fsdp(model: str, ranks: int) -> list[dict[str, Any]]:
    port = free_port()
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(MMAP_BYTES),
    }
    processes = [
        start("fsdp", model, [ranks], {**common, "RANK": str(rank)}) for rank in range(ranks)
    ]
    return [result(process) for process in processes]


def check(ours: dict[str, Any], eager: dict[str, Any]) -> None:
    """Raises unless every tensor's digest is the eager module's."""
    for count, made in ours["digests"].items():
        wrong = [name for name, value in eager["digests"][count].items() if made.get(name) != value]
        if wrong or len(made) != len(eager["digests"][count]):
            raise SystemExit(
                f"as 1/{count}: {len(wrong)} of {len(made)} tensors differ from eager: {wrong[:5]}"
            )


def median(runs: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(one[key] for one in runs))


def build_rows(model: str, repeats: int) -> Iterator[list[str]]:
    seconds = run("build", model, [repeats])["seconds"]
    ours = statistics.median(seconds["deferred_init"])
    for rival, reach in (("meta device", "≤ 1.3"), ("FakeTensorMode", "≤ 0.6")):
        ratio = ours / statistics.median(seconds[rival])
        yield [
            "build",
            spread(seconds["deferred_init"]),
            rival,
            spread(seconds[rival]),
            f"{ratio:.2f}",
            reach,
        ]


def reading_row(model: str, rows: int, repeats: int) -> list[str]:
    seconds = run("reading", model, [rows, repeats])["seconds"]
    ours, theirs = (statistics.median(seconds[name]) for name in ("deferred", "eager"))
    times = [f"{1000 * one:.1f} ms" for one in (ours, theirs)]
    return [
        f"read {READS} values (power iteration, {rows} rows), then materialize",
        times[0],
        "eager",
        times[1],
        f"{ours / theirs:.1f}",
        "≤ 20",
    ]


def small_rows(model: str, repeats: int) -> Iterator[list[str]]:
    for name, case in run("small", model, [repeats])["cases"].items():
        ours, theirs, floor = (
            1000 * statistics.median(case["seconds"][rival])
            for rival in ("deferred", "eager", "passed on")
        )
        yield [
            f"{name}, {case['operations']} operations",
            f"{ours:.2f} ms",
            f"{theirs:.2f} ms",
            f"{ours / theirs:.2f}",
            f"{floor / theirs:.2f}",
        ]


def materialize_rows(
    eagers: list[dict[str, Any]], deferreds: dict[int, list[dict[str, Any]]]
) -> Iterator[list[str]]:
    theirs = median(eagers, "seconds")
    whole = eagers[0]["model_bytes"]
    reaches = {1: ("≤ 1.05", "≤ 1.02"), 4: ("≤ 0.35", "≤ 0.30")}
    for count, runs in deferreds.items():
        what = "materialize whole" if count == 1 else f"materialize 1/{count}"
        reach = reaches.get(count, ("", ""))
        rival = spread([one["seconds"] for one in eagers])
        ratio = median(runs, "seconds") / theirs
        yield [
            what,
            spread([one["seconds"] for one in runs]),
            "eager",
            rival,
            f"{ratio:.2f}",
            reach[0],
        ]
        peak = median(runs, "peak_bytes")
        ratio = peak / whole
        yield [
            f"{what}: peak memory",
            gigabytes(peak),
            "the model",
            gigabytes(whole),
            f"{ratio:.3f}",
            reach[1],
        ]
    peak = median(eagers, "peak_bytes")
    yield [
        "eager: peak memory",
        gigabytes(peak),
        "the model",
        gigabytes(whole),
        f"{peak / whole:.3f}",
        "",
    ]


def fsdp_rows(ranks: list[dict[str, Any]], whole: int) -> Iterator[list[str]]:
    for rank, one in enumerate(ranks):
        share = one["peak_bytes"] / whole
        times = [f"{one[key]:.2f} s" for key in ("seconds", "processor_seconds")]
        yield [str(rank), *times, gigabytes(one["peak_bytes"]), f"{share:.3f}"]


def plot(
    deferreds: dict[int, list[dict[str, Any]]], eagers: list[dict[str, Any]], model: str
) -> None:
    """Time and peak memory over the number of shards, to :data:`IMAGE`."""
    counts = list(deferreds)
    figure, axes = subplots(1, 2, figsize=(9, 3.4))
    for axis, key, scale, label in (
        (axes[0], "seconds", 1, "time, s"),
        (axes[1], "peak_bytes", 1e9, "peak memory, GB"),
    ):
        axis.plot(
            counts,
            [median(runs, key) / scale for runs in deferreds.values()],
            "o-",
            label="deferred, one shard",
        )
        eager = median(eagers, key) / scale
        axis.plot(
            counts, [eager / count for count in counts], "k:", label="eager / number of shards"
        )
        axis.axhline(eager, color="tab:gray", ls="--", label="eager, whole")
        axis.set(
            xscale="log",
            yscale="log",
            xticks=counts,
            xticklabels=counts,
            xlabel="number of shards",
            ylabel=label,
        )
        axis.minorticks_off()
    axes[0].legend(frameon=False)
    figure.suptitle(f"{model}: materializing one shard in a fresh process")
    save(figure, IMAGE)


def main() -> None:
    parser = parser_of(__doc__, "a tiny model, one iteration, nothing written")
    parser.add_argument("--model", choices=MODELS, default=MODEL)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--work", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(WORKS[options.work](options.model, options.counts)))
        return
    model, repeats = ("tiny", 1) if options.smoke else (options.model, options.repeats)
    counts = [1, 4] if options.smoke else [1, 4, 16]
    ranks = 2 if options.smoke else RANKS

    rows = [*build_rows(model, repeats), *(reading_row(model, n, repeats) for n in READ_ROWS)]
    eagers: list[dict[str, Any]] = []
    deferreds: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for repeat in range(repeats):
        eagers.append(run("eager", model, [] if repeat else counts))
        for count, runs in deferreds.items():
            if repeat == 0 or count in (1, 4):
                runs.append(run("deferred", model, [count]))
                check(runs[-1], eagers[0])
    rows += materialize_rows(eagers, deferreds)
    whole = eagers[0]["model_bytes"]
    floor = run("floor", model, [])["seconds_per_element"] * whole / 4
    sharded = run_fsdp(model, ranks)
    for one in sharded:
        check(one, eagers[0])
    parts = [
        table(["what", "ours", "rival", "its figure", "ratio", "to reach"], rows),
        f"Times are medians (least to most) of {repeats} runs, interleaved; 1/16 ran once. "
        "Each shard is the last one, which lies farthest into the sequence of random "
        "numbers. Eager fills most tensors twice (torch's default initialisation, then the model's "
        f"own); one normal draw for each element takes {floor:.1f} s here, the floor for the whole "
        "model.",
        "## Small models",
        "Built and materialized, medians of interleaved runs. To reach: 1.2 times eager, for 10 to "
        "100 operations. The last column is eager construction under a dispatch mode that only "
        "passes each operation on, which is what any implementation in Python pays.",
        table(
            ["model", "ours", "eager", "ratio", "passing operations on"],
            list(small_rows(model, 3 if options.smoke else SMALL_REPEATS)),
        ),
        f"## FSDP2 on {ranks} ranks of one machine",
        "Build deferred, `fully_shard` each block and the model, `materialize_module`. Gathered "
        "afterwards, every tensor equals the eager module's bit for bit (compared by 128-bit "
        f"digests of their bytes). Run with `MALLOC_MMAP_THRESHOLD_={MMAP_BYTES}`: without it, "
        "glibc now and then keeps 0.3 GB of freed temporaries on a rank.",
        table(
            ["rank", "time", "processor time", "peak memory", "of the whole model"],
            list(fsdp_rows(sharded, whole)),
        ),
    ]
    if model == MODEL:
        plot(deferreds, eagers, model)
        write("deferred", f"Deferred initialisation of {model}", *parts)
    else:
        print("\n\n".join(parts))


if __name__ == "__main__":
    main()
