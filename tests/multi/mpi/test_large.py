"""More elements than an int counts. Takes 9 GiB, and skips where there is less.

No MPI library is asked for so many: they go in pieces, so one library suffices.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator

COUNT = (1 << 31) + 8
NEEDED_BYTES = 12 << 30


def available_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


if available_bytes() < NEEDED_BYTES:
    pytestmark = pytest.mark.skip(f"{NEEDED_BYTES >> 30} GiB of free memory are needed")


def ends(x: Tensor) -> list[int]:
    return [*x[:2].tolist(), *x[-2:].tolist()]


@mpi_test((3,), on=("openmpi",))
def test_more_elements_than_an_int_counts(every: Communicator) -> None:
    comm = every.Split(0 if every.rank < 2 else mpi.MPI_UNDEFINED)
    if comm is None:
        return
    x = torch.full((COUNT,), comm.rank + 1, dtype=torch.uint8)
    x[-1] = 10 * (comm.rank + 1)
    with torch.no_grad():
        assert ends(comm.Allreduce(x, mpi.MPI_SUM)) == [3, 3, 3, 30]
        if comm.rank == 0:
            comm.Send(x, 1)
        else:
            comm.Recv(x, 0)
        assert ends(x) == [1, 1, 1, 10]
        x.fill_(comm.rank + 5)
        assert ends(comm.Bcast_(x, 1)) == [6, 6, 6, 6]
