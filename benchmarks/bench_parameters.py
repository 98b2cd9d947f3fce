"""The parameter manager beside torch's own ways: accesses per second.

    python benchmarks/bench_parameters.py [--smoke]

Writes ``results/parameters.md``. Training on two nodes: ``bench_parameters_wn18rr.py``. Two
processes of this machine, or four, are the two nodes; they speak TCP over the loopback device, once
without a key and once encrypted (``transport.key``). Rivals take turns within one run;
each figure is the median of the rounds, with the smallest and the largest. The floors move the same
bytes with nothing else to do: a copy in memory for what is local, a request and its answer over a
bare TCP connection for what is remote.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from report import free_port, parser_of, write
from report import table as markdown
from torch import Tensor, nn
from torch.distributed import rpc

from torchrelay.parameters import Embedding, Table, optim

KEYS, DIM, BATCH = 100_000, 64, 4096
NETWORKS = {"plain": "", "encrypted": "3a" * 32}  # their keys
# What a batch takes on the wire: each key with its place and the age of what is known of it, and
# its value.
ASK_BYTES, VALUE_BYTES = 16, 4 * DIM
Result = dict[str, list[float]]
Calls = dict[str, Callable[[], object]]


def in_turns(calls: Calls, rounds: int, repeats: int) -> Result:
    """Seconds a call takes, in each of ``rounds``; within a round each call runs ``repeats`` times
    in a row.
    """
    for call in calls.values():
        call()
    times: Result = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds(call, repeats))
    return times


def _seconds(call: Callable[[], object], repeats: int) -> float:
    started_s = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started_s) / repeats


def local(rounds: int, repeats: int) -> Result:
    """One node, one worker."""
    torch.set_num_threads(1)
    keys, values, out = (
        torch.randint(KEYS, (BATCH,)),
        torch.randn(BATCH, DIM),
        torch.empty(BATCH, DIM),
    )
    weight = torch.randn(KEYS, DIM)
    with (
        Table.create(KEYS, DIM) as table,
        Table.create(
            KEYS, DIM, optimizer=optim.adam(), name="adam", apply_gradients="backward"
        ) as adam,
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
                "pull": lambda: table.pull(keys, out),
                "index_select": lambda: torch.index_select(weight, 0, keys, out=out),
                "push": lambda: table.push(keys, values),
                "index_add": lambda: weight.index_add_(0, keys, values),
                "set": lambda: table.set(keys, values),
                "index_copy": lambda: weight.index_copy_(0, keys, values),
                "memcpy": lambda: out.copy_(values),
                "train_ours": train_ours,
                "train_theirs": train_theirs,
            },
            rounds,
            repeats,
        )


_weight = torch.zeros(KEYS, DIM)


def _rpc_pull(keys: Tensor) -> Tensor:
    return _weight[keys]


def _rpc_push(keys: Tensor, values: Tensor) -> None:
    _weight.index_add_(0, keys, values)


def _bare_tcp(rank: int, other: int, sizes: dict[str, tuple[int, int]]) -> Calls:
    """The floors: calls that exchange the bytes of ``sizes`` (request, answer) with process
    ``other``.
    """
    calls: Calls = {}
    for name, (request, answer) in sizes.items():
        listener = socket.create_server(("127.0.0.1", 0))
        ports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ports, listener.getsockname()[1])
        client = socket.create_connection(("127.0.0.1", ports[other]))
        server, _ = listener.accept()
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve_tcp, args=(server, request, answer), daemon=True).start()
        calls[name] = _asks_tcp(client, request, answer)
    return calls


def _asks_tcp(end: socket.socket, request: int, answer: int) -> Callable[[], None]:
    out, into = bytes(request), memoryview(bytearray(answer))

    def ask() -> None:
        end.sendall(out)
        _fill(end, into)

    return ask


def _serve_tcp(end: socket.socket, request: int, answer: int) -> None:
    out, into = bytes(answer), memoryview(bytearray(request))
    while _fill(end, into):
        end.sendall(out)


def _fill(end: socket.socket, into: memoryview) -> bool:
    at = 0
    while at < len(into):
        got = end.recv_into(into[at:])
        if got == 0:
            return False
        at += got
    return True


def _accesses(table: Table, theirs: Tensor) -> Calls:
    """Accesses to keys that another node owns, checked once."""
    keys = theirs[torch.randint(len(theirs), (BATCH,))]
    values, into = torch.ones(BATCH, DIM), torch.empty(BATCH, DIM)
    one, one_into = keys[:1].clone(), torch.empty(1, DIM)
    before = table.pull(keys)
    table.push(keys, values)
    repeated = (keys[:, None] == keys[None, :]).sum(1, keepdim=True)
    assert torch.equal(table.pull(keys), before + repeated)
    values.zero_()
    far = table.clock + 1_000_000  # so far ahead that nothing moves
    return {
        "pull": lambda: table.pull(keys, into),
        "push": lambda: table.push(keys, values),
        "one key": lambda: table.pull(one, one_into),
        "intent": lambda: table.intent(keys, far),
    }


def node(
    rank: int, size: int, ports: list[int], rounds: int, repeats: int, out: SimpleQueue[Any]
) -> None:
    """One process of two nodes; accesses only keys that the other node owns."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(ports[0]),
        TORCHRELAY_TRANSPORT_LOCAL_SOCKETS="0",
    )
    per_node = size // 2
    mine, other = rank // per_node, (rank + per_node) % size
    dist.init_process_group("gloo")
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"worker{rank}",
        rank=rank,
        world_size=size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{ports[1]}"
        ),
    )
    theirs = torch.arange(1 - mine, KEYS, 2)
    keys, one, values = (
        theirs[torch.randint(len(theirs), (BATCH,))],
        theirs[:1],
        torch.zeros(BATCH, DIM),
    )
    peer = f"worker{other}"
    calls: Calls = {
        "pull, RPC": lambda: rpc.rpc_sync(peer, _rpc_pull, args=(keys,)),
        "push, RPC": lambda: rpc.rpc_sync(peer, _rpc_push, args=(keys, values)),
        "one key, RPC": lambda: rpc.rpc_sync(peer, _rpc_pull, args=(one,)),
    }
    full, empty = BATCH * (ASK_BYTES + VALUE_BYTES), BATCH * ASK_BYTES
    sizes = {
        "pull, floor": (empty, full),
        "push, floor": (full, empty),
        "one key, floor": (100, 400),
    }
    calls |= _bare_tcp(rank, other, sizes)
    tables = {}
    for network, key in NETWORKS.items():
        os.environ["TORCHRELAY_TRANSPORT_KEY"] = key
        tables[network] = Table.create(
            KEYS, DIM, name=network, node_of_rank=lambda r: r // per_node
        )
        # one after the other, so that each finds its own pushes
        for turn in range(size):
            dist.barrier()
            if turn == rank:
                accesses = _accesses(tables[network], theirs)
                calls |= {f"{name}, {network}": call for name, call in accesses.items()}
            dist.barrier()
    times = _measure(calls, mine, rounds, repeats)
    if per_node == 1:
        for network, table in tables.items():
            shares = [share.contiguous() for share in theirs.chunk(rounds)]
            times[f"relocation, {network}"] = [
                _relocate(table, share) / len(share) * BATCH for share in shares
            ]
    for table in tables.values():
        table.sync()
        table.close()
    out.put((rank, times))
    rpc.shutdown()
    dist.destroy_process_group()


def _measure(calls: Calls, mine: int, rounds: int, repeats: int) -> Result:
    """Seconds of each call, with node 0 asking alone (``one``) and with both nodes asking
    (``both``).
    """
    times: Result = {f"{name}, {who}": [] for name in calls for who in ("one", "both")}
    for _ in range(rounds):
        for name, call in calls.items():
            for who in ("one", "both"):
                call()
                dist.barrier()
                if who == "both" or mine == 0:
                    times[f"{name}, {who}"].append(_seconds(call, repeats))
                dist.barrier()
    return times


def _relocate(table: Table, keys: Tensor) -> float:
    """Seconds until ``keys``, announced now, are all here."""
    dist.barrier()
    started_s = time.perf_counter()
    table.intent(keys, table.clock, table.clock + 1)
    while not table.is_local(keys):
        time.sleep(0.0002)
    seconds = time.perf_counter() - started_s
    dist.barrier()
    table.advance_clock()
    return seconds


def on_two_nodes(workers: int, rounds: int, repeats: int) -> list[Result]:
    """The times of node 0's workers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torchrelay.parameters"])
    out = context.SimpleQueue()
    ports = [free_port(), free_port()]
    size = 2 * workers
    processes = [
        context.Process(target=node, args=(rank, size, ports, rounds, repeats, out), daemon=True)
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
    return [results[rank] for rank in range(workers)]


def rate(times: list[float]) -> str:
    """Million keys a second: the median, and the range."""
    values = sorted(BATCH / seconds / 1e6 for seconds in times)
    return f"{statistics.median(values):.1f} ({values[0]:.1f}-{values[-1]:.1f})"


def microseconds(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e6:.0f} ({min(times) * 1e6:.0f}-{max(times) * 1e6:.0f})"


def ratio(ours: list[float], rival: list[float]) -> str:
    """How many times as fast as the rival: the median over the rounds."""
    return f"{statistics.median(b / a for a, b in zip(ours, rival, strict=True)):.2f}"


def together(workers: list[Result], name: str) -> list[float]:
    """Seconds a batch takes a node whose workers each do one at the same time."""
    each = zip(*(times[name] for times in workers), strict=True)
    return [1 / sum(1 / seconds for seconds in round_) for round_ in each]


def local_rows(times: Result) -> list[list[str]]:
    pairs = [
        ("pull", "index_select", "30"),
        ("push", "index_add", "15"),
        ("set", "index_copy", "20"),
    ]
    floor = rate(times["memcpy"])
    rows = [
        [
            ours,
            rate(times[ours]),
            rival,
            rate(times[rival]),
            ratio(times[ours], times[rival]),
            floor,
            goal,
        ]
        for ours, rival, goal in pairs
    ]
    ours, theirs = times["train_ours"], times["train_theirs"]
    return [
        *rows,
        [
            "a training step: Embedding, Adam in the store",
            rate(ours),
            "nn.Embedding(sparse=True), SparseAdam",
            rate(theirs),
            ratio(ours, theirs),
            "",
            "",
        ],
    ]


def remote_rows(
    times: Result, show: Callable[[list[float]], str], goals: dict[str, str]
) -> list[list[str]]:
    rows = []
    for name, goal in goals.items():
        for who, asks in (("one", "one node asks"), ("both", "both ask at once")):
            rpc_s, floor_s = times[f"{name}, RPC, {who}"], times[f"{name}, floor, {who}"]
            for network in NETWORKS:
                ours = times[f"{name}, {network}, {who}"]
                rows.append(
                    [
                        f"{name}, {asks}, {network}",
                        show(ours),
                        show(rpc_s),
                        ratio(ours, rpc_s),
                        show(floor_s),
                        goal,
                    ]
                )
    return rows


def main() -> None:
    options = parser_of(__doc__, "one tiny round of everything").parse_args()
    rounds, repeats = (1, 2) if options.smoke else (7, 20)
    here = local(rounds, repeats)
    single = on_two_nodes(1, rounds, repeats)
    double = on_two_nodes(2, rounds, repeats)
    apart = single[0]
    announced = [
        [
            network,
            rate(apart[f"intent, {network}, one"]),
            rate(apart[f"relocation, {network}"]),
        ]
        for network in NETWORKS
    ]
    doubled = []
    for name in ("pull", "push"):
        for who, asks in (("one", "one node asks"), ("both", "both ask at once")):
            for network in NETWORKS:
                case = f"{name}, {network}, {who}"
                both = together(double, case)
                cells = [rate(both), rate(apart[case]), ratio(both, apart[case])]
                doubled.append([f"{name}, {asks}, {network}", *cells, "1.5"])
    if options.smoke:
        print("ok")
        return
    write(
        "parameters",
        "The parameter manager",
        f"Million keys a second, {DIM} float32 a key, batches of {BATCH}; median "
        f"(smallest-largest) of {rounds} rounds. The ratio is to the rival; the last column is the "
        "figure to reach.",
        "One node, one worker; the floor is a copy of the batch.",
        markdown(
            ["operation", "ours", "rival", "rival's", "ratio", "floor", "reach"], local_rows(here)
        ),
        "Two nodes, one worker each, synchronous accesses to keys of the other node: each worker's "
        "rate; the floor is a bare TCP connection.",
        markdown(
            ["operation", "ours", "torch RPC", "ratio", "floor", "reach"],
            remote_rows(apart, rate, {"pull": "6", "push": "6"}),
        ),
        "The same, microseconds.",
        markdown(
            ["operation", "ours", "torch RPC", "ratio", "floor", "reach"],
            remote_rows(apart, microseconds, {"one key": "80 or less"}),
        ),
        "Announcing keys (the call alone; to reach: 20), and until they have been relocated here "
        "while as many go the other way (2).",
        markdown(["network", "intent call", "relocation"], announced),
        "Two workers a node beside one: the node's rate.",
        markdown(["operation", "two workers", "one worker", "ratio", "reach"], doubled),
    )


if __name__ == "__main__":
    main()
