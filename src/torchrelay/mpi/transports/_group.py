"""The ranks of a process group as a transport: over native groups, opened over its store.

Each communicator has a native group for its collectives, and all that are made of one process
group share a mailbox. What the native core does not reduce (bool, products of complex numbers,
logical operations) is gathered and reduced here, in the order of ranks. Tensors of CUDA devices go
through NCCL, if the process group has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrelay import _autoload, config
from torchrelay._addresses import address_for_peers
from torchrelay._communicators import open_group
from torchrelay._native import Collective, Kind
from torchrelay._platform import need_core
from torchrelay._torch import group_store, store_host
from torchrelay.errors import ArgumentError
from torchrelay.mpi import _wait
from torchrelay.mpi._dtypes import NATIVE, Op, check_op, fold
from torchrelay.mpi._headers import Headers
from torchrelay.mpi._library import check_launcher, is_worker_of_rank
from torchrelay.mpi._memory import Blocks, parts
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import PROC_NULL, UNDEFINED, Part, Requests, Testable
from torchrelay.mpi.transports._mailbox import FOREVER_S, Mailbox, Message
from torchrelay.mpi.transports._nccl import Nccl
from torchrelay.world import Meeting, Ranks, World

__all__ = ["GroupTransport", "group_transport", "world_transport"]

MAX_TAG = (1 << 31) - 1
_KINDS = {
    "Allgatherv": Kind.all_gather,
    "Alltoallv": Kind.all_to_all,
    "Gatherv": Kind.gather,
    "Scatterv": Kind.scatter,
}
Run = Callable[[float, bool], Any]


def _nothing() -> None:
    """Complete a result that the native core has written."""


class _Request:
    """A collective: ``run`` it with its timeout, and whether it may block. Then call ``then``.

    Both refer to all memory that it uses.
    """

    __slots__ = ("_run", "_then", "_ticket")

    def __init__(self, run: Run, may_block: bool, then: Callable[[], object] = _nothing) -> None:
        self._run: Run | None = run
        self._then = then
        # The native group runs them in the order in which they were called.
        self._ticket = None if may_block else run(FOREVER_S, False)

    def Test(self) -> bool:
        if self._run is None:
            return True
        if self._ticket is None:
            self._run(settings.timeout_s, True)
        elif not self._ticket.done:
            return False
        else:
            self._ticket.wait(0.0)
        self._then()
        self._run = None  # last, because another thread may test it
        return True


def _block(memory: Tensor) -> tuple[int, int]:
    """Return address and size."""
    return memory.data_ptr(), memory.nbytes


def _blocks(part: Part) -> list[tuple[int, int]]:
    """Return address and size of each rank's block."""
    if not isinstance(part, Blocks):
        return []
    start, item = part.memory.data_ptr(), part.memory.itemsize
    return [
        (start + first * item, count * item)
        for first, count in zip(part.layout.starts, part.layout.counts, strict=True)
    ]


@dataclass(frozen=True)
class _Place:
    """Where the ranks of a process group are.

    Attributes:
        hosts: the identity of each one's host.
        address: at which others reach this one.
        has_nccl: whether the process group has NCCL.
    """

    hosts: Sequence[str]
    address: str
    has_nccl: bool

    def open(self, ranks: Ranks, peers: Sequence[int]) -> Any:
        """Return the native group of ``ranks``, which are ``peers`` here. Collective."""
        return open_group(
            ranks,
            [self.hosts[peer] for peer in peers],
            config.load(config.TransportSettings),
            self.address,
            settings.timeout_s,
            config.load(config.Aggregation),
        ).native


class GroupTransport:
    """The ranks of a process group, or some of them. Collective creation.

    Args:
        ranks: with a store that no other transport uses.
        place: of the process group.
        mailbox: that of the process group.
        peers: each rank's number in the process group.
        for_messages: whether it lacks the collectives.
    """

    job = _wait.process
    max_tag = MAX_TAG

    def __init__(
        self,
        ranks: Ranks,
        place: _Place,
        mailbox: Mailbox,
        peers: Sequence[int],
        for_messages: bool = False,
    ) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.idle_headers: list[Headers] = []
        self._ranks, self._place, self._mailbox, self._peers = ranks, place, mailbox, peers
        self._for_messages = for_messages
        self._children = itertools.count()
        # No other communicator of the process group has the channel that the first rank chooses.
        self._channel = ranks.gather("channel", next(mailbox.channels), settings.timeout_s)[0]
        self._native: Any = None
        self._device: Any = None
        if self.size == 1 or for_messages:
            return
        self._native = place.open(ranks, peers)
        mailbox.users.add(self)
        if place.has_nccl:
            store = dist.PrefixStore("nccl", ranks.store)
            self._device = Nccl(store, self.rank, self.size, settings.timeout_s)

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu" or self.size == 1 or self._device is not None

    # Collectives

    def row_exchange(self, sent: Tensor, received: Tensor) -> Callable[[bool], Testable]:
        rows = [_block(row) for row in received.view(self.size, -1)]
        run = partial(self._native.run, [Collective(Kind.all_gather, [_block(sent)], rows)])
        return partial(_Request, run)

    def _rows_like(self, x: Tensor) -> Blocks:
        """Allocate a block like ``x``, flat, for each rank."""
        layout = parts((x.numel(),), (x.numel(),) * self.size, 0)
        return Blocks.empty(x.dtype, layout, x.device)

    def _gather_rows(
        self, source: Tensor, may_block: bool, then: Callable[[Sequence[Tensor]], object]
    ) -> Requests:
        """Gather all ranks' ``source``, flat, and call ``then`` with them."""
        rows = self._rows_like(source)
        return self.move(
            "Allgatherv", source, rows, None, 0, may_block, lambda: then(rows.tensors())
        )

    def reduce(
        self, source: Tensor, result: Tensor, op: Op, root: int | None, may_block: bool
    ) -> Requests:
        check_op(source.dtype, op)
        ours, total = source.detach(), result.detach()
        if ours.is_complex() and op is Op.SUM:
            ours, total = torch.view_as_real(ours), torch.view_as_real(total)
        if not (ours.is_cpu or self.size == 1) and self._device.all_reduce(ours, total, op):
            return []
        native = NATIVE.get((ours.dtype, op)) if ours.is_cpu and self.size > 1 else None
        if native is None:
            return self._gather_rows(
                ours, may_block, lambda rows: total.view(-1).copy_(fold(rows, op))
            )
        code, native_op = native[0].value, native[1]
        if root is None:
            blocks = [_block(ours)], [_block(total)]
            call = Collective(Kind.all_reduce, *blocks, code, native_op)
        else:
            if self.rank == root and result is not source:
                total.copy_(ours)
            mine = total if self.rank == root else ours
            call = Collective(Kind.reduce, [], [_block(mine)], code, native_op, root)
        return [_Request(partial(self._native.run, [call]), may_block)]

    def scan(
        self, source: Tensor, result: Tensor, op: Op, exclusive: bool, descending: bool
    ) -> Requests:
        check_op(source.dtype, op)
        ranks = range(self.size)[:: -1 if descending else 1]
        mine = ranks[: ranks.index(self.rank) + 1 - exclusive]

        def reduce(rows: Sequence[Tensor]) -> None:
            if mine:
                result.detach().view(-1).copy_(fold([rows[rank] for rank in mine], op))

        return self._gather_rows(source, True, reduce)

    def reduce_scatter(self, blocks: Blocks, result: Tensor, op: Op, may_block: bool) -> Requests:
        check_op(result.dtype, op)
        rows = self._rows_like(result)

        def reduce() -> None:
            result.view(-1).copy_(fold(rows.tensors(), op))

        return self.move("Alltoallv", blocks, rows, None, 0, may_block, reduce)

    def broadcast(self, memory: Tensor, root: int) -> Requests:
        if self.size == 1:
            return []
        if not memory.is_cpu:
            self._device.broadcast(memory, root)
            return []
        call = Collective(Kind.broadcast, [], [_block(memory)], root=root)
        return [_Request(partial(self._native.run, [call]), True)]

    def move(
        self,
        name: str,
        sent: Part,
        received: Part,
        root: int | None,
        total: int,
        may_block: bool,
        then: Callable[[], object] = _nothing,
    ) -> Requests:
        source: Any = sent.memory if isinstance(sent, Blocks) else sent
        result: Any = received.memory if isinstance(received, Blocks) else received
        if self.size == 1:
            result.view(-1).copy_(source.view(-1))
        elif not (result if source is None else source).is_cpu:
            self._device.move(sent, received, root)
        else:
            inputs, outputs = _blocks(sent), _blocks(received)
            if name in ("Allgatherv", "Gatherv"):
                inputs = [_block(source)]
            elif name == "Scatterv":
                outputs = [_block(result)]
            call = Collective(_KINDS[name], inputs, outputs, root=-1 if root is None else root)
            return [_Request(partial(self._native.run, [call]), may_block, then)]
        then()
        return []

    # Messages

    def cut(self, memory: Tensor) -> Sequence[Tensor]:
        return [memory]

    def isend(self, memory: Tensor, dest: int, tag: int) -> Message:
        if dest == PROC_NULL:
            return Message(None, None, None)
        return self._mailbox.send(memory, self._channel, self._peers[dest], tag)

    def irecv(self, memory: Tensor, source: int, tag: int) -> Message:
        if source == PROC_NULL:
            return Message(None, None, None)
        return self._mailbox.receive(memory, self._channel, self._peers, source, tag)

    def post(self, dest: int, text: bytes) -> None:
        self._mailbox.post(self._channel, self.rank, self._peers[dest], text)

    def posted(self) -> list[tuple[int, bytes]]:
        return self._mailbox.posted(self._channel)

    # Communicators

    def duplicate(self, for_messages: bool = False) -> GroupTransport:
        members = list(range(self.size))
        return self._part(str(next(self._children)), members, for_messages or self._for_messages)

    def split(self, color: int, members: list[int]) -> GroupTransport | None:
        child = next(self._children)
        if color == UNDEFINED:
            return None
        return self._part(f"{child}/{color}", members, self._for_messages)

    def _part(self, name: str, members: list[int], for_messages: bool) -> GroupTransport:
        store = dist.PrefixStore(name, self._ranks.store)
        ranks = Ranks(store, members.index(self.rank), len(members))
        peers = [self._peers[member] for member in members]
        return GroupTransport(ranks, self._place, self._mailbox, peers, for_messages)

    def free(self) -> None:
        self.idle_headers.clear()
        self._device = None
        if self._native is not None:
            self._native.close()


def group_transport(group: Any) -> GroupTransport:
    """Return a transport over native groups of the ranks of ``group``. Collective."""
    need_core("torchrelay.mpi over a process group", "start with mpirun, over mpi4py")
    if hasattr(group, "get_group"):
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f"{group!r} is not a process group that this process belongs to")
    has_nccl = any(
        device.type != "cpu" and group._get_backend(device).name() == "nccl"
        for device in group._device_types
    )
    timeout_s, store = settings.timeout_s, group_store(group)
    prefixed = dist.PrefixStore("torchrelay.mpi", store)
    meeting = Meeting(prefixed, group.rank(), group.size(), timeout_s)
    gather = partial(meeting.gather, timeout_s=timeout_s)
    interface = config.load(config.TransportSettings).interface
    address = address_for_peers(gather, meeting.name, store_host(store), interface)
    place = _Place([each.host for each in meeting.processes], address, has_nccl)
    return _first(Ranks(meeting.store, meeting.rank, meeting.size), place)


def _first(ranks: Ranks, place: _Place) -> GroupTransport:
    """Return the transport of all ranks of a process group, with a mailbox. Collective."""
    members = range(ranks.size)
    mailbox = Mailbox(place.open(ranks.among(members), members), ranks.rank, place.hosts)
    return GroupTransport(ranks, place, mailbox, members)


def world_transport() -> GroupTransport:
    """Return the transport of the default process group, or of this process without a launcher.

    Makes the default group with ``sml`` if there is none.
    """
    if not dist.is_initialized():
        is_worker = is_worker_of_rank()
        if is_worker or World.from_environment().size == 1:
            if is_worker:
                _wait.process.disable()
            else:
                check_launcher(1)
            return _first(Ranks(dist.HashStore()), _Place([""], "127.0.0.1", False))
        _autoload.register_now()
        dist.init_process_group("sml")
    return group_transport(dist.group.WORLD)
