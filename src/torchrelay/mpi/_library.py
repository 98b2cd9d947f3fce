"""mpi4py, and the MPI it finds: imported here alone, with an error that says how to get it."""

from __future__ import annotations

from torchrelay.errors import UnavailableError

__all__ = ["MPI"]

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but finds no MPI library
    raise UnavailableError(
        f"torchrelay.mpi needs mpi4py and an MPI library: pip install 'torchrelay[mpi]' brings Open MPI, and "
        f"pip install mpi4py mpich brings MPICH ({error})"
    ) from error
