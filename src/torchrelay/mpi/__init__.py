"""MPI functions for tensors that autograd differentiates.

::

    from torchrelay import mpi

    comm = mpi.COMM_WORLD
    total = comm.Allreduce(local_loss, mpi.MPI_SUM)
    total.backward()

Communications in grad mode form a chain in autograd's graph. A backward pass therefore runs all
communications of a rank, in the reverse order, and cannot deadlock where the forward pass did not.
"""

from torchrelay._names import no_attribute
from torchrelay.mpi._chain import backward, chain, grad, reset
from torchrelay.mpi._collectives import Located
from torchrelay.mpi._comm import WORLD_NAME
from torchrelay.mpi._communicator import CartCommunicator, Communicator, from_mpi4py, world
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._library import is_mpi_job as _is_mpi_job
from torchrelay.mpi._point_to_point import JoinDummies, JoinDummiesHandle, WaitHandle
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED

__all__ = [
    "COMM_WORLD",
    "MPI_ANY_SOURCE",
    "MPI_ANY_TAG",
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
    "MPI_PROC_NULL",
    "MPI_PROD",
    "MPI_SUM",
    "MPI_UNDEFINED",
    "CartCommunicator",
    "Communicator",
    "JoinDummies",
    "JoinDummiesHandle",
    "Located",
    "Op",
    "WaitHandle",
    "backward",
    "chain",
    "from_mpi4py",
    "grad",
    "reset",
]

MPI_MAX, MPI_MIN, MPI_SUM, MPI_PROD = Op.MAX, Op.MIN, Op.SUM, Op.PROD
MPI_LAND, MPI_BAND, MPI_LOR, MPI_BOR = Op.LAND, Op.BAND, Op.LOR, Op.BOR
MPI_LXOR, MPI_BXOR, MPI_MINLOC, MPI_MAXLOC = Op.LXOR, Op.BXOR, Op.MINLOC, Op.MAXLOC
MPI_ANY_SOURCE, MPI_ANY_TAG = ANY_SOURCE, ANY_TAG
MPI_PROC_NULL, MPI_UNDEFINED = PROC_NULL, UNDEFINED

COMM_WORLD: Communicator
"""All processes that the launcher started; made when it is first used."""

if _is_mpi_job:
    world()  # the ranks of MPI start together


def __getattr__(name: str) -> Communicator:
    if name == WORLD_NAME:
        return world()
    raise no_attribute(f"module {__name__!r}", name, __all__)


def __dir__() -> list[str]:
    return __all__
