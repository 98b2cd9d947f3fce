"""all_reduce of float32 on one host: ``sml`` through c10d and as an operator (``all_reduce_``),
Gloo, Open MPI and DeepSpeed's shared memory, interleaved in the same processes; and DDP.

    python benchmarks/bench_aggregation.py        # 8 B to 256 MiB, 2 and 4 ranks: about 3 minutes
    python benchmarks/bench_aggregation.py --ways     # of a call from torch to sml; torch 2.15
    python benchmarks/bench_aggregation.py --smoke    # one tiny iteration; writes nothing

DeepSpeed is a rival where it is installed and compiles its operator (``pip install deepspeed``).
``c10d`` is what a call costs over torch's backend ``fake``, which does nothing: the floor of
``dist.all_reduce``.

The floor is what the memory allows: each rank must read the message's bytes and write as many,
which is what one copy of them does; all ranks copy at the same time. A result is checked before it
is timed. Only ratios mean something on a virtual machine: now and then its cores take several times
as long to pass bytes to each other, for all rivals.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import free_port, parser_of, save, subplots, table, write

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "aggregation.png"
SIZES = (8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
ROUNDS = 7
WAYS_SIZES, WAYS_ROUNDS, WAYS_CALLS = (8, 64 << 10), 25, 100
# Of the largest messages, which take seconds.
FEW_ROUNDS, MANY_BYTES = 3, 16 << 20
# How long one rival is timed in one round, and at most how often it is called.
ROUND_S = 0.03
MOST_CALLS = 1000
STEPS = 12

ABOUT_DDP = (
    "DDP, in ms: the buckets of gradients reduced one after another with nothing else to do; a "
    "whole training step; and what communication adds to a step (the dummy plane communicates "
    "nothing). The losses over sml are compared with those over Gloo."
)
DDP_HEADER = [
    "model, parameters in buckets",
    "buckets: sml",
    "Gloo",
    "Gloo / sml",
    "step: sml",
    "Gloo",
    "no communication",
    "added: Gloo / sml",
    "loss over sml",
    "to Gloo's, relative",
]

ABOUT_WAYS = (
    "A blocking all-reduce of float32 by 2 ranks of one host, in us, the least of all rounds; in "
    "brackets, times the shortest way. *short*: the sum of a plain tensor, which the group itself "
    "runs, on every torch. *direct*: a maximum, run as all other calls were before `sml` became a "
    "backend. *operators*: the same by c10d's operators and its Backend in Python, without the "
    "flight recorder, which torch 2.15 attaches to each group; *recorded*: with it."
)

Seconds = dict[str, list[float]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="of messages, in bytes")
    parser.add_argument("--no-ddp", action="store_true")
    parser.add_argument("--ways", action="store_true", help="compare the ways of a call instead")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    if arguments.ways:
        seconds = launch(2)["sizes"]
        names = list(seconds[str(WAYS_SIZES[0])])
        rows = []
        for size, by_way in seconds.items():
            least = {name: min(times) for name, times in by_way.items()}
            base = least["short"]
            cells = (f"{least[name] * 1e6:.1f} ({least[name] / base:.1f})" for name in names)
            rows.append([f"{size} B", *cells])
        write("backend", "The ways of a call to sml", ABOUT_WAYS, table(["size", *names], rows))
        return
    results = {ranks: launch(ranks) for ranks in ([2] if arguments.smoke else arguments.ranks)}
    parts = [part for ranks, result in results.items() for part in report(ranks, result)]
    print("\n\n".join(parts))
    if not arguments.smoke:
        write(
            "aggregation",
            "all_reduce on one host",
            (__doc__ or "").split("\n\n")[-1].strip(),
            *parts,
        )
        plot(results)


def launch(ranks: int) -> dict[str, Any]:
    """Runs the ranks, under mpirun where there is one, and returns what rank 0 measured."""
    port = free_port()
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        worker = [sys.executable, __file__, *sys.argv[1:], "--worker", str(out)]
        mpirun = shutil.which(
            "mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        )
        if mpirun:
            subprocess.run([mpirun, "-n", str(ranks), *worker], env=environ, check=True)
        else:
            processes = [
                subprocess.Popen(worker, env={**environ, "RANK": str(r), "WORLD_SIZE": str(ranks)})
                for r in range(ranks)
            ]
            codes = [process.wait() for process in processes]
            if any(codes):
                raise SystemExit("a rank failed")
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def work(arguments: argparse.Namespace) -> None:
    """One rank."""
    smoke = arguments.smoke
    import torchrelay.aggregation  # noqa: F401, PLC0415 - registers the backend
    from torchrelay.world import World  # noqa: PLC0415

    torch.set_num_threads(1)
    world = World.from_environment()
    dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=world.size)
    gloo = dist.new_group(backend="gloo")
    result: dict[str, Any] = {"sizes": {}, "mpi": mpi_version()}
    if arguments.ways:
        result["sizes"] = race_of_ways(make_ways(gloo))
    for size in [] if arguments.ways else SIZES[:3] if smoke else arguments.sizes:
        rivals = make_rivals(size, gloo)
        check(rivals, world.size)
        result["sizes"][str(size)] = race(
            rivals, rounds=1 if smoke else ROUNDS if size < MANY_BYTES else FEW_ROUNDS
        )
    models = (
        {}
        if arguments.no_ddp or arguments.ways
        else {"transformer": transformer, "ResNet-like": resnet}
    )
    result["ddp"] = {
        name: ddp(make, gloo, steps=2 if smoke else STEPS) for name, make in models.items()
    }
    if world.rank == 0:
        arguments.worker.write_text(json.dumps(result))
    dist.destroy_process_group()


def mpi_version() -> str | None:
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError):
        return None
    return str(MPI.Get_library_version().split(",")[0]).strip() if MPI.COMM_WORLD.size > 1 else None


@functools.cache
def deepspeed_is_ready() -> bool:
    """Compile and start DeepSpeed's operator for the ranks of one host, where it is installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return False
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(dist.get_world_size()))
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # noqa: PLC0415

    for rank in range(dist.get_world_size()):  # one after another: the first compiles it
        if rank == dist.get_rank():
            operator = ShareMemCommBuilder().load(verbose=False)
        dist.barrier()
    operator.initialize(dist.get_world_size(), dist.get_rank())
    return True


@functools.cache
def fake_group() -> Any:
    """A group of torch's backend that does nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, PLC0415

    return dist.new_group(backend="fake")


def make_rivals(size: int, gloo: Any) -> dict[str, tuple[torch.Tensor, Callable[[], object]]]:
    """Each with a tensor of its own, of ``size`` bytes."""
    from torchrelay.aggregation import all_reduce_  # noqa: PLC0415

    tensors = [torch.ones(size // 4) for _ in range(7)]
    ours, direct, theirs, mpis, source, shared, nothing = tensors
    rivals: dict[str, tuple[torch.Tensor, Callable[[], object]]] = {
        "sml": (ours, lambda: dist.all_reduce(ours)),
        "all_reduce_": (direct, lambda: all_reduce_(direct)),
        "Gloo": (theirs, lambda: dist.all_reduce(theirs, group=gloo)),
    }
    if mpi_version():
        from mpi4py import MPI  # noqa: PLC0415

        array = mpis.numpy()
        rivals["Open MPI"] = (mpis, lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array))
    if deepspeed_is_ready():
        reduce_ = torch.ops.deepspeed.inference_all_reduce_
        rivals["DeepSpeed"] = (shared, lambda: reduce_(shared))
    fake = fake_group()
    rivals["c10d"] = (nothing, lambda: dist.all_reduce(nothing, group=fake))
    copy = torch.empty_like(source)
    rivals["floor"] = (copy, lambda: copy.copy_(source))
    return rivals


def make_ways(gloo: Any) -> dict[str, Callable[[torch.Tensor], object]]:
    """The ways of a call that ``--ways`` compares."""
    from torchrelay.aggregation import all_reduce_  # noqa: PLC0415

    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    bare = dist.new_group(backend="sml")
    del os.environ["TORCH_FR_BUFFER_SIZE"]
    recorded: Any = dist.new_group(backend="sml")
    maximum: Any = dist.ReduceOp.MAX
    opts = dist.AllreduceOptions()
    opts.reduceOp, opts.asyncOp = maximum, False
    return {
        "all_reduce_": all_reduce_,
        "short": dist.all_reduce,
        "direct": lambda tensor: recorded.core._on.all_reduce([tensor], opts),
        "operators": lambda tensor: dist.all_reduce(tensor, maximum, group=bare),
        "recorded": lambda tensor: dist.all_reduce(tensor, maximum, group=recorded),
        "Gloo": lambda tensor: dist.all_reduce(tensor, maximum, group=gloo),
    }


def race_of_ways(ways: dict[str, Callable[[torch.Tensor], object]]) -> dict[str, Seconds]:
    """Seconds a call, of each way in each round, by size."""
    result: dict[str, Seconds] = {}
    for size in WAYS_SIZES:
        tensor = torch.ones(size // 4)
        seconds = result[str(size)] = {name: [] for name in ways}
        for _ in range(WAYS_ROUNDS):
            for name, way in ways.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(WAYS_CALLS):
                    way(tensor)
                seconds[name].append((time.perf_counter() - start) / WAYS_CALLS)
                tensor.fill_(1)
    return result


def check(rivals: dict[str, tuple[torch.Tensor, Callable[[], object]]], ranks: int) -> None:
    for name, (tensor, call) in rivals.items():
        call()
        want = 1 if name in ("floor", "c10d") else ranks
        if not tensor.eq(want).all():
            raise SystemExit(f"{name} gives a wrong sum")
        tensor.zero_()


def race(rivals: dict[str, tuple[torch.Tensor, Callable[[], object]]], rounds: int) -> Seconds:
    """Seconds a call, of each rival in each round."""
    calls = {}
    for name, (_, call) in rivals.items():
        call()
        start = time.perf_counter()
        call()
        took = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        calls[name] = max(1, min(MOST_CALLS, int(ROUND_S / took.item())))
    seconds: Seconds = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, (_, call) in rivals.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls[name]):
                call()
            seconds[name].append((time.perf_counter() - start) / calls[name])
    return seconds


def transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.zeros(
        2, 16, 256
    )


class Residual(torch.nn.Module):
    """Two convolutions around which the input passes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(before, after, 3, stride, 1, bias=False),
            torch.nn.BatchNorm2d(after),
            torch.nn.ReLU(),
            torch.nn.Conv2d(after, after, 3, 1, 1, bias=False),
            torch.nn.BatchNorm2d(after),
        )
        self.past = torch.nn.Conv2d(before, after, 1, stride) if stride > 1 else torch.nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.past(images))


def resnet() -> tuple[torch.nn.Module, torch.Tensor]:
    """The shapes of a ResNet-18, for small images."""
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 64, 3, 2, 1), torch.nn.ReLU()]
    for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += [Residual(before, after, after // before), Residual(after, after, 1)]
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 1000)]
    return torch.nn.Sequential(*layers), torch.zeros(4, 3, 32, 32)


def bucket_sizes(module: torch.nn.Module) -> list[int]:
    """How many elements DDP reduces at a time: the last parameters first, up to 1 MiB, then up to
    25 MiB.
    """
    buckets = [0]
    for parameter in reversed(list(module.parameters())):
        if buckets[-1] * 4 >= (1 << 20 if len(buckets) == 1 else 25 << 20):
            buckets.append(0)
        buckets[-1] += parameter.numel()
    return buckets


def ddp(
    make: Callable[[], tuple[torch.nn.Module, torch.Tensor]], gloo: Any, steps: int
) -> dict[str, Any]:
    """Steps of one model over both backends, and without communication; and its buckets reduced
    alone.
    """
    from torchrelay.aggregation import Options  # noqa: PLC0415

    groups = {
        "sml": dist.group.WORLD,
        "Gloo": gloo,
        "compute": dist.new_group(backend="sml", pg_options=Options(plane="dummy")),
    }
    runs = {}
    for name, group in groups.items():
        torch.manual_seed(0)
        plain, shape = make()
        module = torch.nn.parallel.DistributedDataParallel(plain, process_group=group)
        runs[name] = (module, torch.optim.SGD(module.parameters(), lr=0.01))
    batch = torch.randn(shape.shape, generator=torch.Generator().manual_seed(dist.get_rank()))
    buckets = [torch.zeros(count) for count in bucket_sizes(plain)]
    seconds: Seconds = {name: [] for name in runs}
    alone: Seconds = {name: [] for name in ("sml", "Gloo")}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps):
        for name, (module, optimizer) in runs.items():
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = module(batch).square().mean()
            loss.backward()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(loss.item())
        for name in alone:
            dist.barrier()
            start = time.perf_counter()
            for bucket in buckets:
                dist.all_reduce(bucket, group=groups[name])
            alone[name].append(time.perf_counter() - start)
    # Two numbers have one sum; more are added in another order by Gloo's ring, and training
    # amplifies the difference.
    difference = max(
        abs(a - b) / abs(b) for a, b in zip(losses["sml"], losses["Gloo"], strict=True)
    )
    if difference > (0 if dist.get_world_size() == 2 else 1e-2):
        raise SystemExit(f"DDP over sml and over Gloo have different losses: {losses}")
    return {
        "seconds": seconds,
        "alone": alone,
        "difference": difference,
        "losses": (losses["sml"][0], losses["sml"][-1]),
        "parameters": sum(p.numel() for p in plain.parameters()),
        "buckets": len(buckets),
    }


def report(ranks: int, result: dict[str, Any]) -> list[str]:
    names = list(next(iter(result["sizes"].values())))
    rivals = [name for name in names if name not in ("sml", "c10d", "floor")]
    header = [
        "bytes",
        "sml",
        "spread",
        *rivals,
        *(f"{name} / sml" for name in rivals),
        "c10d",
        "floor",
        "floor / sml",
    ]
    rows = []
    for size, seconds in result["sizes"].items():
        median = {name: statistics.median(seconds[name]) for name in names}
        rows.append(
            [
                f"{int(size):,}",
                micro(median["sml"]),
                f"{micro(min(seconds['sml']))} to {micro(max(seconds['sml']))}",
                *(micro(median[name]) for name in rivals),
                *(f"{median[name] / median['sml']:.1f}" for name in rivals),
                micro(median["c10d"]),
                micro(median["floor"]),
                f"{median['floor'] / median['sml']:.2f}",
            ]
        )
    parts = [
        f"## {ranks} ranks",
        f"Medians of {ROUNDS} rounds ({FEW_ROUNDS} from {MANY_BYTES >> 20} MiB up), in µs a call. "
        f"MPI: {result['mpi'] or 'not here'}.",
        table(header, rows),
    ]
    if result["ddp"]:
        parts += [ABOUT_DDP, table(DDP_HEADER, [ddp_row(*item) for item in result["ddp"].items()])]
    return parts


def ddp_row(model: str, result: dict[str, Any]) -> list[str]:
    alone = {name: statistics.median(values) for name, values in result["alone"].items()}
    step = {name: statistics.median(values) for name, values in result["seconds"].items()}
    added = {name: step[name] - step["compute"] for name in alone}
    first, last = result["losses"]
    return [
        f"{model}, {result['parameters']:,} in {result['buckets']}",
        *(f"{alone[name] * 1e3:.2f}" for name in alone),
        f"{alone['Gloo'] / alone['sml']:.1f}",
        *(f"{step[name] * 1e3:.1f}" for name in step),
        f"{added['Gloo'] / added['sml']:.1f}" if added["sml"] > 0 else "sml's is hidden",
        f"{first:.4f} to {last:.4f}",
        "equal" if result["difference"] == 0 else f"{result['difference']:.0e}",
    ]


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def plot(results: dict[int, dict[str, Any]]) -> None:
    """Bandwidth over message size, a panel for each number of ranks."""
    figure, panels = subplots(
        1, len(results), figsize=(5.5 * len(results), 3.8), sharey=True, squeeze=False
    )
    for panel, (ranks, result) in zip(panels[0], results.items(), strict=True):
        sizes = [int(size) for size in result["sizes"]]
        for name in next(iter(result["sizes"].values())):
            medians = [statistics.median(result["sizes"][str(size)][name]) for size in sizes]
            style = "--" if name == "floor" else "-"
            panel.loglog(
                sizes, [s / m / 1e9 for s, m in zip(sizes, medians, strict=True)], style, label=name
            )
        panel.set(title=f"{ranks} ranks", xlabel="message (bytes)")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("message bytes / time (GB/s)")
    panels[0][0].legend()
    save(figure, IMAGE)


if __name__ == "__main__":
    main()
