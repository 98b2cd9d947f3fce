"""Debug mode: before each communication, the ranks compare what they are about to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torchrelay.errors import MismatchError
from torchrelay.mpi._library import MPI
from torchrelay.mpi._wait import finish

if TYPE_CHECKING:
    from torchrelay.mpi._record import Call

__all__ = ["compare"]

RECORD_BYTES = 256


def compare(call: Call, x: Tensor) -> None:
    """Collective over ``call.comm``.

    Raises:
        MismatchError: on every rank, if two ranks differ in function, arguments, shape, dtype or grad mode.
    """
    if not call.everyone or call.comm.size == 1:
        return
    recorded = torch.is_grad_enabled() and call.differentiable(x)
    mine = f"{call.signature(x)}, {'recorded' if recorded else 'not recorded'} by autograd".encode()
    records = np.zeros((call.comm.size, RECORD_BYTES), np.uint8)
    record = np.zeros(RECORD_BYTES, np.uint8)
    record[: len(mine)] = np.frombuffer(mine[:RECORD_BYTES], np.uint8)
    request = call.comm.control.Iallgather([record, MPI.BYTE], [records, MPI.BYTE])
    finish(request, call)
    if (records == records[0]).all():
        return
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in records]
    groups = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
    who = "; ".join(f"ranks {ranks} call {text}" for text, ranks in groups.items())
    raise MismatchError(f"rank {call.comm.rank}: the ranks of {call.comm.name} make different calls: {who}")
