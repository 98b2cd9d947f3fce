"""mpi4py, and the MPI it finds: imported here alone, with an error that says how to get it."""

from __future__ import annotations

import os

from torchrelay.errors import UnavailableError

__all__ = ["MPI"]

# Without a launcher this process is alone, and Open MPI would leave a shared memory segment behind.
_TRANSPORTS = "OMPI_MCA_btl"
_LAUNCHED = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_", _TRANSPORTS)
_is_alone = not any(key.startswith(_LAUNCHED) for key in os.environ)
if _is_alone:
    os.environ[_TRANSPORTS] = "self"

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but finds no MPI library
    raise UnavailableError(
        f"torchrelay.mpi needs mpi4py and an MPI library: pip install 'torchrelay[mpi]' brings Open MPI, and "
        f"pip install mpi4py mpich brings MPICH ({error})"
    ) from error
finally:
    if _is_alone:
        del os.environ[_TRANSPORTS]  # not for the jobs that this process starts
