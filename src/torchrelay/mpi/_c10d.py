"""A c10d process group as a transport.

Four collectives of c10d are its base, on bytes where they only copy: all-gather, all-to-all,
broadcast and all-reduce. What not every backend can reduce (integers of 16 bits, products of
complex numbers, logical and bitwise operations) is gathered and reduced here, in the order of
ranks.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrelay._torch import flat_bytes, group_store, private_backend
from torchrelay.errors import ArgumentError, PeerLostError, TorchRelayError
from torchrelay.mpi import _wait
from torchrelay.mpi._dtypes import EXTREMA, NATIVE, Op, check_op, fold
from torchrelay.mpi._headers import Headers
from torchrelay.mpi._library import check_launcher, is_worker_of_rank
from torchrelay.mpi._mailbox import Incoming, Mailbox
from torchrelay.mpi._memory import Blocks
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import (
    CONTROL_TAG,
    PROC_NULL,
    UNDEFINED,
    Part,
    Requests,
    Testable,
)
from torchrelay.world import Meeting, Ranks, World

__all__ = ["C10dTransport", "group_transport", "world_transport"]

HOST = "cpu"
MAX_TAG = (1 << 31) - 1
_c10d: Any = dist.distributed_c10d
_REDUCED = {dtype for dtype, _ in NATIVE} - {torch.int16}  # which Gloo and NCCL lack
_OPS = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.PROD: dist.ReduceOp.PRODUCT,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
}


def _nothing() -> None:
    """Complete a result that the backend has written."""


class _Request:
    """A collective of c10d, and what completes its result. It begins in its turn.

    ``begin`` and ``then`` refer to all memory that it uses.
    """

    __slots__ = ("_begin", "_error", "_has_begun", "_is_done", "_on_host", "_then", "_work")

    def __init__(
        self, order: _Order, begin: Callable[[], Any], then: Callable[[], object], on_host: bool
    ) -> None:
        self._begin: Callable[[], Any] | None = begin
        self._then, self._on_host = then, on_host
        self._error: Exception | None = None
        self._work: Any = None
        self._has_begun = self._is_done = False
        order.append(self._take_turn)

    def _take_turn(self) -> bool:
        """Begin; return true, because what follows may begin too."""
        assert self._begin is not None
        try:
            self._work = self._begin()
        except (RuntimeError, TorchRelayError) as error:
            self._error = error
        self._has_begun = True  # last, because another thread may look
        return True

    def Test(self) -> bool:
        _Order.proceed()  # which may test it too
        if self._is_done:
            return True
        if not self._has_begun:
            return False
        try:
            if self._error is not None:
                raise self._error
            # On a device the result is ordered by its stream.
            if self._on_host and not self._work.is_completed():
                return False
            self._work.wait()
        except TorchRelayError:
            raise
        except RuntimeError as error:
            raise PeerLostError(str(error).partition("\n")[0]) from error
        self._then()
        self._is_done, self._begin = True, None
        return True


class _Order:
    """The collectives of a transport, which begin in the order in which they were called.

    The backends match collectives by their order, and Gloo ends the process if the sizes of two
    differ. So the data of a started collective begins once all ranks have compared their calls, and
    what was called later waits. Whatever this process waits for, all orders proceed.
    """

    busy: ClassVar[list[_Order]] = []  # those in which something waits
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], bool]] = deque()

    def append(self, take_turn: Callable[[], bool]) -> None:
        """Call ``take_turn`` when all before it have returned true, until it does."""
        if not self._waiting and take_turn():
            return
        with _Order.lock:
            self._waiting.append(take_turn)
            if self not in _Order.busy:
                _Order.busy.append(self)

    @staticmethod
    def proceed() -> None:
        """Begin what can begin, unless a thread already does."""
        if not _Order.busy or not _Order.lock.acquire(blocking=False):
            return
        try:
            for order in list(_Order.busy):
                waiting = order._waiting
                while waiting and waiting[0]():
                    waiting.popleft()
                if not waiting:
                    _Order.busy.remove(order)
        finally:
            _Order.lock.release()


class _Blocking:
    """A request that ``run``, which blocks, completes."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def Test(self) -> bool:
        self._run()
        return True


class C10dTransport:
    """The ranks of a process group, or some of them.

    Args:
        ranks: with a store that no other transport uses.
        mailbox: that of the process group.
        peers: each rank's number in the mailbox.
        kinds: the backend for each type of device.
        path: identifies it among those of the mailbox.
    """

    job = _wait.process
    max_tag = MAX_TAG

    def __init__(
        self, ranks: Ranks, mailbox: Mailbox, peers: list[int], kinds: dict[str, str], path: str
    ) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.idle_headers: list[Headers] = []
        self._ranks, self._mailbox, self._peers, self._path = ranks, mailbox, peers, path
        self._kinds = kinds if self.size > 1 else {}
        self._backends = {
            device: private_backend(
                kind,
                dist.PrefixStore(f"{device}/", ranks.store),
                self.rank,
                self.size,
                settings.timeout_s,
                mailbox.address,
            )
            for device, kind in self._kinds.items()
        }
        self._sml = self._backends[HOST].host if self._kinds.get(HOST) == "sml" else None
        self._children = itertools.count()
        self._order = _Order()
        self._channel = hashlib.blake2b(path.encode(), digest_size=16).digest()

    def takes(self, device: torch.device) -> bool:
        return device.type == HOST or device.type in self._kinds or self.size == 1

    def _direct(self, arrived: bool) -> Any:
        """Return the collectives of ``sml`` if a call can go to them at once, or None.

        It then blocks, but can be interrupted and ends in time.
        """
        return self._sml if arrived and not _Order.busy else None

    def _start(
        self,
        name: str,
        memory: Tensor,
        arguments: tuple[Any, ...],
        options: Any,
        arrived: bool,
        then: Callable[[], object] = _nothing,
    ) -> list[_Request]:
        """Start the collective ``name`` of the backend for ``memory``, and then call ``then``."""
        # while the backend blocks, no order proceeds
        options.asyncOp = not arrived or bool(_Order.busy)
        device = memory.device.type
        function = getattr(self._backends[device], name)
        begin = functools.partial(function, *arguments, options)
        return [_Request(self._order, begin, then, device == HOST)]

    def begin_after(self, comparison: Testable) -> None:
        self._order.append(comparison.Test)

    # Collectives

    def row_exchange(self, sent: Tensor, received: Tensor) -> Callable[[bool], Testable]:
        blocking: _Blocking | None = None

        def start(may_block: bool) -> Testable:
            nonlocal blocking
            direct = self._direct(may_block)
            if direct is not None:
                if blocking is None:
                    blocking = _Blocking(direct.row_gather(sent, received))
                return blocking
            options, arguments = _c10d.AllgatherOptions(), (received, sent)
            return self._start("_allgather_base", sent, arguments, options, may_block)[0]

        return start

    def _exchange(
        self,
        sent: Tensor,
        sent_counts: Sequence[int],
        received: Tensor,
        counts: Sequence[int],
        arrived: bool,
        then: Callable[[], object] = _nothing,
    ) -> Requests:
        """Send ``sent_counts[r]`` elements to rank r, and receive ``counts[r]`` from it."""
        if self.size == 1:
            received.view(-1).copy_(sent.view(-1)[: received.numel()])
            then()
            return []
        arguments = (
            flat_bytes(received),
            flat_bytes(sent),
            [count * sent.itemsize for count in counts],
            [count * sent.itemsize for count in sent_counts],
        )
        return self._start("alltoall_base", sent, arguments, dist.AllToAllOptions(), arrived, then)

    def _gather_rows(
        self, source: Tensor, arrived: bool, then: Callable[[Tensor], object]
    ) -> Requests:
        """Gather all ranks' ``source`` as rows, and call ``then`` with them."""
        rows = source.new_empty((self.size, source.numel()))
        if self.size == 1:
            then(source.view(1, -1))
            return []
        arguments, options = (flat_bytes(rows), flat_bytes(source)), _c10d.AllgatherOptions()
        return self._start(
            "_allgather_base", source, arguments, options, arrived, lambda: then(rows)
        )

    def reduce(
        self, source: Tensor, result: Tensor, op: Op, root: int | None, arrived: bool
    ) -> Requests:
        check_op(source.dtype, op)
        ours, total = source.detach(), result.detach()
        if ours.is_complex() and op is Op.SUM:
            ours, total = torch.view_as_real(ours), torch.view_as_real(total)
        loses_nan = (
            op in EXTREMA
            and ours.is_floating_point()
            and self._kinds.get(ours.device.type) != "sml"  # but Gloo and NCCL
        )
        if op not in _OPS or ours.dtype not in _REDUCED or loses_nan or self.size == 1:
            return self._gather_rows(
                source,
                arrived,
                lambda rows: result.detach().view(-1).copy_(fold(rows.unbind(), op)),
            )
        direct = self._direct(arrived) if op is Op.SUM and total.is_cpu else None
        if direct is not None:

            def sum_now() -> None:
                if direct.sum_now(total, ours) is None:  # one is not contiguous, for example
                    self._backends[HOST].allreduce([total.copy_(ours)]).wait()

            return [_Blocking(sum_now)]
        if result is not source:
            total.copy_(ours)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._start("allreduce", total, ([total],), options, arrived)

    def scan(
        self, source: Tensor, result: Tensor, op: Op, exclusive: bool, descending: bool
    ) -> Requests:
        check_op(source.dtype, op)

        def reduce(rows: Tensor) -> None:
            mine = (
                rows[self.rank + exclusive :] if descending else rows[: self.rank + 1 - exclusive]
            )
            if len(mine):
                result.view(-1).copy_(fold((mine.flip(0) if descending else mine).unbind(), op))

        return self._gather_rows(source, True, reduce)

    def reduce_scatter(self, blocks: Blocks, result: Tensor, op: Op, arrived: bool) -> Requests:
        check_op(result.dtype, op)
        count = result.numel()
        rows = result.new_empty((self.size, count))
        return self._exchange(
            blocks.memory,
            blocks.layout.counts,
            rows,
            [count] * self.size,
            arrived,
            lambda: result.view(-1).copy_(fold(rows.unbind(), op)),
        )

    def broadcast(self, memory: Tensor, root: int) -> Requests:
        if self.size == 1:
            return []
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._start("broadcast", memory, ([flat_bytes(memory)],), options, True)

    def move(
        self, name: str, sent: Part, received: Part, root: int | None, total: int, arrived: bool
    ) -> Requests:
        if isinstance(sent, Tensor) and isinstance(received, Blocks) and root is None:
            into = received.memory.view(-1)
            if len({*received.layout.counts}) == 1:
                return self._gather_rows(sent, arrived, lambda rows: into.copy_(rows.view(-1)))
        source, counts = self._memory(sent, received, root)
        result, coming = self._memory(received, sent, root)
        return self._exchange(source, counts, result, coming, arrived)

    def _memory(self, part: Part, other: Part, root: int | None) -> tuple[Tensor, Sequence[int]]:
        """Return the memory of ``part``, and how many elements each rank has of it."""
        if isinstance(part, Blocks):
            return part.memory, part.layout.counts
        if part is None:
            assert isinstance(other, Tensor)
            part = other.new_empty(0)
        if root is None:
            return part.view(-1).repeat(self.size), [part.numel()] * self.size
        return part, [part.numel() * (rank == root) for rank in range(self.size)]

    # Messages

    def cut(self, memory: Tensor) -> Sequence[Tensor]:
        return [memory]

    def isend(self, memory: Tensor, dest: int, tag: int) -> Testable:
        if dest != PROC_NULL:
            contents = flat_bytes(memory).numpy().data
            self._mailbox.send(self._channel, self.rank, self._peers[dest], tag, contents)
        return _Blocking(lambda: None)

    def irecv(self, memory: Tensor, source: int, tag: int) -> Incoming:
        incoming = Incoming(self.poll, memory, source, tag)
        if source != PROC_NULL:
            self._mailbox.expect(self._channel, incoming)
        return incoming

    def poll(self) -> None:
        """Let collectives proceed, and messages arrive."""
        _Order.proceed()
        self._mailbox.poll()

    def post(self, dest: int, text: bytes) -> None:
        self._mailbox.send(self._channel, self.rank, self._peers[dest], CONTROL_TAG, text)

    def posted(self) -> list[tuple[int, bytes]]:
        found = self._mailbox.take(self._channel, CONTROL_TAG)
        return [(message.source, b"".join(message.pieces)) for message in found]

    # Communicators

    def duplicate(self, for_messages: bool = False) -> C10dTransport:
        kinds = {} if for_messages else self._kinds
        return self._part(str(next(self._children)), list(range(self.size)), kinds)

    def split(self, color: int, members: list[int]) -> C10dTransport | None:
        child = next(self._children)
        if color == UNDEFINED:
            return None
        return self._part(f"{child}/{color}", members, self._kinds)

    def _part(self, name: str, members: list[int], kinds: dict[str, str]) -> C10dTransport:
        store: Any = self._ranks.store
        if store is not None:
            store = dist.PrefixStore(name, store)
        return C10dTransport(
            Ranks(store, members.index(self.rank), len(members)),
            self._mailbox,
            [self._peers[member] for member in members],
            kinds,
            f"{self._path}.{name}",
        )

    def free(self) -> None:
        self.idle_headers.clear()
        self._backends.clear()
        self._sml = None


def group_transport(group: Any) -> C10dTransport:
    """Return a transport over duplicates of the group's backends. Collective."""
    if hasattr(group, "get_group"):
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f"{group!r} is not a process group that this process belongs to")
    kinds = {HOST: "gloo"}
    for device in group._device_types:
        name = group._get_backend(device).name()
        if device.type == HOST or name == "nccl":
            kinds[device.type] = name
    store = group_store(group)
    meeting = Meeting(
        dist.PrefixStore("torchrelay.mpi", store), group.rank(), group.size(), settings.timeout_s
    )
    mailbox = Mailbox(meeting, store, settings.timeout_s)
    return C10dTransport(meeting, mailbox, list(range(meeting.size)), kinds, "")


def _alone() -> C10dTransport:
    ranks = Ranks()
    return C10dTransport(ranks, Mailbox(ranks, None, 0.0), [0], {}, "")


def world_transport() -> C10dTransport:
    """Return the transport of the default process group, or of this process without a launcher.

    Makes the default group with ``sml`` if there is none.
    """
    if not dist.is_initialized():
        if is_worker_of_rank():
            _wait.process.be_no_rank()
            return _alone()
        if World.from_environment().size == 1:
            check_launcher(1)
            return _alone()
        import torchrelay.aggregation  # noqa: F401, PLC0415 - registers sml

        dist.init_process_group("sml")
    return group_transport(dist.group.WORLD)
