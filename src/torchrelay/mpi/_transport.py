"""The contract between communications and what moves their bytes: MPI or a c10d process group.

A transport moves contiguous memory between the ranks of one communicator. Nothing here is recorded,
compared or timed. Collectives return the requests to wait for; with ``may_block``, as all ranks
have made the call, they may block instead, which is faster, and return none. Counts are in
elements. The caller keeps the memory alive until the requests are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torchrelay.mpi._library import MPI

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from torchrelay.mpi._dtypes import Op
    from torchrelay.mpi._headers import Headers
    from torchrelay.mpi._memory import Blocks
    from torchrelay.mpi._wait import Job

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "CONTROL_TAG",
    "PROC_NULL",
    "UNDEFINED",
    "Message",
    "Part",
    "Requests",
    "Testable",
    "Transport",
]

# Those of MPI where it is in use, so that programs may pass mpi4py's.
ANY_SOURCE: int = -1 if MPI is None else MPI.ANY_SOURCE
ANY_TAG: int = -1 if MPI is None else MPI.ANY_TAG
PROC_NULL: int = -2 if MPI is None else MPI.PROC_NULL
UNDEFINED: int = -32766 if MPI is None else MPI.UNDEFINED

CONTROL_TAG = 1  # of control messages, on a transport that carries no messages of users


class Testable(Protocol):
    """A request that can be tested."""

    def Test(self) -> bool: ...


Requests: TypeAlias = Sequence[Testable]
Part: TypeAlias = "Tensor | Blocks | None"
"""What a rank sends or receives; None: nothing."""


class Message(Testable, Protocol):
    """A message to be received. Once it is done, it knows where it came from."""

    source: int
    tag: int
    size_bytes: int


class Transport(Protocol):
    """The ranks of one communicator, and how bytes move between them.

    Attributes:
        job: the rank's part in its job.
        is_alone: whether this process was started without others.
        max_tag: the largest tag of a message.
        idle_headers: memory for headers that no exchange uses.
    """

    job: Job
    rank: int
    size: int
    is_alone: bool
    max_tag: int
    idle_headers: list[Headers]

    def takes(self, device: torch.device) -> bool:
        """Return whether it moves memory of ``device``. It always moves memory of this host."""

    def row_exchange(self, sent: Tensor, received: Tensor) -> Callable[[bool], Testable]:
        """Return a function that starts to copy every rank's row to every rank.

        It may block until all ranks have called it if its argument, ``may_block``, is true.
        """

    def reduce(
        self, source: Tensor, result: Tensor, op: Op, root: int | None, may_block: bool
    ) -> Requests:
        """Reduce all ranks' ``source`` into root's ``result``, or into every rank's.

        They may be the same memory. The ``result`` of other ranks is undefined afterwards.

        Raises:
            ArgumentError: the operation is undefined for the dtype.
        """

    def scan(
        self, source: Tensor, result: Tensor, op: Op, exclusive: bool, descending: bool
    ) -> Requests:
        """Reduce the ``source`` of all ranks up to this one, or before it, into ``result``.

        All ranks have arrived. With ``descending``, from the last rank to the first. What nothing
        is reduced into is undefined.
        """

    def reduce_scatter(self, blocks: Blocks, result: Tensor, op: Op, may_block: bool) -> Requests:
        """Reduce all ranks' ``blocks``, at most ``max_count`` elements; block r goes to rank r."""

    def broadcast(self, memory: Tensor, root: int) -> Requests:
        """Copy root's ``memory`` into that of every rank. All ranks have arrived."""

    def move(
        self, name: str, sent: Part, received: Part, root: int | None, total: int, may_block: bool
    ) -> Requests:
        """Copy blocks between ranks, as MPI's function ``name``.

        Args:
            sent: a block for each rank, or one block: for root, or for every rank.
            received: a block of each rank, or one of root.
            total: the largest number of elements of a rank; equal on all ranks.
        """

    def cut(self, memory: Tensor) -> Sequence[Tensor]:
        """Return the parts of ``memory`` that must be sent and received one by one."""

    def isend(self, memory: Tensor, dest: int, tag: int) -> Testable:
        """Start to send ``memory`` of this host; nothing to PROC_NULL."""

    def irecv(self, memory: Tensor, source: int, tag: int) -> Message:
        """Start to receive into ``memory`` of this host; nothing from PROC_NULL."""

    def post(self, dest: int, text: bytes) -> None:
        """Send a control message, without waiting for its receiver."""

    def posted(self) -> list[tuple[int, bytes]]:
        """Return the control messages that have arrived, with their sources."""

    def duplicate(self, for_messages: bool = False) -> Any:
        """Return a transport of the same ranks, whose messages are separate. Collective.

        One ``for_messages``, and its duplicates, may lack the collectives.
        """

    def split(self, color: int, members: list[int]) -> Any:
        """Return the transport of the ranks with the same ``color``; None for UNDEFINED.

        Collective. ``members`` are these ranks, in their new order.
        """

    def free(self) -> None:
        """Release what it holds. Collective."""
