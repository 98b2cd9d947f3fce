"""mpi4torch's names on :mod:`torchrelay.mpi`.

Two differences show: the order of communications is kept without dummies, and a backward pass that leaves
communications out warns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.mpi import COMM_WORLD as _WORLD
from torchrelay.mpi import (
    MPI_BAND,
    MPI_BOR,
    MPI_BXOR,
    MPI_LAND,
    MPI_LOR,
    MPI_LXOR,
    MPI_MAX,
    MPI_MAXLOC,
    MPI_MIN,
    MPI_MINLOC,
    MPI_PROD,
    MPI_SUM,
    Communicator,
    JoinDummies,
    JoinDummiesHandle,
    WaitHandle,
    from_mpi4py,
)

if TYPE_CHECKING:
    from mpi4py import MPI as _MPI

__all__ = [
    "COMM_WORLD",
    "MPI_BAND",
    "MPI_BOR",
    "MPI_BXOR",
    "MPI_LAND",
    "MPI_LOR",
    "MPI_LXOR",
    "MPI_MAX",
    "MPI_MAXLOC",
    "MPI_MIN",
    "MPI_MINLOC",
    "MPI_PROD",
    "MPI_SUM",
    "JoinDummies",
    "JoinDummiesHandle",
    "MPI_Communicator",
    "WaitHandle",
    "comm_from_mpi4py",
    "deactivate_cuda_aware_mpi_support",
]

# mpi4torch recorded nothing without a gradient, so its scripts may leave communications out.
COMM_WORLD = _WORLD.replace(unreached="warn")
MPI_Communicator = Communicator


def comm_from_mpi4py(comm: _MPI.Intracomm) -> Communicator:
    """mpi4py's communicator, made differentiable."""
    return from_mpi4py(comm).replace(unreached="warn")


def deactivate_cuda_aware_mpi_support() -> None:
    """Nothing: device tensors always go through host memory."""
