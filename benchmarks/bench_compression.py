"""Compression between hosts: times of sums over slow links, and losses of training with it.

    python benchmarks/bench_compression.py            # about four minutes
    python benchmarks/bench_compression.py --smoke    # writes nothing

The times need root and iproute2; hosts are network namespaces, as in ``bench_hosts.py``. The losses
are those of two ranks that count as two hosts, of the demo's model and of a small transformer, both
on real data: the code graph of a quarter of the standard library, and its text.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import parser_of, start_ranks, table, write
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import namespaces
from torchrelay.aggregation import CompressionState, Options, compression_hook
from torchrelay.demo.code_graph import code_graph, read_code_graph, standard_library
from torchrelay.demo.model import ComplEx
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.training import Batches
from torchrelay.demo.triples import Graph
from torchrelay.world import World

SIZE_BYTES = 16 << 20
# Hosts by letters, and Mbit/s; 0: not limited.
LINKS = (("aabb", 100), ("aabbcc", 100), ("aabb", 1000), ("aabb", 0))
WAYS = ("none", "bf16", "int8")
STEPS, SEEDS, LAST = 2000, (0, 1), 200
ROUNDS = 3
OPTIONS = DemoOptions(quick=True, batch_size=512, negatives=256, dim=16)
CONTEXT, BATCH, WIDTH = 32, 4, 64  # of the transformer, in bytes, and texts for each rank


# --- times


def time_rank(rank: int, placement: str, hosts: namespaces.Hosts, path: str, rounds: int) -> None:
    """Time Gloo and each way in turn; rank 0 writes the seconds to ``path``.json."""
    namespaces.enter(hosts.pids["abc".index(placement[rank])])
    os.environ.update(
        TORCHRELAY_HOST_ID=placement[rank],
        TORCHRELAY_TRANSPORT_INTERFACE="eth0",
        GLOO_SOCKET_IFNAME="eth0",
    )
    torch.set_num_threads(1)
    store = dist.FileStore(path, len(placement))
    dist.init_process_group("sml", store=store, rank=rank, world_size=len(placement))
    groups: dict[str, Any] = {"gloo": dist.new_group(backend="gloo")}
    for way in WAYS:
        groups[way] = dist.new_group(backend="sml", pg_options=Options(compression=way))
    given = torch.randn(SIZE_BYTES // 4, generator=torch.Generator().manual_seed(rank))
    times: dict[str, list[float]] = {name: [] for name in groups}
    for round_ in range(rounds + 1):
        sums = {}
        for name, group in groups.items():
            sums[name] = given.clone()
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(sums[name], group=group)
            dist.barrier()
            if round_ > 0:
                times[name].append(time.perf_counter() - started)
        for name in WAYS:
            error = (sums[name] - sums["gloo"]).abs().max() / sums["gloo"].abs().max()
            assert error < (1e-5 if name == "none" else 0.02), (name, error)
    if rank == 0:
        Path(f"{path}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def time_links(placement: str, mbit: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of an all_reduce, by way."""
    with (
        tempfile.TemporaryDirectory() as folder,
        namespaces.switched(len(set(placement))) as hosts,
    ):
        if mbit:
            hosts.limit(mbit)
        path = f"{folder}/store"
        start_ranks(time_rank, (placement, hosts, path, rounds), len(placement))
        times = json.loads(Path(f"{path}.json").read_text())
    return {name: statistics.median(values) for name, values in times.items()}


# --- losses


class Transformer(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text[:, :-1]) + self.places.weight
        x = self.layers(x, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), text[:, 1:].flatten())


Steps = Iterator[tuple[Any, ...]]  # arguments of the model in each step
# A model, its optimizer, and its steps by seed.
Training = tuple[
    Callable[[], nn.Module], Callable[..., torch.optim.Optimizer], Callable[[int], Steps]
]


def read_text() -> Tensor:
    files = sorted(standard_library().glob("*.py"))[::4]
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def texts(text: Tensor, rank: int, seed: int) -> Steps:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        yield (torch.stack([text[at : at + CONTEXT + 1] for at in starts.tolist()]).long(),)


def facts(graph: Graph, rank: int, seed: int) -> Steps:
    world = World(rank, 2)
    options = DemoOptions(**{**vars(OPTIONS), "seed": seed})
    batches = Batches(graph, options, world)
    for epoch in itertools.count():
        for triples, negatives in batches.epoch(epoch):
            yield triples, negatives, options.regularisation


def loss_of(
    build: Callable[[], nn.Module],
    optimizer_of: Callable[..., torch.optim.Optimizer],
    inputs: Steps,
    way: str,
    seed: int,
    steps: int,
) -> float:
    """Train; return the mean loss of both ranks in the last steps."""
    torch.manual_seed(seed)
    model = build()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way != "none":
        ddp.register_comm_hook(CompressionState(model, way), compression_hook)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in itertools.islice(inputs, steps):
        loss = ddp(*step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    mean = torch.tensor(losses[-LAST:]).mean()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return float(mean)


def train_rank(rank: int, path: str, steps: int, seeds: tuple[int, ...]) -> None:
    """Train both models, each way and seed; rank 0 writes the losses to ``path``.json."""
    os.environ["TORCHRELAY_HOST_ID"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("sml", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    graph = code_graph(read_code_graph(standard_library(), slice(None, None, 4)))
    text = read_text()
    sizes = len(graph.entities), len(graph.relations), OPTIONS.dim
    models: dict[str, Training] = {
        "ComplEx (the demo's)": (
            partial(ComplEx, *sizes),
            partial(torch.optim.Adagrad, lr=0.1),
            partial(facts, graph, rank),
        ),
        "transformer": (
            Transformer,
            partial(torch.optim.AdamW, lr=1e-3, fused=True),
            partial(texts, text, rank),
        ),
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    for seed in seeds:
        for name, (build, optimizer_of, inputs) in models.items():
            for way in WAYS:
                loss = loss_of(build, optimizer_of, inputs(seed), way, seed, steps)
                found[name].setdefault(way, []).append(loss)
                if rank == 0:
                    print(name, way, seed, f"{loss:.4f}", flush=True)
    if rank == 0:
        Path(f"{path}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def losses(steps: int, seeds: tuple[int, ...]) -> dict[str, dict[str, list[float]]]:
    """Return the loss of each seed, by model and way."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/store"
        start_ranks(train_rank, (path, steps, seeds), 2)
        return json.loads(Path(f"{path}.json").read_text())  # type: ignore[no-any-return]


def main() -> None:
    smoke = parser_of(__doc__, "few rounds; writes nothing").parse_args().smoke
    if reason := namespaces.missing("tc"):
        print(f"bench_compression: skipped, {reason}")
        return
    rows = []
    for placement, mbit in LINKS[3 * smoke :]:
        times = time_links(placement, mbit, 1 if smoke else ROUNDS)
        gloo, plain = times["gloo"], times["none"]
        for way in WAYS:
            took = times[way]
            size = f"{len(set(placement))} x {placement.count('a')}"
            ratios = f"{gloo / took:.1f}", f"{plain / took:.1f}"
            link = f"{mbit} Mbit/s" if mbit else "not limited"
            rows.append([size, link, way, f"{took * 1e3:.0f} ms", *ratios])
            print(*rows[-1], sep=" | ", flush=True)
    found = losses(2 if smoke else STEPS, SEEDS[:1] if smoke else SEEDS)
    trained = []
    for model, ways in found.items():
        for way, values in ways.items():
            change = statistics.fmean(values) / statistics.fmean(ways["none"]) - 1
            shown = ", ".join(f"{value:.4f}" for value in values)
            trained.append([model, way, shown, f"{statistics.fmean(values):.4f}", f"{change:+.2%}"])
    if not smoke:
        header = ["hosts x ranks", "links", "compression", "sml", "Gloo / it", "none / it"]
        about = (
            f"Losses after {STEPS:,} steps, of two hosts of one rank, the mean of the last {LAST} "
            f"steps, for the seeds {', '.join(map(str, SEEDS))}; with `compression_hook`, or none. "
            f"ComplEx: {OPTIONS.dim} complex numbers, batches of {OPTIONS.batch_size}, Adagrad. "
            f"Transformer: two layers of width {WIDTH}, batches of {2 * BATCH} times {CONTEXT} "
            "bytes, AdamW."
        )
        trained_header = ["model", "compression", "of each seed", "mean", "compared with none"]
        notes = (
            f"all_reduce of {SIZE_BYTES >> 20} MiB float32, median of {ROUNDS}; in turn, a barrier "
            "at the end. Gloo sends float32."
        )
        parts = [table(header, rows), about, table(trained_header, trained)]
        write("compression", "Compression between hosts", notes, *parts)


if __name__ == "__main__":
    main()
