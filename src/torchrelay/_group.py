"""Groups of ranks that exchange tensors: over shared memory on a host, also over TCP between hosts.

Calls of all ranks are matched by their order, messages by rank and tag. A tensor is dense,
contiguous and on the CPU; the caller keeps it alive, and leaves it alone, until the operation ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrelay import _native
from torchrelay._native import Compression, Dtype, Kind, Op, Ticket, Transfer
from torchrelay.errors import OperationTimeoutError, PeerLostError

__all__ = [
    "ANY_RANK",
    "CODES",
    "Collective",
    "Compression",
    "Group",
    "Kind",
    "Op",
    "Ticket",
    "Transfer",
    "code",
]

ANY_RANK = -1  # receive from whoever sends first
CODES: dict[torch.dtype, int] = {getattr(torch, each.name): each.value for each in Dtype}


def code(dtype: torch.dtype) -> int:
    """Return a number for ``dtype`` that is equal on every rank."""
    return CODES.get(dtype, 255)


class Collective(NamedTuple):
    """One rank's part in a collective.

    ``all_reduce``, ``reduce`` and ``broadcast`` have one output, which is the input too, but that
    ``all_reduce`` may have another input. Other collectives have one tensor on one side, and one
    for each rank on the other; ``all_to_all`` on both. Where there is a root, only it has those for
    each rank. The sizes of the gathering ones may differ between ranks.

    Between hosts, a reduction is encoded with ``compression``. ``lost``, of an ``all_reduce``, has
    a float32 for each element: it gets what this rank's encodings lost of the sum, and keeps its
    values elsewhere.
    """

    kind: Kind
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    op: Op = Op.SUM
    root: int = -1
    compression: Compression | None = None
    lost: Tensor | None = None


class Group:
    """A rank's part in a group; see ``_communicators.open_group``. Thread-safe.

    Its methods raise MismatchError, with nothing written, if the ranks' calls differ, and
    OperationTimeoutError or PeerLostError, which break the group.
    """

    def __init__(self, native: _native.Group) -> None:
        self.native = native
        self._uncounted = 0

    @property
    def completed(self) -> int:
        """The number of collectives that have ended without an error; several in one call are one.

        An error leaves the outputs undefined, also where they are the inputs.
        """
        return self.native.completed - self._uncounted

    def start_counting(self) -> None:
        """Count from now on."""
        self._uncounted = self.native.completed

    @property
    def failure(self) -> OperationTimeoutError | PeerLostError | None:
        """Why the group is broken, or None. Does not wait."""
        try:
            self.native.check("looking for failures")
        except (OperationTimeoutError, PeerLostError) as error:
            return error
        return None

    def run(self, calls: Sequence[Collective], timeout_s: float, may_block: bool) -> Ticket | None:
        """Run collectives; several are one call, of which none begins before all ranks agree.

        Returns:
            None, if ``may_block``: it is done. Else a ticket, at once, or None if it is done.
        """
        return self.native.run([self._encoded(call) for call in calls], timeout_s, may_block)

    def all_reduce(self, output: Tensor, source: Tensor, op: Op, timeout_s: float) -> None:
        """Run an all_reduce by the shortest path; blocks. ``output`` may be ``source``."""
        self.native.all_reduce(
            output.data_ptr(),
            output.nbytes,
            CODES[output.dtype],
            op,
            source.data_ptr(),
            timeout_s,
        )

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> Transfer:
        """Send without blocking; messages of a pair of ranks and tag arrive in order."""
        return self.native.send(
            tensor.data_ptr(), tensor.nbytes, to, tag, code(tensor.dtype), timeout_s
        )

    def receive(self, tensor: Tensor, source: int, tag: int, timeout_s: float) -> Transfer:
        """Receive without blocking; from any rank if ``source`` is ANY_RANK."""
        return self.native.receive(
            tensor.data_ptr(), tensor.nbytes, source, tag, code(tensor.dtype), timeout_s
        )

    def wait_transfer(self, transfer: Transfer, timeout_s: float) -> bool:
        """Wait for a message; return False after ``timeout_s``. Raises its error."""
        return self.native.wait_transfer(transfer, timeout_s)

    def report(self, cause: str, ranks: Sequence[int]) -> None:
        """Break the group, as PeerLostError on all ranks; the first failure counts."""
        self.native.report(cause, ranks, False)

    def close(self) -> None:
        """Leave the group: operations in progress fail, here and on ranks that wait for this one.
        Idempotent.
        """
        self.native.close()

    def _encoded(self, call: Collective) -> _native.Collective:
        kind, inputs, outputs, op, root, compression, lost = call
        tensors = outputs or inputs
        dtype = code(tensors[0].dtype) if tensors else 0
        encoded = _native.Collective(kind, _blocks(inputs), _blocks(outputs), dtype, op, root)
        if compression is not None:
            encoded.compress(compression, 0 if lost is None else lost.data_ptr())
        return encoded


def _blocks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
