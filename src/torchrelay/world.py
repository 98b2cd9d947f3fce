"""Ranks, world size, rendezvous store, and which ranks share a host.

:meth:`World.from_environment` reads the variables of torchrun, Open MPI, MPICH or Slurm; without
any of them the world has one process. Importing this module does not import ``torch.distributed``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay import config
from torchrelay._waiting import listed, wait_for_others
from torchrelay.errors import ConfigError, MismatchError, OperationTimeoutError, PeerLostError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Meeting", "Process", "World", "host_identity", "ranks_on_my_host"]

# Interval at which a waiting rank checks the others.
_SLICE_S = 1.0

# Equal for all ranks of one job. torchrun sets "none" without --rdzv-id.
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)

# launcher, rank, size, rank on this host
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)

# srun sets it for a job step. The script of sbatch has the other variables, but runs only once.
_SLURM_STEP = "SLURM_STEP_ID"


@dataclass(frozen=True)
class World:
    """Position of this process among all. Default: the world of one process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = "none"
    master_addr: str = "127.0.0.1"
    master_port: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """Return the world of the launcher: torchrun, Open MPI, MPICH or Slurm, in this order.

        Raises:
            ConfigError: a variable is not a number, or rank and size contradict each other.
        """
        environ = os.environ if environ is None else environ
        found = next((names for names in _LAUNCHERS if _has_set(names, environ)), None)
        if found is None:
            return cls()
        launcher, rank_key, size_key, local_key = found
        rank, size = _number(environ, rank_key), _number(environ, size_key)
        if not 0 <= rank < size:
            raise ConfigError(
                f"{rank_key}={rank} and {size_key}={size}: the rank must be from 0 to size - 1"
            )
        return cls(
            rank=rank,
            size=size,
            local_rank=_number(environ, local_key) if local_key in environ else rank,
            launcher=launcher,
            master_addr=environ.get("MASTER_ADDR", cls.master_addr),
            master_port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        )

    def connect(self, timeout_s: float = 300.0) -> Store:
        """Return the store that all processes share; one process gets its own.

        Under torchrun this is a client of the agent's store; else rank 0 serves it at
        ``MASTER_ADDR:MASTER_PORT``. Blocks until it answers.

        Raises:
            ConfigError: there are several processes and no ``MASTER_PORT``.
            OperationTimeoutError: the store did not answer within ``timeout_s``.
        """
        import torch.distributed as dist  # noqa: PLC0415 - importing it takes longer than all of torchrelay

        timeout = timedelta(seconds=timeout_s)
        if self.size == 1:
            return dist.HashStore()
        if self.master_port is None:
            raise ConfigError(
                f"{self.size} processes were started by {self.launcher}, but MASTER_PORT is not "
                "set: give all of them the address of rank 0's host and a free port, e.g. mpirun "
                "-x MASTER_ADDR=host -x MASTER_PORT=29500"
            )
        try:
            served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return dist.TCPStore(
                self.master_addr,
                self.master_port,
                self.size,
                is_master=self.rank == 0 and not served_by_agent,
                timeout=timeout,
                multi_tenant=True,
            )
        except dist.DistNetworkError as error:
            raise OperationTimeoutError(
                f"rank {self.rank}: the store at {self.master_addr}:{self.master_port} did not "
                f"answer within {timeout_s:g} s; is rank 0 running, and do MASTER_ADDR and "
                f"MASTER_PORT name its host? ({error})",
                ranks=(0,),
            ) from error


def _has_set(launcher: tuple[str, str, str, str], environ: Mapping[str, str]) -> bool:
    name, rank_key, size_key, _ = launcher
    return (
        rank_key in environ and size_key in environ and (name != "Slurm" or _SLURM_STEP in environ)
    )


def _number(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise ConfigError(f"{key}={environ[key]!r} is not a whole number") from None


def host_identity() -> str:
    """Return a string that is equal for processes that can attach each other's segments.

    Made of kernel, PID namespace and user; ``TORCHRELAY_HOST_ID`` distinguishes further.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host_id = config.load(config.Host).id
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}/{host_id}"


@dataclass(frozen=True)
class Process:
    """Identity of a process of a job."""

    host: str
    pid: int
    start_ticks: int  # since boot; the kernel uses process ids again
    job: str  # the launcher's name for the job, empty if it has none

    @classmethod
    def current(cls) -> Process:
        """Return the identity of this process."""
        job = next(
            (f"{v}={os.environ[v]}" for v in _JOB_VARIABLES if os.environ.get(v, "none") != "none"),
            "",
        )
        return cls(host_identity(), os.getpid(), _start_ticks("self") or 0, job)

    def has_died(self) -> bool:
        """Return whether it ran on this host and has ended; False for other hosts."""
        return self.host == host_identity() and _start_ticks(str(self.pid)) != self.start_ticks


def _start_ticks(pid: str) -> int | None:
    """When the process started, or None if it has ended (proc(5): state and start time follow the
    name).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class Meeting:
    """Rendezvous of the ranks of a group through a store.

    Creation is collective over all ranks, and may be repeated over the same store.

    Args:
        store: used by the group's ranks only.
        names: the ranks as users know them, for messages; default: the group's own ranks.
        known: processes of other ranks from earlier rendezvous, by name.

    Raises:
        OperationTimeoutError: ranks are missing after ``timeout_s``; ``ranks`` names them.
        PeerLostError: a rank, or the process that serves the store, has died.
        MismatchError: processes of two jobs claim to be ranks of this group.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        names: Sequence[int] = (),
        known: Mapping[int, Process] | None = None,
    ) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - as above

        self.rank = rank
        self.size = size
        self.names = list(names) or list(range(size))
        self._whole = store
        self._processes = dict(known or {})
        me = Process.current()
        try:
            self.store = dist.PrefixStore(f"torchrelay/{self._turn(me)}", store)
            self.announce("rank", json.dumps(asdict(me)))
            found = [Process(**json.loads(text)) for text in self.wait("rank", timeout_s)]
        except dist.DistNetworkError as error:
            raise self._store_lost(error) from error
        self._processes.update(zip(self.names, found, strict=True))
        self._check_jobs()

    @property
    def processes(self) -> list[Process]:
        """In the order of the ranks."""
        return [self._processes[name] for name in self.names]

    @property
    def by_name(self) -> dict[int, Process]:
        return dict(zip(self.names, self.processes, strict=True))

    def on_my_host(self) -> tuple[int, ...]:
        """Return the ranks that share this process's host, in order."""
        mine = host_identity()
        return tuple(rank for rank, process in enumerate(self.processes) if process.host == mine)

    def announce(self, step: str, text: str = "") -> None:
        """Notify the others that this rank has reached ``step``. Raises as the class does."""
        import torch.distributed as dist  # noqa: PLC0415 - as above

        try:
            self.store.set(f"{step}/{self.rank}", text)
        except dist.DistNetworkError as error:
            raise self._store_lost(error) from error

    def wait(self, step: str, timeout_s: float, ranks: Sequence[int] | None = None) -> list[str]:
        """Wait until ``ranks`` (default: all) announced ``step``; return their texts.

        Raises as the class does.
        """
        import torch.distributed as dist  # noqa: PLC0415 - as above

        awaited = range(self.size) if ranks is None else ranks
        keys = [f"{step}/{rank}" for rank in awaited]
        deadline_s = time.monotonic() + timeout_s

        def missing() -> list[int]:
            return [rank for rank in awaited if not self.store.check([f"{step}/{rank}"])]

        try:
            wait_for_others(
                lambda: self._wait_a_slice(keys, deadline_s - time.monotonic()),
                lambda: [self.names[rank] for rank in missing()],
                self._late,
                lambda: self._check_processes(missing()),
                timeout_s,
            )
            return [self.store.get(key).decode() for key in keys]
        except dist.DistNetworkError as error:
            raise self._store_lost(error) from error

    def _wait_a_slice(self, keys: list[str], left_s: float) -> bool:
        import torch.distributed as dist  # noqa: PLC0415 - as above

        try:
            self.store.wait(keys, timedelta(seconds=max(0.001, min(_SLICE_S, left_s))))
        except dist.DistNetworkError:
            raise
        except Exception:  # DistStoreError from a TCPStore, RuntimeError from others: not yet
            return False
        return True

    def _turn(self, me: Process) -> int:
        """Count this rank's rendezvous over this store; all must have been of this process."""
        turn = self._whole.add(f"torchrelay/turns/{self.rank}", 1)
        key = f"torchrelay/taken/{self.rank}"
        if turn > 1:
            before = Process(**json.loads(self._whole.get(key)))
            if before != me:
                self._refuse(
                    f"rank {self.names[self.rank]} is process "
                    f"{before.pid}{'' if before.host == me.host else ' of another host'} already, "
                    f"and process {me.pid} wants to be it too: do two jobs use one MASTER_ADDR and "
                    "MASTER_PORT, or was a rank started twice?"
                )
        self._whole.set(key, json.dumps(asdict(me)))
        return int(turn)

    def _refuse(self, message: str) -> None:
        self._whole.set("torchrelay/refused", message)
        raise MismatchError(message)

    def _check_jobs(self) -> None:
        jobs = {process.job: name for name, process in self.by_name.items() if process.job}
        if len(jobs) > 1:
            found = ", ".join(f"rank {name} to {job}" for job, name in jobs.items())
            raise MismatchError(
                f"{self._me}: the ranks belong to different jobs ({found}); give each job a "
                "MASTER_PORT of its own"
            )

    def _check_processes(self, missing: Sequence[int]) -> None:
        """Raise if the group was refused, or one of the ranks ``missing`` has died."""
        if self._whole.check(["torchrelay/refused"]):
            raise MismatchError(f"{self._me}: {self._whole.get('torchrelay/refused').decode()}")
        for rank in missing:
            process = self._processes.get(self.names[rank])
            if process is not None and process.has_died():
                raise PeerLostError(
                    f"{self._me}: rank {self.names[rank]} (process {process.pid}) died before it "
                    "joined the group; look at its own output for the cause",
                    ranks=(self.names[rank],),
                )

    def _late(self, names: Sequence[int], elapsed_s: float) -> str:
        return (
            f"{self._me}: {listed('rank', names)} did not join the group within {elapsed_s:.1f} s; "
            "are they running, and do they make the same groups in the same order?"
        )

    def _store_lost(self, error: Exception) -> PeerLostError:
        return PeerLostError(
            f"{self._me}: the store through which the ranks meet is gone: the process that serves "
            f"it, rank 0 or torchrun's agent, has ended ({error})",
            ranks=(0,),
        )

    @property
    def _me(self) -> str:
        return f"rank {self.names[self.rank]}"


def ranks_on_my_host(store: Store, rank: int, size: int, timeout_s: float) -> tuple[int, ...]:
    """Return the ranks that share this process's host, in order. Collective over ``store``.

    Raises:
        OperationTimeoutError: a rank is missing after ``timeout_s``; ``ranks`` names it.
    """
    return Meeting(store, rank, size, timeout_s).on_my_host()
