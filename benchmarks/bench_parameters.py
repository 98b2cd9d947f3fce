"""The parameter manager beside torch's own ways: accesses per second.

    python benchmarks/bench_parameters.py [--smoke]

Writes ``results/parameters.md``. Training on two nodes: ``bench_parameters_wn18rr.py``. Two processes of this machine are the two nodes. Rivals take turns within one
run; each figure is the median of the rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from report import table as markdown
from report import write
from torch import Tensor, nn
from torch.distributed import rpc

from torchrelay.parameters import Embedding, Table, optim

KEYS, DIM, BATCH = 100_000, 64, 4096
Result = dict[str, list[float]]


def in_turns(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> Result:
    """Seconds a call takes, in each of ``rounds``; within a round each call runs ``repeats`` times in a row."""
    for call in calls.values():
        call()
    times: Result = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started_s = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - started_s) / repeats)
    return times


def local(rounds: int, repeats: int) -> Result:
    """One node, one worker."""
    torch.set_num_threads(1)
    keys, values, out = torch.randint(KEYS, (BATCH,)), torch.randn(BATCH, DIM), torch.empty(BATCH, DIM)
    weight = torch.randn(KEYS, DIM)
    with (
        Table.create(KEYS, DIM) as table,
        Table.create(KEYS, DIM, optimizer=optim.adam(), name="adam") as adam,
    ):
        table.set(torch.arange(KEYS), weight)
        assert torch.equal(table.pull(keys), weight[keys])
        ours = Embedding(KEYS, DIM, table=adam)
        theirs = nn.Embedding(KEYS, DIM, sparse=True)
        optimizer = torch.optim.SparseAdam(list(theirs.parameters()))

        def train_ours() -> None:
            ours(keys).square().sum().backward()

        def train_theirs() -> None:
            optimizer.zero_grad()
            theirs(keys).square().sum().backward()
            optimizer.step()  # type: ignore[no-untyped-call]

        return in_turns(
            {
                "local pull": lambda: table.worker.pull(keys, out),
                "index_select": lambda: torch.index_select(weight, 0, keys, out=out),
                "local push": lambda: table.worker.push(keys, values),
                "index_add": lambda: weight.index_add_(0, keys, values),
                "local set": lambda: table.worker.set(keys, values),
                "index_copy": lambda: weight.index_copy_(0, keys, values),
                "memcpy": lambda: out.copy_(values),
                "training step, Embedding with adam": train_ours,
                "training step, nn.Embedding(sparse) with SparseAdam": train_theirs,
                "intent": lambda: table.intent(keys, table.clock + 10),
            },
            rounds,
            repeats,
        )


_weight = torch.zeros(KEYS, DIM)


def _rpc_pull(keys: Tensor) -> Tensor:
    return _weight[keys]


def _rpc_push(keys: Tensor, values: Tensor) -> None:
    _weight.index_add_(0, keys, values)


def node(
    rank: int, size: int, nodes: int, port: int, rounds: int, repeats: int, out: SimpleQueue[Any]
) -> None:
    """One process of ``nodes`` nodes; accesses only keys that the next node owns."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    per_node = size // nodes
    mine = rank // per_node
    dist.init_process_group("gloo")
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"worker{rank}",
        rank=rank,
        world_size=size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port + 1}"),
    )
    with Table.create(KEYS, DIM, node_of_rank=lambda r: r // per_node) as table:
        owners = torch.arange(KEYS) % nodes
        theirs = (owners == (mine + 1) % nodes).nonzero().squeeze(1).contiguous()
        keys = theirs[torch.randint(len(theirs), (BATCH,))]
        values, into = torch.zeros(BATCH, DIM), torch.empty(BATCH, DIM)
        one, one_into = keys[:1].clone(), torch.empty(1, DIM)
        other = f"worker{(rank + per_node) % size}"
        calls: dict[str, Callable[[], object]] = {
            "remote pull": lambda: table.worker.pull(keys, into),
            "remote push": lambda: table.worker.push(keys, values),
            "remote pull of one key": lambda: table.worker.pull(one, one_into),
            "rpc pull": lambda: rpc.rpc_sync(other, _rpc_pull, args=(keys,)),
            "rpc push": lambda: rpc.rpc_sync(other, _rpc_push, args=(keys, values)),
            "rpc pull of one key": lambda: rpc.rpc_sync(other, _rpc_pull, args=(one,)),
        }
        times: Result = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                call()
                dist.barrier()
                started_s = time.perf_counter()
                for _ in range(repeats):
                    call()
                times[name].append((time.perf_counter() - started_s) / repeats)
                dist.barrier()
        table.sync()
        if per_node == 1:
            shares = [share.contiguous() for share in theirs.chunk(rounds)]
            times["relocation"] = [_relocate(table, share) / len(share) * BATCH for share in shares]
        table.sync()
    out.put((rank, times))
    rpc.shutdown()
    dist.destroy_process_group()


def _relocate(table: Table, keys: Tensor) -> float:
    """Seconds until ``keys``, announced now, are all here."""
    values = torch.empty(len(keys), DIM)
    dist.barrier()
    started_s = time.perf_counter()
    table.intent(keys, table.clock, table.clock + 1)
    while not table.worker.pull_if_local(keys, values):
        time.sleep(0.0005)
    seconds = time.perf_counter() - started_s
    dist.barrier()
    table.advance_clock()
    return seconds


def on_nodes(nodes: int, workers: int, rounds: int, repeats: int) -> Result:
    """The times of rank 0; all ranks do the same at once."""
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = nodes * workers
    processes = [
        context.Process(target=node, args=(rank, size, nodes, port, rounds, repeats, out))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    results: dict[int, Result] = {}
    while len(results) < size:
        if any(process.exitcode for process in processes):
            raise SystemExit("a process of the benchmark failed; its error is above")
        if out.empty():
            time.sleep(0.1)
        else:
            results.update([out.get()])
    for process in processes:
        process.join()
    return results[0]


def rate(times: list[float], batch: int = BATCH) -> str:
    """Million keys a second: the median, and the range."""
    values = sorted(batch / seconds / 1e6 for seconds in times)
    return f"{statistics.median(values):.2f} ({values[0]:.2f}-{values[-1]:.2f})"


def microseconds(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e6:.0f} ({min(times) * 1e6:.0f}-{max(times) * 1e6:.0f})"


def ratio(ours: list[float], rival: list[float]) -> str:
    """How many times as fast as the rival: the median over the rounds."""
    return f"{statistics.median(b / a for a, b in zip(ours, rival, strict=True)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="one tiny round of everything")
    options = parser.parse_args()
    rounds, repeats = (1, 2) if options.smoke else (7, 30)
    torch.set_num_threads(1)
    here = local(rounds, repeats)
    pairs = [
        ("local pull", "index_select"),
        ("local push", "index_add"),
        ("local set", "index_copy"),
    ]
    rows = [
        [ours, rate(here[ours]), rival, rate(here[rival]), ratio(here[ours], here[rival])]
        for ours, rival in pairs
    ]
    rows.append(["intent call", rate(here["intent"]), "", "", ""])
    rows.append(["floor: memcpy of the batch", rate(here["memcpy"]), "", "", ""])
    steps = ["training step, Embedding with adam", "training step, nn.Embedding(sparse) with SparseAdam"]
    rows.append(
        [
            steps[0],
            rate(here[steps[0]]),
            steps[1],
            rate(here[steps[1]]),
            ratio(here[steps[0]], here[steps[1]]),
        ]
    )
    apart = on_nodes(2, 1, rounds, repeats)
    for name in ("pull", "push"):
        ours, rival = apart[f"remote {name}"], apart[f"rpc {name}"]
        rows.append([f"remote {name}, synchronous", rate(ours), "torch RPC", rate(rival), ratio(ours, rival)])
    rows.append(["relocation", rate(apart["relocation"]), "", "", ""])
    double = on_nodes(2, 2, rounds, max(2, repeats // 2))
    for name in ("remote pull", "remote push"):
        both = [seconds / 2 for seconds in double[name]]
        rows.append(
            [
                f"{name}, two workers a node together",
                rate(both),
                "one worker",
                rate(apart[name]),
                ratio(both, apart[name]),
            ]
        )
    ours, rival = apart["remote pull of one key"], apart["rpc pull of one key"]
    single = [
        ["remote pull of one key", microseconds(ours), "torch RPC", microseconds(rival), ratio(ours, rival)]
    ]
    if options.smoke:
        print("ok")
        return
    header = ["operation", "ours", "rival", "rival's", "ratio"]
    write(
        "parameters",
        "The parameter manager",
        f"Million keys a second of one node, {DIM} float32 a key, batches of {BATCH}; median (smallest-largest) of "
        f"{rounds} rounds. Nodes are processes on this machine, both busy at once.",
        markdown(header, rows),
        "Microseconds.",
        markdown(header, single),
    )


if __name__ == "__main__":
    main()
