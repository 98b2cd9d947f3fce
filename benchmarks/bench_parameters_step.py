"""A training step of an embedding: tables beside torch's and torchrec's, on the CPU.

    python benchmarks/bench_parameters_step.py    # about two minutes
    python benchmarks/bench_parameters_step.py --smoke

Writes ``results/parameters_step.md``. torchrec is a rival where it is installed (``pip install
torchrec fbgemm-gpu-cpu``, of the versions for this torch). Rivals take turns within one run, on the
same keys; with several processes each looks up keys of its own, and the slowest counts.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import free_port, parser_of, start_ranks, write
from report import table as markdown
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay.parameters import Embedding, EmbeddingBag, optim

DIM, LR = 64, 1e-3
CASES = [(rows, batch) for rows in (1_000, 500_000) for batch in (512, 8_192)]
PLACES = ("one process", "two processes", "two hosts")
Step = Callable[[Tensor], None]


def ours_adam(rows: int) -> Step:
    module = Embedding(rows, DIM, optimizer=optim.adam(LR))
    optimizer = module.table.optimizer()

    def step(keys: Tensor) -> None:
        optimizer.zero_grad()
        module(keys).square().mean().backward()
        optimizer.step()

    return step


def sparse_adam(rows: int) -> Step:
    module: nn.Module = nn.Embedding(rows, DIM, sparse=True)
    if dist.get_world_size() > 1:
        module = DistributedDataParallel(module)
    optimizer = torch.optim.SparseAdam(list(module.parameters()), lr=LR)

    def step(keys: Tensor) -> None:
        optimizer.zero_grad()
        module(keys).square().mean().backward()
        optimizer.step()  # type: ignore[no-untyped-call]

    return step


def ours_adagrad(rows: int) -> Step:
    module = EmbeddingBag(rows, DIM, mode="sum", optimizer=optim.adagrad(LR))
    optimizer = module.table.optimizer()

    def step(keys: Tensor) -> None:
        optimizer.zero_grad()
        module(keys, torch.arange(len(keys))).square().mean().backward()
        optimizer.step()

    return step


def torchrec_adagrad(rows: int) -> Step:
    """Bags of one key, sharded by torchrec's planner, with its fused Adagrad."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: PLC0415
    from torchrec import (  # noqa: PLC0415
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        KeyedJaggedTensor,
    )
    from torchrec.distributed import DistributedModelParallel  # noqa: PLC0415
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: PLC0415
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: PLC0415

    cpu = torch.device("cpu")
    config = EmbeddingBagConfig(
        name="table", embedding_dim=DIM, num_embeddings=rows, feature_names=["key"]
    )
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": LR}
    )
    collection = EmbeddingBagCollection([config], device=cpu)
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(
        collection, [sharder], dist.group.WORLD
    )
    module = DistributedModelParallel(collection, device=cpu, sharders=[sharder], plan=plan)

    def step(keys: Tensor) -> None:
        lengths = torch.ones(len(keys), dtype=torch.int64)
        bags = KeyedJaggedTensor(["key"], keys, lengths=lengths)
        module(bags).values().square().mean().backward()

    return step


def ways() -> dict[str, Callable[[int], Step]]:
    found: dict[str, Callable[[int], Step]] = {
        "ours, Adam": ours_adam,
        "SparseAdam": sparse_adam,
        "ours, Adagrad": ours_adagrad,
    }
    if importlib.util.find_spec("torchrec") and importlib.util.find_spec("fbgemm_gpu"):
        found["torchrec"] = torchrec_adagrad
    return found


def rank_main(
    rank: int,
    size: int,
    port: int,
    apart: bool,
    cases: list[tuple[int, int]],
    steps: int,
    out: Any,
) -> None:
    """Put the seconds of every step, by case and way."""
    warnings.simplefilter("ignore")  # of torchrec
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if apart:
        os.environ.update(
            TORCHRELAY_HOST_ID=str(rank),
            TORCHRELAY_TRANSPORT_INTERFACE="127.0.0.1",
            TORCHRELAY_TRANSPORT_LOCAL_SOCKETS="0",
        )
    dist.init_process_group("gloo")
    times: dict[str, list[float]] = {}
    for rows, batch in cases:
        made = {name: make(rows) for name, make in ways().items()}
        for _ in range(steps):
            keys = torch.randint(rows, (batch,))
            for name, step in made.items():
                dist.barrier()
                started_s = time.perf_counter()
                step(keys)
                took = torch.tensor(time.perf_counter() - started_s)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times.setdefault(f"{rows} {batch} {name}", []).append(took.item())
        del made
    if rank == 0:
        out.put(times)
    dist.destroy_process_group()


def measure(place: str, cases: list[tuple[int, int]], steps: int) -> dict[str, float]:
    """Median seconds of a step, by case and way, without the first steps."""
    size = 1 if place == PLACES[0] else 2
    port = free_port()
    out = mp.get_context("forkserver").SimpleQueue()
    start_ranks(rank_main, (size, port, place == PLACES[2], cases, steps, out), size)
    skipped = steps // 4
    return {name: statistics.median(times[skipped:]) for name, times in out.get().items()}


def main() -> None:
    parser = parser_of(__doc__, "two steps with small tables; writes nothing")
    steps, cases = (2, CASES[:1]) if parser.parse_args().smoke else (40, CASES)
    pairs = [("ours, Adam", "SparseAdam"), ("ours, Adagrad", "torchrec")]
    rows = []
    for place in PLACES:
        found = measure(place, cases, steps)
        for num_rows, batch in cases:
            cells = []
            for pair in pairs:
                ours, theirs = (found.get(f"{num_rows} {batch} {name}") for name in pair)
                assert ours is not None
                cells += [f"{ours * 1e3:.2f}"]
                cells += [f"{theirs * 1e3:.2f}", f"{ours / theirs:.2f}"] if theirs else ["", ""]
            rows.append([place, f"{num_rows:,}", f"{batch:,}", *cells])
            print(*rows[-1], sep=" | ", flush=True)
    if steps == 2:
        return
    write(
        "parameters_step",
        "A training step of an embedding",
        f"Milliseconds, {DIM} float32 a row, median of {steps - steps // 4} steps: look up, "
        "square, mean, backward, optimizer. SparseAdam: `nn.Embedding(sparse=True)`, with several "
        "processes in DistributedDataParallel over Gloo. torchrec: an `EmbeddingBagCollection`, "
        "sharded by its planner over Gloo, bags of one key. Two hosts are two processes that talk "
        "by TCP only.",
        markdown(
            [
                "place",
                "rows",
                "batch",
                "Embedding, Adam",
                "SparseAdam",
                "ratio",
                "EmbeddingBag, Adagrad",
                "torchrec, Adagrad",
                "ratio",
            ],
            rows,
        ),
    )


if __name__ == "__main__":
    main()
