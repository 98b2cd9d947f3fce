"""Jobs that keep checkpoints in memory, on simulated hosts, and die: for tests and the soak."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchrelay.checkpoint import Checkpointer
from torchrelay.checkpoint.memory._socket import MemoryClient, folder_of, job_of, jobs, remove
from torchrelay.world import World
from waiting import eventually

__all__ = [
    "AFTER_STAGE",
    "BEFORE_STAGE",
    "check",
    "die",
    "dying",
    "end_servers",
    "job_state",
    "open_job",
    "server_pid",
]

ROWS = 24
# Of a save after another that was waited for: it begins, stages and waits.
BEFORE_STAGE, AFTER_STAGE = 2, 3


def _rows(step: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * 5, dtype=torch.float32).view(rows, 5) * (step + 1)


def job_state(step: int, rows: int = ROWS) -> dict[str, Any]:
    """What a job has after ``step``: sharded over all ranks, the same on all, and values."""
    mesh = DeviceMesh("cpu", [*range(dist.get_world_size())])
    return {
        "w": distribute_tensor(_rows(step, rows), mesh, [Shard(0)], src_data_rank=None),
        "same": torch.full((1000,), step, dtype=torch.int64),
        "step": step,
        "empty": {},
    }


def check(state: dict[str, Any], step: int | None) -> None:
    """Compare what was loaded with what was saved at ``step``."""
    assert step is not None and state["step"] == step
    w = state["w"].full_tensor() if isinstance(state["w"], DTensor) else state["w"]
    assert torch.equal(w, _rows(step, len(w))), f"step {step} is torn"
    assert torch.equal(state["same"], torch.full((1000,), step, dtype=torch.int64))


def open_job(
    world: World, path: str, hosts: Sequence[int], disk_every: int | None = None, **options: Any
) -> Checkpointer:
    """The checkpointer of a rank, which is on the simulated host of that number."""
    os.environ["TORCHRELAY_HOST_ID"] = str(hosts[world.rank])
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", store=world.connect(), rank=world.rank, world_size=world.size
        )
    return Checkpointer(path, disk_every=disk_every, **options)


def server_pid(path: str) -> int:
    """The process of the memory server of this host, of the job that saves to ``path``."""
    with closing(MemoryClient(job_of(path))) as client:
        return int(client.ask("status")["pid"])


def die(checkpointer: Checkpointer, kill: str) -> None:
    """Kill this "trainer", its memory "server", or both, which is all of its "host"."""
    if kill != "trainer":
        os.kill(server_pid(checkpointer.path), signal.SIGKILL)
    if kill != "server":
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def dying(moment: int, kill: Callable[[], None]) -> Any:
    """``kill`` is called before a question to the memory server, if ``moment`` is even, else
    after it: the first one at 0 and 1, the second at 2 and 3. Negative: never.
    """
    ask, left = MemoryClient.ask, [moment // 2 if moment >= 0 else -2]

    def counted(self: MemoryClient, *arguments: Any, **options: Any) -> Any:
        if left[0] < 0 or arguments[0] == "status":
            return ask(self, *arguments, **options)
        left[0] -= 1
        if left[0] == -1 and moment % 2 == 0:
            kill()
        answer = ask(self, *arguments, **options)
        if left[0] == -1 and moment % 2:
            kill()
        return answer

    MemoryClient.ask = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        MemoryClient.ask = ask  # type: ignore[method-assign]


def _is_gone(folder: str) -> bool:
    return not os.path.exists(folder)


def end_servers(hosts: int = 4) -> list[str]:
    """End the memory servers of this folder, of all simulated hosts; what they were."""
    found = []
    for host in range(-1, hosts):
        os.environ["TORCHRELAY_HOST_ID"] = "" if host < 0 else str(host)
        for job in jobs():
            found.append(f"{host}: {job}")
            try:
                with closing(MemoryClient(job)) as client:
                    os.kill(client.ask("status")["pid"], signal.SIGTERM)
            except OSError:  # it was killed
                remove(folder_of(job))
            eventually(partial(_is_gone, folder_of(job)))
    os.environ.pop("TORCHRELAY_HOST_ID")
    return found
