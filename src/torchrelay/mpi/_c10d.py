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
from concurrent.futures import Future
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrelay._torch import flat_bytes, group_store, private_backend
from torchrelay.errors import (
    ArgumentError,
    PeerLostError,
    TorchRelayError,
)
from torchrelay.mpi import _wait
from torchrelay.mpi._dtypes import KERNELS, LOGICAL, NATIVE, Op, check_op
from torchrelay.mpi._headers import Headers
from torchrelay.mpi._library import check_launcher, is_worker_of_rank
from torchrelay.mpi._mailbox import Incoming, Mailbox
from torchrelay.mpi._memory import Blocks
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import ANY_SOURCE, PROC_NULL, UNDEFINED, Requests, Testable
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


def _fold(rows: Tensor, op: Op) -> Tensor:
    """Reduce ``rows`` along their first axis, in order."""
    total = functools.reduce(KERNELS[op], rows.unbind())
    return (total != 0).to(rows.dtype) if op in LOGICAL else total


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
        order.append(self)

    def take_turn(self) -> bool:
        """Begin; return whether what follows may begin too."""
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


class _Check:
    """What must be done before the next collective begins."""

    def __init__(self, condition: Testable) -> None:
        self.take_turn = condition.Test


class _Making:
    """A backend, which a thread makes when all ranks have arrived, because that blocks."""

    def __init__(
        self,
        make: Callable[[], Any],
        mailbox: Mailbox,
        channel: bytes,
        rank: int,
        peers: list[int],
    ) -> None:
        self.made: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._mailbox, self._channel = mailbox, channel
        self._missing = set(range(len(peers))) - {rank}
        for other in self._missing:
            mailbox.send(channel, rank, peers[other], 0, b"")

    def Test(self) -> bool:
        if self._missing:
            self._mailbox.poll()
            arrived = self._mailbox.channels[self._channel].take(ANY_SOURCE, 0)
            self._missing -= {message.source for message in arrived}
        if not self._missing and self._thread.ident is None:
            self._thread.start()
        return self.made.done()

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self.made.set_result(make())
        except BaseException as error:
            self.made.set_exception(error)


class _Order:
    """The collectives of a transport, which begin in the order in which they were called.

    The backends match collectives by their order, and Gloo ends the process if the sizes of two
    differ. So the data of a started collective begins once all ranks have compared their calls, and
    what was called later waits. Whatever this process waits for, all orders proceed.
    """

    busy: ClassVar[list[_Order]] = []  # those in which something waits
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._waiting: deque[_Request | _Check] = deque()

    def append(self, next_one: _Request | _Check) -> None:
        if not self._waiting and next_one.take_turn():
            return
        with _Order.lock:
            self._waiting.append(next_one)
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
                while waiting and waiting[0].take_turn():
                    waiting.popleft()
                if not waiting:
                    _Order.busy.remove(order)
        finally:
            _Order.lock.release()


class _Incoming(Incoming):
    """A receive that lets collectives proceed."""

    def Test(self) -> bool:
        _Order.proceed()
        return super().Test()


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

    max_tag = MAX_TAG

    def __init__(
        self, ranks: Ranks, mailbox: Mailbox, peers: list[int], kinds: dict[str, str], path: str
    ) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.most_bytes = mailbox.most_bytes
        self.idle_headers: list[Headers] = []
        self._ranks, self._mailbox, self._peers = ranks, mailbox, peers
        self._kinds, self._path = kinds, path
        self._backends: dict[str, _Making] = {}
        self._sml: Any = None  # the backend of this host's memory, once it is made
        self._children = itertools.count()
        self._order = _Order()
        self._channel = _channel(path)

    def takes(self, device: torch.device) -> bool:
        return device.type == HOST or device.type in self._kinds

    def _make_backend(self, device: str) -> Any:
        return private_backend(
            self._kinds[device],
            dist.PrefixStore(f"{device}/", self._ranks.store),
            self.rank,
            self.size,
            settings.timeout_s,
            self._mailbox.address,
        )

    def _direct(self, arrived: bool) -> Any:
        """Return the ``sml`` group of this host's memory if a call can go to it at once, or None.

        It then blocks, but can be interrupted and ends in time.
        """
        if not arrived or _Order.busy:
            return None
        if self._sml is None and self._kinds.get(HOST) == "sml":
            making = self._backends.get(HOST)
            if making is not None and making.made.done():
                self._sml = making.made.result()
        return self._sml

    def _start(
        self, begin: Callable[[Any], Any], memory: Tensor, then: Callable[[], object] = _nothing
    ) -> list[_Request]:
        """Start a collective of the backend for ``memory``, and then call ``then``."""
        device = memory.device.type
        making = self._backends.get(device)
        if making is None:
            making = self._backends[device] = _Making(
                functools.partial(self._make_backend, device),
                self._mailbox,
                _channel(f"{self._path}/{device}"),
                self.rank,
                self._peers,
            )
            self._order.append(_Check(making))
        made = making.made
        return [_Request(self._order, lambda: begin(made.result()), then, device == HOST)]

    def begin_after(self, comparison: Testable) -> None:
        self._order.append(_Check(comparison))

    # Collectives

    def row_exchange(self, sent: Tensor, received: Tensor) -> Callable[[bool], Testable]:
        options = {arrived: _options(_c10d.AllgatherOptions, arrived) for arrived in (True, False)}
        blocking: _Blocking | None = None

        def start(may_block: bool) -> Testable:
            nonlocal blocking
            direct = self._direct(may_block)
            if direct is not None:
                if blocking is None:
                    blocking = _Blocking(direct.row_gather(sent, received))
                return blocking
            (request,) = self._start(
                lambda backend: backend._allgather_base(
                    received, sent, options[may_block and not _Order.busy]
                ),
                sent,
            )
            return request

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
        if self._is_alone(sent):
            received.view(-1).copy_(sent.view(-1)[: received.numel()])
            then()
            return []
        itemsize, options = sent.itemsize, _options(dist.AllToAllOptions, arrived)
        return self._start(
            lambda backend: backend.alltoall_base(
                flat_bytes(received),
                flat_bytes(sent),
                [count * itemsize for count in counts],
                [count * itemsize for count in sent_counts],
                options,
            ),
            sent,
            then,
        )

    def _gather_rows(
        self, source: Tensor, arrived: bool, then: Callable[[Tensor], object]
    ) -> Requests:
        """Gather all ranks' ``source`` as rows, and call ``then`` with them."""
        rows = source.new_empty((self.size, source.numel()))
        if self._is_alone(source):
            then(source.view(1, -1))
            return []
        options = _options(_c10d.AllgatherOptions, arrived)
        return self._start(
            lambda backend: backend._allgather_base(flat_bytes(rows), flat_bytes(source), options),
            source,
            lambda: then(rows),
        )

    def _is_alone(self, memory: Tensor) -> bool:
        return self.size == 1 and memory.device.type not in self._kinds

    def allreduce(self, source: Tensor, result: Tensor, op: Op, arrived: bool) -> Requests:
        check_op(source.dtype, op)
        ours, total = source.detach(), result.detach()
        if ours.is_complex() and op is Op.SUM:
            ours, total = torch.view_as_real(ours), torch.view_as_real(total)
        if op not in _OPS or ours.dtype not in _REDUCED or self._is_alone(ours):
            return self._gather_rows(
                source, arrived, lambda rows: result.detach().view(-1).copy_(_fold(rows, op))
            )
        direct = self._direct(arrived) if op is Op.SUM and total.is_cpu else None
        if direct is not None:

            def reduce() -> None:
                if not direct.sum_into(total, ours):  # one is not contiguous, for example
                    direct.allreduce([total.copy_(ours)]).wait()

            return [_Blocking(reduce)]
        if result is not source:
            total.copy_(ours)
        options = _options(dist.AllreduceOptions, arrived)
        options.reduceOp = _OPS[op]
        return self._start(lambda backend: backend.allreduce([total], options), total)

    def reduce(self, source: Tensor, result: Tensor, op: Op, root: int, arrived: bool) -> Requests:
        return self.allreduce(source, result, op, arrived)

    def scan(
        self,
        source: Tensor,
        result: Tensor,
        op: Op,
        exclusive: bool,
        descending: bool,
        arrived: bool,
    ) -> Requests:
        check_op(source.dtype, op)

        def reduce(rows: Tensor) -> None:
            mine = (
                rows[self.rank + exclusive :] if descending else rows[: self.rank + 1 - exclusive]
            )
            if len(mine):
                result.view(-1).copy_(_fold(mine.flip(0) if descending else mine, op))

        return self._gather_rows(source, arrived, reduce)

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
            lambda: result.view(-1).copy_(_fold(rows, op)),
        )

    def broadcast(self, memory: Tensor, root: int, arrived: bool) -> Requests:
        if self._is_alone(memory):
            return []
        options = _options(dist.BroadcastOptions, arrived)
        options.rootRank, options.rootTensor = root, 0
        return self._start(lambda backend: backend.broadcast([flat_bytes(memory)], options), memory)

    def allgather(self, block: Tensor, received: Blocks, arrived: bool) -> Requests:
        counts = received.layout.counts
        if len({*counts}) == 1:
            into = received.memory.view(-1)
            return self._gather_rows(block, arrived, lambda rows: into.copy_(rows.view(-1)))
        sent = block.view(-1).repeat(self.size)
        return self._exchange(sent, [block.numel()] * self.size, received.memory, counts, arrived)

    def gather(
        self, block: Tensor, received: Blocks, root: int, total: int, arrived: bool
    ) -> Requests:
        sent = [block.numel() * (rank == root) for rank in range(self.size)]
        return self._exchange(block, sent, received.memory, received.layout.counts, arrived)

    def scatter(
        self, sending: Blocks | None, received: Tensor, root: int, total: int, arrived: bool
    ) -> Requests:
        sent, counts = (
            (received.new_empty(0), [0] * self.size)
            if sending is None
            else (sending.memory, sending.layout.counts)
        )
        mine = [received.numel() * (rank == root) for rank in range(self.size)]
        return self._exchange(sent, counts, received, mine, arrived)

    def alltoall(self, sending: Blocks, received: Blocks, total: int, arrived: bool) -> Requests:
        return self._exchange(
            sending.memory,
            sending.layout.counts,
            received.memory,
            received.layout.counts,
            arrived,
        )

    # Messages

    def isend(self, memory: Tensor, dest: int, tag: int) -> Testable:
        if dest != PROC_NULL:
            contents = flat_bytes(memory).numpy().data
            self._mailbox.send(self._channel, self.rank, self._peers[dest], tag, contents)
        return _Blocking(lambda: None)

    def irecv(self, memory: Tensor, source: int, tag: int) -> Incoming:
        incoming = _Incoming(self._mailbox, memory, source, tag)
        if source != PROC_NULL:
            self._mailbox.channels[self._channel].expect(incoming)
        return incoming

    def post(self, dest: int, tag: int, text: bytes) -> None:
        self._mailbox.send(self._channel, self.rank, self._peers[dest], tag, text)

    def posted(self, source: int, tag: int) -> list[tuple[int, bytes]]:
        self._mailbox.poll()
        found = self._mailbox.channels[self._channel].take(source, tag)
        return [(message.source, bytes(message.contents)) for message in found]

    # Communicators

    def duplicate(self) -> C10dTransport:
        return self._part(str(next(self._children)), list(range(self.size)))

    def split(self, color: int, members: list[int]) -> C10dTransport | None:
        child = next(self._children)
        return None if color == UNDEFINED else self._part(f"{child}/{color}", members)

    def _part(self, name: str, members: list[int]) -> C10dTransport:
        store: Any = self._ranks.store
        if store is not None:
            store = dist.PrefixStore(name, store)
        return C10dTransport(
            Ranks(store, members.index(self.rank), len(members)),
            self._mailbox,
            [self._peers[member] for member in members],
            self._kinds,
            f"{self._path}.{name}",
        )

    def free(self) -> None:
        self.idle_headers.clear()
        self._backends.clear()
        self._sml = None


def _channel(path: str) -> bytes:
    return hashlib.blake2b(path.encode(), digest_size=16).digest()


def _options(kind: Any, arrived: bool) -> Any:
    options = kind()
    options.asyncOp = not arrived or bool(_Order.busy)  # which no other thread lets proceed
    return options


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
    if meeting.size == 1:
        del kinds[HOST]
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
            _wait.be_no_rank()
            return _alone()
        if World.from_environment().size == 1:
            check_launcher(1)
            return _alone()
        import torchrelay.aggregation  # noqa: F401, PLC0415 - registers sml

        dist.init_process_group("sml")
    return group_transport(dist.group.WORLD)
