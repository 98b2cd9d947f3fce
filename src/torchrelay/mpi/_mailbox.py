"""Messages between the ranks of a process group, over an endpoint of the foundation's transport.

c10d's own messages cannot be tested for completion over Gloo, have no wildcards, and NCCL's have no
tags. These are kept by the receiver until a receive matches them, and match in the order in which
they arrive from each rank, as MPI's do. Long ones travel in pieces, which are joined before a
receive can match them. The pieces to a rank are numbered, because the network loses what is in
flight when a connection breaks.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from torchrelay import config, transport
from torchrelay._addresses import address_for_peers
from torchrelay._torch import flat_bytes, store_host
from torchrelay.errors import PeerLostError
from torchrelay.mpi import _wait
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG, PROC_NULL

if TYPE_CHECKING:
    from torchrelay.world import Ranks

__all__ = ["Channel", "Incoming", "Mailbox"]

# The sender in the group, the piece's number, whether it is the message's last; then the message:
# its channel, the sender there, its tag.
HEADER = struct.Struct("<iq?16siq")
MOST_BYTES = 1 << 28  # of a piece


class Arrived(NamedTuple):
    """A message that has arrived."""

    source: int
    tag: int
    pieces: list[memoryview]  # of memory that nothing changes


class Incoming:
    """A receive into ``memory``, tested after ``poll``."""

    __slots__ = ("contents", "is_done", "poll", "size_bytes", "source", "tag")

    def __init__(self, poll: Callable[[], None], memory: Tensor, source: int, tag: int) -> None:
        self.poll, self.contents = poll, flat_bytes(memory).numpy().data
        self.source, self.tag, self.size_bytes = source, tag, 0
        self.is_done = source == PROC_NULL

    def Test(self) -> bool:
        if not self.is_done:
            self.poll()
        return self.is_done

    def matches(self, message: Arrived) -> bool:
        return self.source in (message.source, ANY_SOURCE) and self.tag in (message.tag, ANY_TAG)

    def fill(self, arrived: Arrived) -> None:
        self.source, self.tag, pieces = arrived
        self.size_bytes = sum(map(len, pieces))
        if self.size_bytes == len(self.contents):
            end = 0
            for piece in pieces:
                start, end = end, end + len(piece)
                self.contents[start:end] = piece
        self.is_done = True  # last, because another thread may look


class Channel:
    """The messages of one transport: those that arrived and those that are expected."""

    __slots__ = ("arrived", "expected")

    def __init__(self) -> None:
        self.arrived: list[Arrived] = []
        self.expected: list[Incoming] = []

    def deliver(self, message: Arrived) -> None:
        incoming = next((each for each in self.expected if each.matches(message)), None)
        if incoming is None:
            self.arrived.append(message)
        else:
            self.expected.remove(incoming)
            incoming.fill(message)

    def expect(self, incoming: Incoming) -> None:
        message = next(filter(incoming.matches, self.arrived), None)
        if message is None:
            self.expected.append(incoming)
        else:
            self.arrived.remove(message)
            incoming.fill(message)

    def take(self, tag: int) -> list[Arrived]:
        """Remove and return the messages with ``tag``."""
        found = [message for message in self.arrived if message.tag == tag]
        if found:
            self.arrived = [message for message in self.arrived if message.tag != tag]
        return found


class Mailbox:
    """One rank's messages with the others of its process group. Collective creation.

    Threads may use it at once.

    Args:
        ranks: of the group.
        store: the group's, whose host shows which network reaches the others.
        timeout_s: for the others to arrive.
    """

    def __init__(self, ranks: Ranks, store: Any, timeout_s: float) -> None:
        self.rank, self._name = ranks.rank, ranks.name
        self._lock = threading.Lock()
        self._channels: defaultdict[bytes, Channel] = defaultdict(Channel)
        # The numbers of the next pieces to and from each rank.
        self._sent = [itertools.count() for _ in range(ranks.size)]
        self._received = [itertools.count() for _ in range(ranks.size)]
        self._pieces: list[list[memoryview]] = [[] for _ in range(ranks.size)]  # of unfinished ones
        settings = config.load(config.TransportSettings)
        self._most_bytes = min(MOST_BYTES, max(1, settings.max_message_bytes - HEADER.size))
        self._endpoint: Any = None
        self.address = ""
        if ranks.size == 1:
            return

        def gather(step: str, mine: Any) -> list[Any]:
            return ranks.gather(step, mine, timeout_s)

        self.address = address_for_peers(gather, ranks.name, store_host(store), settings.interface)
        token = bytes.fromhex(gather("token", secrets.token_hex(transport.TOKEN_BYTES))[0])
        # A rank that computes reads nothing meanwhile, and is not lost.
        self._network = transport.network(
            settings, token=token, interface=self.address, peer_timeout_s=0.0
        )
        self._endpoint = self._network.open(f"mpi {ranks.rank}")
        for rank, address in enumerate(gather("endpoint", self._endpoint.address)):
            if rank != ranks.rank:
                self._endpoint.connect(rank, address)
        _wait.process.mailboxes.add(self)

    def send(self, channel: bytes, source: int, dest: int, tag: int, contents: Any) -> None:
        """Send ``contents`` to the group's rank ``dest``, as rank ``source`` of the channel."""
        with self._lock:
            if dest == self.rank:
                message = Arrived(source, tag, [memoryview(bytes(contents))])
                self._channels[channel].deliver(message)
                return
            while True:
                piece, contents = contents[: self._most_bytes], contents[self._most_bytes :]
                number, is_last = next(self._sent[dest]), not contents
                header = HEADER.pack(self.rank, number, is_last, channel, source, tag)
                self._endpoint.send(dest, header, piece)
                if is_last:
                    return

    def expect(self, channel: bytes, incoming: Incoming) -> None:
        """Let ``incoming`` receive the next message of the channel that it matches."""
        with self._lock:
            self._channels[channel].expect(incoming)

    def take(self, channel: bytes, tag: int) -> list[Arrived]:
        """Remove and return the messages of the channel with ``tag`` that have arrived."""
        self.poll()
        with self._lock:
            return self._channels[channel].take(tag)

    def has_unsent(self) -> bool:
        """Return whether messages wait until a rank, which has not ended, reads earlier ones.

        Reads what has arrived, for which others may wait in the same way.
        """
        with self._lock:
            self._deliver_arrived()
            return any(map(self._endpoint.has_unsent, range(len(self._sent))))

    def poll(self) -> None:
        """Deliver the messages that have arrived.

        Raises:
            PeerLostError: messages of a rank were lost.
        """
        if self._endpoint is None:
            return
        with self._lock:
            sender = self._deliver_arrived()
        if sender is not None:
            raise _wait.process.failed(
                PeerLostError(
                    f"{self._name}: messages of rank {sender} of the process group were lost, "
                    "because the connection from it broke: does the network between their hosts "
                    "fail, or a firewall end connections? Start the ranks again",
                    (sender,),
                )
            )

    def _deliver_arrived(self) -> int | None:
        """Deliver what has arrived, up to the message of a rank that lost one; return the rank."""
        while (data := self._endpoint.receive(0.0)) is not None:
            sender, number, is_last, channel, source, tag = HEADER.unpack_from(data)
            if number != next(self._received[sender]):
                return int(sender)
            pieces = self._pieces[sender]
            pieces.append(data[HEADER.size :])
            if is_last:
                self._pieces[sender] = []
                self._channels[channel].deliver(Arrived(source, tag, pieces))
        return None
