"""A process's rank among all of its job, their number, and the store that they share.

:meth:`World.from_environment` reads the variables of torchrun, Open MPI, MPICH or Slurm; without
any of them the world has one process. Importing this module does not import ``torch.distributed``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrelay._meeting import Meeting
from torchrelay._processes import Process, host_identity
from torchrelay._ranks import Ranks
from torchrelay._waiting import duration
from torchrelay.errors import ConfigError, OperationTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Meeting", "Process", "Ranks", "World", "host_identity"]

# launcher, rank, size, other variables that it sets
_LAUNCHERS: tuple[tuple[str, ...], ...] = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    # The script of sbatch has no step: it runs only once, with the other variables.
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"),
)

# Beginnings of the names of all variables that make a process a rank, here or of an MPI library.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "SLURM_")


@dataclass(frozen=True)
class World:
    """Position of this process among all. Default: the world of one process."""

    rank: int = 0
    size: int = 1
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
        are_set = ({*names[1:]} <= environ.keys() for names in _LAUNCHERS)
        found = next(itertools.compress(_LAUNCHERS, are_set), None)
        if found is None:
            return cls()
        launcher, rank_key, size_key = found[:3]
        rank, size = _number(environ, rank_key), _number(environ, size_key)
        if not 0 <= rank < size:
            raise ConfigError(
                f"{rank_key}={rank} and {size_key}={size}: the rank must be from 0 to size - 1"
            )
        return cls(
            rank=rank,
            size=size,
            launcher=launcher,
            master_addr=environ.get("MASTER_ADDR", cls.master_addr),
            master_port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        )

    def connect(self, timeout_s: float = 300.0) -> Store:
        """Return the store that all processes share; one process gets its own.

        Under torchrun its agent serves the store, also to the processes that it starts after a
        failure: this store is one of this attempt alone, and the first call waits for all ranks.
        Else rank 0 serves it at ``MASTER_ADDR:MASTER_PORT``, and the call waits until it answers.

        Raises:
            ConfigError: there are several processes and no ``MASTER_PORT``.
            OperationTimeoutError: the store did not answer within ``timeout_s``, or a rank is
                missing.
            PeerLostError: a rank has died.
        """
        import torch.distributed as dist  # noqa: PLC0415 - importing it takes longer than all of torchrelay

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
            store = dist.TCPStore(
                self.master_addr,
                self.master_port,
                self.size,
                is_master=self.rank == 0 and not served_by_agent,
                timeout=duration(timeout_s),
                multi_tenant=True,
            )
        except dist.DistNetworkError as error:
            raise OperationTimeoutError(
                f"rank {self.rank}: the store at {self.master_addr}:{self.master_port} did not "
                f"answer within {timeout_s:g} s; is rank 0 running, and do MASTER_ADDR and "
                f"MASTER_PORT name its host? ({error})",
                ranks=(0,),
            ) from error
        except dist.DistStoreError as error:  # of rank 0, which waits for the others
            raise OperationTimeoutError(
                f"rank {self.rank}: not all {self.size} ranks connected to the store at "
                f"{self.master_addr}:{self.master_port} within {timeout_s:g} s; are all running, "
                f"with this MASTER_ADDR and MASTER_PORT? ({error})"
            ) from error
        if not served_by_agent:
            return store
        place = self.master_addr, self.master_port, self.rank, self.size
        if place not in _attempts:
            _attempts[place] = Meeting(store, self.rank, self.size, timeout_s).attempt
        return dist.PrefixStore(_attempts[place], store)


# Those of this process, which takes part in one attempt only.
_attempts: dict[tuple[str, int, int, int], str] = {}


def _number(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise ConfigError(f"{key}={environ[key]!r} is not a whole number") from None
