"""all_reduce of float32 on one host: ``sml``, Gloo and Open MPI, interleaved in the same processes; and a DDP step.

    python benchmarks/bench_aggregation.py            # 8 B to 256 MiB on 2 and on 4 ranks: about 3 minutes
    python benchmarks/bench_aggregation.py --smoke    # one tiny iteration; writes nothing

The floor is what the memory allows: each rank copies the message's bytes once (every byte must be read and written),
all ranks at the same time. A result is checked before it is timed. Only ratios mean something on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
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
from report import table, write

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "aggregation.png"
SIZES = (8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
ROUNDS = 9
# Of the largest messages, which take seconds.
FEW_ROUNDS, MANY_BYTES = 5, 16 << 20
# How long one rival is timed in one round, and at most how often it is called.
ROUND_S = 0.03
MOST_CALLS = 200
STEPS = 12

Seconds = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="one tiny iteration; writes nothing")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.smoke)
        return
    results = {ranks: launch(ranks, arguments.smoke) for ranks in ((2,) if arguments.smoke else (2, 4))}
    parts = [part for ranks, result in results.items() for part in report(ranks, result)]
    print("\n\n".join(parts))
    if not arguments.smoke:
        write("aggregation", "all_reduce on one host", (__doc__ or "").split("\n\n")[-1].strip(), *parts)
        plot(results)


def launch(ranks: int, smoke: bool) -> dict[str, Any]:
    """Runs the ranks, under mpirun where there is one, and returns what rank 0 measured."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
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
        worker = [sys.executable, __file__, "--worker", str(out), *(["--smoke"] if smoke else [])]
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
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


def work(out: Path, smoke: bool) -> None:
    """One rank."""
    import torchrelay.aggregation  # noqa: F401, PLC0415 - registers the backend
    from torchrelay.world import World  # noqa: PLC0415

    torch.set_num_threads(1)
    world = World.from_environment()
    dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=world.size)
    gloo = dist.new_group(backend="gloo")
    result: dict[str, Any] = {"sizes": {}, "mpi": mpi_version()}
    for size in SIZES[:3] if smoke else SIZES:
        rivals = make_rivals(size, gloo)
        check(rivals, world.size)
        result["sizes"][str(size)] = race(
            rivals, rounds=1 if smoke else ROUNDS if size < MANY_BYTES else FEW_ROUNDS
        )
    result["ddp"] = ddp(gloo, steps=2 if smoke else STEPS)
    if world.rank == 0:
        out.write_text(json.dumps(result))
    dist.destroy_process_group()


def mpi_version() -> str | None:
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError):
        return None
    return str(MPI.Get_library_version().split(",")[0]).strip() if MPI.COMM_WORLD.size > 1 else None


def make_rivals(size: int, gloo: Any) -> dict[str, tuple[torch.Tensor, Callable[[], object]]]:
    """Each with a tensor of its own, of ``size`` bytes."""
    tensors = [torch.ones(size // 4) for _ in range(4)]
    ours, theirs, mpis, source = tensors
    rivals: dict[str, tuple[torch.Tensor, Callable[[], object]]] = {
        "sml": (ours, lambda: dist.all_reduce(ours)),
        "Gloo": (theirs, lambda: dist.all_reduce(theirs, group=gloo)),
    }
    if mpi_version():
        from mpi4py import MPI  # noqa: PLC0415

        array = mpis.numpy()
        rivals["Open MPI"] = (mpis, lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array))
    copy = torch.empty_like(source)
    rivals["floor"] = (copy, lambda: copy.copy_(source))
    return rivals


def check(rivals: dict[str, tuple[torch.Tensor, Callable[[], object]]], ranks: int) -> None:
    for name, (tensor, call) in rivals.items():
        call()
        want = 1 if name == "floor" else ranks
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


def ddp(gloo: Any, steps: int) -> dict[str, Any]:
    """Steps of one model over both backends, and without communication; losses must be equal."""
    from torchrelay.aggregation import Options  # noqa: PLC0415

    groups = {
        "sml": dist.group.WORLD,
        "Gloo": gloo,
        "compute": dist.new_group(backend="sml", pg_options=Options(plane="dummy")),
    }
    runs = {}
    for name, group in groups.items():
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        plain = torch.nn.Sequential(*[torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)])
        module = torch.nn.parallel.DistributedDataParallel(plain, process_group=group)
        runs[name] = (module, torch.optim.SGD(module.parameters(), lr=0.01))
    batch = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds: Seconds = {name: [] for name in runs}
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
    if dist.get_world_size() == 2 and losses["sml"] != losses["Gloo"]:
        raise SystemExit("DDP over sml and over Gloo have different losses")
    parameters = sum(p.numel() for p in runs["sml"][0].parameters())
    return {"seconds": seconds, "losses": losses, "parameters": parameters}


def report(ranks: int, result: dict[str, Any]) -> list[str]:
    names = list(next(iter(result["sizes"].values())))
    rivals = [name for name in names if name not in ("sml", "floor")]
    header = [
        "bytes",
        "sml",
        "spread",
        *rivals,
        *(f"{name} / sml" for name in rivals),
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
                micro(median["floor"]),
                f"{median['floor'] / median['sml']:.2f}",
            ]
        )
    step = {name: statistics.median(values) for name, values in result["ddp"]["seconds"].items()}
    exposed = {name: step[name] - step["compute"] for name in ("sml", "Gloo")}
    ratio = f"{exposed['Gloo'] / exposed['sml']:.1f}" if exposed["sml"] > 0 else "all of it hidden by sml"
    return [
        f"## {ranks} ranks",
        f"Medians of {ROUNDS} rounds ({FEW_ROUNDS} from {MANY_BYTES >> 20} MiB up), in µs a call. MPI: {result['mpi'] or 'not here'}.",
        table(header, rows),
        f"A DDP step of {result['ddp']['parameters']:,} parameters: {step['sml'] * 1e3:.1f} ms over sml, "
        f"{step['Gloo'] * 1e3:.1f} ms over Gloo, {step['compute'] * 1e3:.1f} ms with no communication (dummy plane). "
        f"What communication adds, Gloo / sml: {ratio}.",
    ]


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def plot(results: dict[int, dict[str, Any]]) -> None:
    """Bandwidth over message size, a panel for each number of ranks."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(
        1, len(results), figsize=(5.5 * len(results), 3.8), sharey=True, squeeze=False
    )
    for panel, (ranks, result) in zip(panels[0], results.items(), strict=True):
        sizes = [int(size) for size in result["sizes"]]
        for name in next(iter(result["sizes"].values())):
            medians = [statistics.median(result["sizes"][str(size)][name]) for size in sizes]
            style = "--" if name == "floor" else "-"
            panel.loglog(sizes, [s / m / 1e9 for s, m in zip(sizes, medians, strict=True)], style, label=name)
        panel.set(title=f"{ranks} ranks", xlabel="message (bytes)")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("message bytes / time (GB/s)")
    panels[0][0].legend()
    figure.tight_layout()
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, dpi=120)


if __name__ == "__main__":
    main()
