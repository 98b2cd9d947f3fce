"""Checkpoints in memory of two hosts: what a save of every step costs, and how soon a job resumes.

    python benchmarks/bench_checkpoint_memory.py            # about three minutes
    python benchmarks/bench_checkpoint_memory.py --smoke    # small and short; writes nothing

Needs root and iproute2. Two hosts in network namespaces, with a rank each that has half of the
state. A step is an amount of matrix multiplication that takes a second on one core, and a step of
an optimizer, which changes nothing because there are no gradients. The stall is the time within the
call and, with overlap, that the optimizer waits for the copy; what a step takes in all also has
what the memory servers, the writer processes or the threads of the saver take from the trainers'
cores. One copy is that of a rank's part, by torch, into memory that was used before. A job resumes
by the first load of a process, which also runs code for the first time and may start a memory
server; a second one shows what of that recurs.
torch_checkpointing is compared where it is installed
(`.ci/overlay rivals --no-deps torch-checkpointing`, then `build/rivals/bin/python`);
nvidia-resiliency-ext 0.4.1 refuses tensors that are not on a GPU.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from report import parser_of, spread, table, write
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from torchrelay.checkpoint import Checkpointer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import namespaces
from memory_jobs import end_servers, server_pid
from preloaded import IMPORTED

SIZE_BYTES = 500_000_000
LINK_MBIT = 1000  # for the loss of a host
_TENSORS = 20


def _state(size_bytes: int, value: float) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", [*range(dist.get_world_size())])
    rows = size_bytes // 4 // _TENSORS // 1000 // 12 * 12  # divisible by all numbers of ranks
    state: dict[str, Any] = {
        f"w{i}": distribute_tensor(torch.full((rows, 1000), value), mesh, [Shard(0)])
        for i in range(_TENSORS)
    }
    return state


def _step_of(seconds: float) -> Callable[[], None]:
    """An amount of work that takes so long now."""
    one = torch.randn(600, 600)

    def work(count: int) -> None:
        for _ in range(count):
            torch.mm(one, one)

    work(10)
    start = time.perf_counter()
    work(50)
    count = max(1, int(50 * seconds / (time.perf_counter() - start)))
    return lambda: work(count)


def _saver_of_dcp(folder: str, state: dict[str, Any]) -> Callable[[], Any]:
    """A save in a thread; returns what waits for it."""
    path, threads = f"{folder}/dcp", dist.new_group()  # its thread communicates, too

    def save() -> Any:
        shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        written: Any = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(path, sync_files=False),
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            process_group=threads,
        )
        return written.result

    return save


def _saver_of_torch_checkpointing(
    folder: str, state: dict[str, Any], ends: list[Callable[[], None]]
) -> Callable[[], Any] | None:
    """A save in another process, of the tensors of this rank; returns what waits for it."""
    try:
        from torch_checkpointing import CheckpointManager, config, staging  # noqa: PLC0415
        from torch_checkpointing.storage import filesystem  # noqa: PLC0415
    except ImportError:
        return None
    stage = staging.CheckpointStagerConfig(
        use_async_staging=False, use_pinned_memory=False, use_non_blocking_copy=False
    )
    process = config.CheckpointProcessConfig(subprocess_init_timeout_secs=120)
    manager = CheckpointManager(
        CheckpointManager.Config(
            save=config.AsyncCheckpointSaverConfig(staging_config=stage, process_config=process),
            storage_config=filesystem.LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    ends.append(manager.close)
    local = {name: one.to_local() for name, one in state.items()}
    number = 0

    def save() -> Any:
        nonlocal number
        number += 1
        shutil.rmtree(f"{folder}/torch_checkpointing-{number - 1}", ignore_errors=True)
        written: Any = manager.save(f"{folder}/torch_checkpointing-{number}", {"model": local})
        return written.result

    return save


def _saves(folder: str, size_bytes: int, rounds: int, step_s: float) -> dict[str, Any]:
    """Seconds in the call, and of the step and the call, by the way to save; in turn."""
    state, step = _state(size_bytes, 1.0), _step_of(step_s)
    optimizer = torch.optim.SGD([*state.values()])
    number = 0
    ends: list[Callable[[], None]] = []

    def saver(**options: Any) -> Callable[[], Any]:
        job = Checkpointer(f"{folder}/{options or 'alone'}", disk_every=None, **options)
        ends.append(partial(job.close, drop=True))

        def save() -> Any:
            job.save({**state, "optimizer": optimizer}, step=number)
            return job.wait

        return save

    kept = Checkpointer(f"{folder}/ckpt", partner=True, disk_every=None)
    local = [one.to_local() for one in state.values()]
    copies = [torch.zeros_like(one) for one in local]

    def copy() -> Any:
        for into, one in zip(copies, local, strict=True):
            into.copy_(one)
        return lambda: None

    ways: dict[str, Callable[[], Any] | None] = {
        "no save": lambda: lambda: None,
        "one copy, by torch": copy,
        "memory and partner": saver(partner=True),
        "memory": saver(),
        "memory and partner, overlap": saver(partner=True, overlap=True),
        "memory, overlap": saver(overlap=True),
        "DCP async_save to disk, a thread": _saver_of_dcp(folder, state),
        "torch_checkpointing to disk, a process": _saver_of_torch_checkpointing(
            folder, state, ends
        ),
    }
    times: dict[str, Any] = {name: {"call": [], "step": []} for name, save in ways.items() if save}
    for round_ in range(rounds + 1):
        for name in times:
            save, wait = ways[name], None
            assert save is not None
            for _ in range(3):  # the first of a way has what the way before left
                number += 1
                dist.barrier()
                start = time.perf_counter()
                if wait is not None and "disk" in name:
                    wait()  # one at a time
                wait = save()
                called = time.perf_counter()
                step()
                computed = time.perf_counter()
                optimizer.step()
                waited_s = time.perf_counter() - computed
                dist.barrier()
                ended = time.perf_counter()
            if round_ > 0:  # memory is made, and processes are started, in the first
                times[name]["call"].append(called - start + waited_s)
                times[name]["step"].append(ended - start)
            assert wait is not None
            wait()
    for end in ends:
        end()
    kept.save(state, step=1)
    kept.close()
    return times


def _loads(folder: str, size_bytes: int, rounds: int, step_s: float) -> dict[str, Any]:
    """Seconds of a load of what is in memory, and of one copy of a rank's part."""
    state = _state(size_bytes, 0.0)
    took = []
    for _ in range(2):
        job = Checkpointer(f"{folder}/ckpt", partner=True, disk_every=None)
        dist.barrier()
        start = time.perf_counter()
        step = job.load(state)
        took.append(time.perf_counter() - start)
    local = [one.to_local() for one in state.values()]
    assert step is not None and all(bool((one == 1.0).all()) for one in local)
    into = [torch.zeros_like(one) for one in local]
    copies = []
    for _ in range(3):
        start = time.perf_counter()
        for target, one in zip(into, local, strict=True):
            target.copy_(one)
        copies.append(time.perf_counter() - start)
    job.save(state, step=step + 1)
    job.wait()
    return {"load": took[0], "again": took[1], "copy": statistics.median(copies)}


def _rank(
    rank: int, ranks: int, hosts: namespaces.Hosts, folder: str, what: str, *arguments: Any
) -> None:
    host = rank * 2 // ranks
    namespaces.enter(hosts.pids[host])
    os.environ.update(
        TORCHRELAY_HOST_ID=str(host),
        TORCHRELAY_TRANSPORT_INTERFACE="eth0",
        GLOO_SOCKET_IFNAME="eth0",
    )
    torch.set_num_threads(1)
    store = dist.FileStore(tempfile.mkdtemp(dir=folder) if ranks == 1 else f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found = globals()[what](folder, *arguments)
    if rank == 0:
        Path(f"{folder}/found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _run(ranks: int, hosts: namespaces.Hosts, folder: str, what: str, *arguments: Any) -> Any:
    Path(f"{folder}/store").unlink(missing_ok=True)
    start_processes(  # type: ignore[no-untyped-call]
        _rank, (ranks, hosts, folder, what, *arguments), ranks, start_method="fork"
    )
    return json.loads(Path(f"{folder}/found.json").read_text())


def _measure(folder: str, size_bytes: int, rounds: int, step_s: float) -> list[str]:
    arguments = (size_bytes, rounds, step_s)
    with namespaces.switched(2) as hosts:
        times = _run(2, hosts, folder, "_saves", *arguments)
        base = statistics.median(times["no save"]["step"])
        rows = [
            (
                name,
                f"{1e3 * statistics.median(one['call']):.1f} ms",
                f"{100 * statistics.median(one['call']) / base:.1f} %",
                spread(one["step"]),
                f"{100 * (statistics.median(one['step']) / base - 1):.1f} %",
            )
            for name, one in times.items()
        ]
        head = ("a save of every step", "in the call", "of a step", "step and call", "longer by")
        saved = table(head, rows)
        rows_of_loads: list[tuple[str, ...]] = []
        for name, ranks, lost, limited in (
            ("trainers killed", 2, False, False),
            ("trainers killed, again", 2, False, False),
            ("2 ranks, then 3", 3, False, False),
            ("3 ranks, then 4", 4, False, False),
            ("4 ranks, then 2", 2, False, False),
            ("a host lost, its links not limited", 2, True, False),
            (f"a host lost, links of {LINK_MBIT} Mbit/s", 2, True, True),
        ):
            if limited:
                hosts.limit(LINK_MBIT)
            if lost:
                os.environ["TORCHRELAY_HOST_ID"] = "1"
                os.kill(server_pid(f"{folder}/ckpt"), signal.SIGKILL)
            found = _run(ranks, hosts, folder, "_loads", *arguments)
            link_s = size_bytes / 2 / (LINK_MBIT * 1e6 / 8)
            again = f"{found['again']:.3f} s"
            ratio = f"{found['load'] / found['copy']:.2f} copies"
            if limited:
                ratio = f"{found['load'] / link_s:.2f} x bytes / link ({link_s:.2f} s)"
            load, copy = f"{found['load']:.3f} s", f"{found['copy']:.3f} s"
            rows_of_loads.append((name, load, copy, ratio, again))
        head = ("resume from memory", "load()", "one copy", "load() takes", "again, by the process")
        loaded = table(head, rows_of_loads)
    return [saved, loaded]


def main() -> None:
    parser = parser_of(__doc__, "small and short; writes nothing")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    if reason := namespaces.missing("tc"):
        raise SystemExit(reason)
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # ranks are forked
    folder = os.environ["TMPDIR"] = tempfile.mkdtemp()
    load = os.getloadavg()[0]
    try:
        if arguments.smoke:
            parts = _measure(folder, 24_000_000, 1, 0.05)
        else:
            parts = _measure(folder, SIZE_BYTES, arguments.rounds, 1.0)
    finally:
        end_servers(2)
        shutil.rmtree(folder, ignore_errors=True)
    print("\n\n".join(parts))
    if not arguments.smoke:
        about = (__doc__ or "").split("\n\n", 2)[2]
        note = f"Load of the machine when it began: {load:.1f}."
        write("checkpoint_memory", "checkpoint: memory of hosts", about, note, *parts)


if __name__ == "__main__":
    main()
