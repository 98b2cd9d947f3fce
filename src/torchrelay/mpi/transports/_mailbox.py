"""Messages between the ranks of a process group, of all communicators that are made of it.

They travel in a native group of their own, which stays whole if a collective fails. Each
communicator has a channel: the higher half of the native tag. The native core keeps what has
arrived until a receive matches it; because receives of control messages from any rank are always
posted, senders do not wait for receivers.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from torchrelay.errors import MismatchError, OperationTimeoutError, PeerLostError
from torchrelay.mpi import _wait
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG, PROC_NULL

if TYPE_CHECKING:
    from torchrelay._native import Group, Transfer
    from torchrelay.mpi.transports._group import GroupTransport

__all__ = ["FOREVER_S", "Mailbox", "Message"]

FOREVER_S = 1e9  # those who wait raise before
TAG_BITS = 32
_NATIVE_ANY_TAG, _NATIVE_ANY_RANK = -(1 << 63), -1  # of any channel 0; of transfer.h

CONTROL_CHANNEL = 0
CONTROL_BYTES = 1024
CONTROL_HEADER = struct.Struct("<qi")  # the channel of the communicator, and the sender there


class Message:
    """A message in transit. Without a ``transfer`` it comes from nobody.

    Args:
        ranks: of the communicator, by their numbers in the mailbox.
        watched: those of other hosts, whose end the native core does not report to this receive.
    """

    __slots__ = (
        "_memory",
        "_native",
        "_ranks",
        "_transfer",
        "_watched",
        "size_bytes",
        "source",
        "tag",
    )

    def __init__(
        self,
        native: Any,
        transfer: Transfer | None,
        memory: object,
        ranks: Sequence[int] = (),
        watched: Sequence[int] = (),
    ) -> None:
        self._watched = watched
        self._native, self._transfer, self._memory, self._ranks = native, transfer, memory, ranks
        self.source, self.tag, self.size_bytes = PROC_NULL, ANY_TAG, 0

    def Test(self) -> bool:
        transfer = self._transfer
        if transfer is None:
            return True
        # The caller compares the sizes.
        with contextlib.suppress(MismatchError):
            if not self._native.wait_transfer(transfer, 0.0):
                lost = self._native.lost(self._watched) if self._watched else None
                if lost is not None:
                    raise PeerLostError(lost.message, lost.ranks)
                return False
        if self._ranks:
            self.source = self._ranks.index(transfer.source)
            self.tag = transfer.tag & ((1 << TAG_BITS) - 1)
            self.size_bytes = transfer.size_bytes
        return True


class Mailbox:
    """One rank's messages with the others of its process group. Threads may use it at once.

    Args:
        native: a group that nothing else uses.
        rank: this rank.
        hosts: the identity of each rank's host.
    """

    def __init__(self, native: Group, rank: int, hosts: Sequence[str]) -> None:
        self._native, self._rank, size = native, rank, len(hosts)
        self._elsewhere = {peer for peer in range(size) if hosts[peer] != hosts[rank]}
        self._strangers = {*self._elsewhere}  # without a connection, whose end would be noticed
        self._lock = threading.Lock()
        self._sending: list[tuple[Transfer, object]] = []
        self._expected: deque[tuple[Transfer, Any]] = deque()
        self._control: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self.channels = itertools.count(size + rank, size)  # that no other rank chooses
        self.users: weakref.WeakSet[GroupTransport] = weakref.WeakSet()
        for _ in range(size if size > 1 else 0):
            self._expect_control()
        # The native group is closed before the memory is freed that it uses.
        kept = (self._sending, self._expected)
        self._close = weakref.finalize(self, lambda native, _: native.close(), native, kept)
        self._close.atexit = False
        _wait.process.mailboxes.add(self)

    def close(self) -> None:
        """Leave the others, and their communicators; messages in transit are lost."""
        for user in list(self.users):
            user.free()
        self._close()

    def send(self, memory: Tensor, channel: int, dest: int, tag: int) -> Message:
        """Start to send contiguous ``memory`` to rank ``dest``."""
        arguments = (memory.data_ptr(), memory.nbytes, dest, channel << TAG_BITS | tag)
        return Message(self._native, self._start_sending(arguments, memory), memory)

    def receive(
        self, memory: Tensor, channel: int, ranks: Sequence[int], source: int, tag: int
    ) -> Message:
        """Start to receive into contiguous ``memory`` from rank ``source`` of ``ranks``."""
        watched = [*self._elsewhere.intersection(ranks)] if source == ANY_SOURCE else []
        for peer in self._strangers.intersection(watched):
            self._strangers.remove(peer)
            self.post(CONTROL_CHANNEL, self._rank, peer, b"")
        transfer = self._native.receive(
            memory.data_ptr(),
            memory.nbytes,
            _NATIVE_ANY_RANK if source == ANY_SOURCE else ranks[source],
            _NATIVE_ANY_TAG + channel if tag == ANY_TAG else channel << TAG_BITS | tag,
            0,
            FOREVER_S,
        )
        return Message(self._native, transfer, memory, ranks, watched)

    def _start_sending(self, arguments: tuple[int, int, int, int], memory: object) -> Transfer:
        transfer = self._native.send(*arguments, 0, FOREVER_S)
        if not transfer.ticket.done:
            with self._lock:
                self._sending[:] = [each for each in self._sending if not each[0].ticket.done]
                self._sending.append((transfer, memory))
        return transfer

    def has_unsent(self) -> bool:
        """Return whether messages wait until a rank, which has not ended, reads earlier ones."""
        return any(not transfer.ticket.done for transfer, _ in self._sending)

    # Control messages

    def post(self, channel: int, source: int, dest: int, text: bytes) -> None:
        """Send a control message to rank ``dest``, as rank ``source`` of the communicator."""
        message = (CONTROL_HEADER.pack(channel, source) + text)[:CONTROL_BYTES]
        memory = np.frombuffer(message.ljust(CONTROL_BYTES, b"\0"), np.uint8)
        tag = CONTROL_CHANNEL << TAG_BITS
        with contextlib.suppress(OperationTimeoutError, PeerLostError):  # a rank has died
            self._start_sending((memory.ctypes.data, memory.nbytes, dest, tag), memory)

    def posted(self, channel: int) -> list[tuple[int, bytes]]:
        """Return the control messages of a communicator that have arrived, with their sources."""
        with self._lock:
            with contextlib.suppress(OperationTimeoutError, PeerLostError):
                while self._expected and self._native.wait_transfer(self._expected[0][0], 0.0):
                    message = self._expected.popleft()[1].tobytes()
                    found, source = CONTROL_HEADER.unpack_from(message)
                    text = message[CONTROL_HEADER.size :].rstrip(b"\0")
                    self._control[found].append((source, text))
                    self._expect_control()
            return self._control.pop(channel, [])

    def _expect_control(self) -> None:
        memory = np.empty(CONTROL_BYTES, np.uint8)
        place = (memory.ctypes.data, memory.nbytes, _NATIVE_ANY_RANK, CONTROL_CHANNEL << TAG_BITS)
        self._expected.append((self._native.receive(*place, 0, FOREVER_S), memory))
