"""Who takes part: rank, size, rendezvous store, and which ranks share a host.

:meth:`World.from_environment` reads what torchrun, Open MPI, MPICH or Slurm set; without any of them the
world has one process, and everything works the same. Importing this module does not import
``torch.distributed``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.errors import ConfigError, OperationTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["World", "host_identity", "ranks_on_my_host"]

# launcher, rank, size, rank on this host
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class World:
    """This process's place among all. The default is the world of one process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = "none"
    master_addr: str = "127.0.0.1"
    master_port: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """The world a launcher describes; the first of torchrun, Open MPI, MPICH, Slurm that is complete.

        Raises:
            ConfigError: a variable is no number, or rank and size contradict each other.
        """
        environ = os.environ if environ is None else environ
        found = next((names for names in _LAUNCHERS if names[1] in environ and names[2] in environ), None)
        if found is None:
            return cls()
        launcher, rank_key, size_key, local_key = found
        rank, size = _number(environ, rank_key), _number(environ, size_key)
        if not 0 <= rank < size:
            raise ConfigError(f"{rank_key}={rank} and {size_key}={size}: the rank must be from 0 to size - 1")
        return cls(
            rank=rank,
            size=size,
            local_rank=_number(environ, local_key) if local_key in environ else rank,
            launcher=launcher,
            master_addr=environ.get("MASTER_ADDR", cls.master_addr),
            master_port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        )

    def connect(self, timeout_s: float = 300.0) -> Store:
        """The store all processes of this world share. One process gets a store of its own.

        Under torchrun this is a client of the agent's store, else rank 0 serves it at
        ``MASTER_ADDR:MASTER_PORT``. Blocks until it answers.

        Raises:
            ConfigError: there are several processes and no ``MASTER_PORT``.
            OperationTimeoutError: the store did not answer within ``timeout_s``.
        """
        import torch.distributed as dist  # noqa: PLC0415 - importing it takes longer than all of torchrelay

        timeout = timedelta(seconds=timeout_s)
        if self.size == 1:
            return dist.HashStore()  # type: ignore[attr-defined]
        if self.master_port is None:
            raise ConfigError(
                f"{self.size} processes were started by {self.launcher}, but MASTER_PORT is not set: give all of "
                "them the address of rank 0's host and a free port, e.g. mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500"
            )
        try:
            served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return dist.TCPStore(  # type: ignore[attr-defined]
                self.master_addr,
                self.master_port,
                self.size,
                is_master=self.rank == 0 and not served_by_agent,
                timeout=timeout,
                multi_tenant=True,
            )
        except dist.DistNetworkError as error:
            raise OperationTimeoutError(
                f"rank {self.rank}: the store at {self.master_addr}:{self.master_port} did not answer within "
                f"{timeout_s:g} s; is rank 0 running, and do MASTER_ADDR and MASTER_PORT name its host? ({error})",
                ranks=(0,),
            ) from error


def _number(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise ConfigError(f"{key}={environ[key]!r} is not a whole number") from None


def host_identity() -> str:
    """Equal for two processes exactly if they can attach each other's segments: kernel, pid namespace, user."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}"


def ranks_on_my_host(store: Store, rank: int, size: int, timeout_s: float) -> tuple[int, ...]:
    """The ranks that share this process's host, in order; collective over all ``size`` ranks of ``store``.

    Raises:
        OperationTimeoutError: a rank did not report within ``timeout_s``; ``ranks`` names those missing.
    """
    mine = host_identity()
    store.set(f"torchrelay/host/{rank}", mine)
    keys = [f"torchrelay/host/{peer}" for peer in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except Exception as error:  # DistStoreError from a TCPStore, RuntimeError from others
        missing = [peer for peer in range(size) if not store.check([keys[peer]])]
        raise OperationTimeoutError(
            f"rank {rank}: ranks {missing} did not report their host within {timeout_s:g} s; are they running?",
            ranks=missing,
        ) from error
    return tuple(peer for peer in range(size) if store.get(keys[peer]).decode() == mine)
