"""Ranks as threads of this process: a transport in memory, for tests of order and derivatives.

What a rank passes is copied when it is passed, so sends do not wait. A rank that waits sleeps until
another one passes something. Once all ranks wait, and none can go on, all of them raise: a deadlock
is found at once, and without a timeout.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrelay._torch import flat_bytes
from torchrelay.errors import OperationTimeoutError
from torchrelay.mpi._chain import slot_of_thread
from torchrelay.mpi._comm import WORLD_NAME
from torchrelay.mpi._communicator import Communicator
from torchrelay.mpi._dtypes import Op, check_op, fold
from torchrelay.mpi._headers import Headers
from torchrelay.mpi._memory import Blocks
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED, Part, Testable
from torchrelay.mpi._wait import Job

__all__ = ["run_ranks"]

MAX_TAG = (1 << 31) - 1


class _Network:
    """What the ranks of a job share. Its state changes while ``changed`` is held."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.collectives: dict[tuple[str, int], list[Any]] = {}
        self.inboxes: defaultdict[tuple[str, int], _Inbox] = defaultdict(_Inbox)
        self._running = size
        self._waiting: set[int] = set()  # threads that have waited since the last change
        self._is_stuck = False

    def change(self) -> None:
        """Let the ranks that wait look again."""
        self._waiting.clear()
        self.changed.notify_all()

    def wait(self) -> None:
        """Sleep until something changes.

        Raises:
            OperationTimeoutError: nothing can change any more, because all ranks wait.
        """
        self._waiting.add(threading.get_ident())
        self._find_deadlock()
        if not self._is_stuck:
            self.changed.wait()
        if self._is_stuck:
            raise OperationTimeoutError("all ranks that still run wait for others")

    def leave(self) -> None:
        """Note that a rank has ended."""
        with self.changed:
            self._running -= 1
            self._find_deadlock()

    def _find_deadlock(self) -> None:
        if len(self._waiting) >= self._running:
            self._is_stuck = True
            self.changed.notify_all()


class _Meeting:
    """A collective: what all ranks pass, and what completes it on this one."""

    def __init__(
        self,
        network: _Network,
        key: tuple[str, int],
        size: int,
        rank: int,
        passed: Any,
        complete: Callable[[list[Any]], object],
    ) -> None:
        self._network, self._complete, self._is_done = network, complete, False
        with network.changed:
            self._passed = network.collectives.setdefault(key, [None] * (size + 1))
            self._passed[rank] = (passed,)
            if all(self._passed[:size]):
                self._passed[size] = network.collectives.pop(key)
                network.change()

    def Test(self) -> bool:
        with self._network.changed:
            if self._passed[-1] is None:
                self._network.wait()
            if self._passed[-1] is None:
                return False
        if not self._is_done:
            self._is_done = True
            self._complete([passed for (passed,) in self._passed[:-1]])
        return True


class _Incoming:
    """A receive into ``memory``."""

    def __init__(self, network: _Network, memory: Tensor, source: int, tag: int) -> None:
        self._network, self._memory = network, flat_bytes(memory)
        self.source, self.tag, self.size_bytes = source, tag, 0
        self.is_done = source == PROC_NULL

    def Test(self) -> bool:
        with self._network.changed:
            if not self.is_done:
                self._network.wait()
            return self.is_done

    def accept(self, source: int, tag: int, contents: Tensor) -> bool:
        """Take the message if it matches."""
        if self.source not in (source, ANY_SOURCE) or self.tag not in (tag, ANY_TAG):
            return False
        self.source, self.tag, self.size_bytes = source, tag, contents.numel()
        if self.size_bytes == self._memory.numel():
            self._memory.copy_(contents)
        self.is_done = True
        return True


class _Inbox:
    """The messages to a rank that have arrived, and those that it expects; both in order."""

    def __init__(self) -> None:
        self.arrived: list[tuple[int, int, Tensor]] = []
        self.expected: list[_Incoming] = []
        self.control: list[tuple[int, bytes]] = []

    def deliver(self, message: tuple[int, int, Tensor]) -> None:
        found = next((each for each in self.expected if each.accept(*message)), None)
        if found is None:
            self.arrived.append(message)
        else:
            self.expected.remove(found)

    def expect(self, incoming: _Incoming) -> None:
        for position, message in enumerate(self.arrived):
            if incoming.accept(*message):
                del self.arrived[position]
                return
        self.expected.append(incoming)


class ThreadTransport:
    """A communicator's ranks, by the names ``peers`` that they have in the network."""

    max_tag = MAX_TAG

    def __init__(self, network: _Network, job: Job, peers: list[int], me: int, path: str) -> None:
        self.job, self.rank, self.size = job, peers.index(me), len(peers)
        self.is_alone = network.size == 1
        self.idle_headers: list[Headers] = []
        self._network, self._peers, self._me, self._path = network, peers, me, path
        self._calls, self._children = itertools.count(), itertools.count()

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu"

    # Collectives

    def _meet(self, passed: Any, complete: Callable[[list[Any]], object]) -> list[Testable]:
        key = (self._path, next(self._calls))
        return [_Meeting(self._network, key, self.size, self.rank, passed, complete)]

    def row_exchange(self, sent: Tensor, received: Tensor) -> Callable[[bool], Testable]:
        return lambda _: self._meet(
            sent.clone(), lambda rows: received.view(-1).copy_(torch.cat(rows))
        )[0]

    def _fold(self, source: Tensor, result: Tensor, op: Op, ranks: Sequence[int]) -> list[Testable]:
        """Reduce the ``source`` of ``ranks`` into ``result``."""
        check_op(source.dtype, op)

        def complete(rows: list[Tensor]) -> None:
            if ranks:
                result.detach().view(-1).copy_(fold([rows[rank] for rank in ranks], op))

        return self._meet(source.detach().view(-1).clone(), complete)

    def reduce(
        self, source: Tensor, result: Tensor, op: Op, root: int | None, may_block: bool
    ) -> list[Testable]:
        return self._fold(source, result, op, range(self.size))

    def scan(
        self, source: Tensor, result: Tensor, op: Op, exclusive: bool, descending: bool
    ) -> list[Testable]:
        ranks = range(self.size)[:: -1 if descending else 1]
        return self._fold(source, result, op, ranks[: ranks.index(self.rank) + 1 - exclusive])

    def reduce_scatter(
        self, blocks: Blocks, result: Tensor, op: Op, may_block: bool
    ) -> list[Testable]:
        check_op(result.dtype, op)
        return self._meet(
            [block.clone() for block in blocks.tensors()],
            lambda all_blocks: result.copy_(fold([each[self.rank] for each in all_blocks], op)),
        )

    def broadcast(self, memory: Tensor, root: int) -> list[Testable]:
        memory = memory.detach()
        return self._meet(memory.clone(), lambda sent: memory.copy_(sent[root]))

    def move(
        self, name: str, sent: Part, received: Part, root: int | None, total: int, may_block: bool
    ) -> list[Testable]:
        def blocks(part: Part) -> list[Tensor | None]:
            if isinstance(part, Blocks):
                return [*part.tensors()]
            return [part if root in (None, rank) else None for rank in range(self.size)]

        def complete(sent_blocks: list[list[Tensor | None]]) -> None:
            for into, theirs in zip(blocks(received), sent_blocks, strict=True):
                block = theirs[self.rank]
                if into is not None and block is not None:
                    into.view(-1).copy_(block.view(-1))

        return self._meet([None if b is None else b.clone() for b in blocks(sent)], complete)

    # Messages

    def cut(self, memory: Tensor) -> Sequence[Tensor]:
        return [memory]

    def _inbox(self, rank: int) -> _Inbox:
        return self._network.inboxes[self._path, self._peers[rank]]

    def isend(self, memory: Tensor, dest: int, tag: int) -> Testable:
        if dest != PROC_NULL:
            with self._network.changed:
                self._inbox(dest).deliver((self.rank, tag, flat_bytes(memory).clone()))
                self._network.change()
        return _Incoming(self._network, memory, PROC_NULL, tag)  # which is done

    def irecv(self, memory: Tensor, source: int, tag: int) -> _Incoming:
        incoming = _Incoming(self._network, memory, source, tag)
        if source != PROC_NULL:
            with self._network.changed:
                self._inbox(self.rank).expect(incoming)
        return incoming

    def post(self, dest: int, text: bytes) -> None:
        with self._network.changed:
            self._inbox(dest).control.append((self.rank, text))

    def posted(self) -> list[tuple[int, bytes]]:
        with self._network.changed:
            inbox = self._inbox(self.rank)
            found, inbox.control = inbox.control, []
            return found

    # Communicators

    def duplicate(self, for_messages: bool = False) -> ThreadTransport:
        return self._part(str(next(self._children)), self._peers)

    def split(self, color: int, members: list[int]) -> ThreadTransport | None:
        child = next(self._children)
        if color == UNDEFINED:
            return None
        return self._part(f"{child}/{color}", [self._peers[member] for member in members])

    def _part(self, name: str, peers: list[int]) -> ThreadTransport:
        return ThreadTransport(self._network, self.job, peers, self._me, f"{self._path}.{name}")

    def free(self) -> None:
        self.idle_headers.clear()


def run_ranks(size: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """Call ``function`` with the communicator of each of ``size`` ranks, a thread each.

    Returns:
        What it returned, or the exception that it raised, on every rank.
    """
    network = _Network(size)
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        try:
            transport = ThreadTransport(network, Job(slot_of_thread()), list(range(size)), rank, "")
            results[rank] = function(Communicator(transport, WORLD_NAME))
        except BaseException as error:
            results[rank] = error
        finally:
            network.leave()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
