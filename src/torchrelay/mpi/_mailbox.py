"""Messages between the ranks of a process group, over an endpoint of the foundation's transport.

c10d's own messages cannot be tested for completion over Gloo, have no wildcards, and NCCL's have no
tags. These are sent whole, kept by the receiver until a receive matches them, and match in the
order in which they arrive from each rank, as MPI's do.
"""

from __future__ import annotations

import secrets
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from torchrelay import config, transport
from torchrelay._addresses import address_for_peers
from torchrelay._torch import flat_bytes, store_host
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG, PROC_NULL

if TYPE_CHECKING:
    from torchrelay.world import Ranks

__all__ = ["Channel", "Incoming", "Mailbox"]

HEADER = struct.Struct("<16sqi")  # channel, tag, source
MOST_BYTES = 1 << 28


class Arrived(NamedTuple):
    """A message that has arrived."""

    source: int
    tag: int
    contents: memoryview  # of memory that nothing changes


class Incoming:
    """A receive into ``memory``, tested after ``poll``."""

    __slots__ = ("is_done", "memory", "poll", "size_bytes", "source", "tag")

    def __init__(self, poll: Callable[[], None], memory: Tensor, source: int, tag: int) -> None:
        self.poll, self.memory = poll, memory
        self.source, self.tag, self.size_bytes = source, tag, 0
        self.is_done = source == PROC_NULL

    def Test(self) -> bool:
        if not self.is_done:
            self.poll()
        return self.is_done

    def matches(self, message: Arrived) -> bool:
        return self.source in (message.source, ANY_SOURCE) and self.tag in (message.tag, ANY_TAG)

    def fill(self, arrived: Arrived) -> None:
        self.source, self.tag, contents = arrived
        self.size_bytes, self.is_done = len(contents), True
        if contents and self.size_bytes == self.memory.nbytes:
            flat_bytes(self.memory).numpy().data[:] = contents


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

    Args:
        ranks: of the group.
        store: the group's, whose host shows which network reaches the others.
        timeout_s: for the others to arrive.
    """

    def __init__(self, ranks: Ranks, store: Any, timeout_s: float) -> None:
        self.rank = ranks.rank
        self.channels: defaultdict[bytes, Channel] = defaultdict(Channel)
        settings = config.load(config.TransportSettings)
        self.most_bytes = min(MOST_BYTES, settings.max_message_bytes - HEADER.size)
        self._endpoint: Any = None
        self.address = ""
        if ranks.size == 1:
            return

        def gather(step: str, mine: Any) -> list[Any]:
            return ranks.gather(step, mine, timeout_s)

        self.address = address_for_peers(gather, ranks.name, store_host(store), settings.interface)
        token = bytes.fromhex(gather("token", secrets.token_hex(transport.TOKEN_BYTES))[0])
        self._network = transport.network(settings, token=token, interface=self.address)
        self._endpoint = self._network.open(f"mpi {ranks.rank}")
        for rank, address in enumerate(gather("endpoint", self._endpoint.address)):
            if rank != ranks.rank:
                self._endpoint.connect(rank, address)

    def send(self, channel: bytes, source: int, dest: int, tag: int, contents: Any) -> None:
        """Send ``contents`` to the group's rank ``dest``, as rank ``source`` of the channel."""
        if dest == self.rank:
            self.channels[channel].deliver(Arrived(source, tag, memoryview(bytes(contents))))
        else:
            self._endpoint.send(dest, HEADER.pack(channel, tag, source), contents)

    def poll(self) -> None:
        """Deliver the messages that have arrived."""
        while self._endpoint is not None:
            data = self._endpoint.receive(0.0)
            if data is None:
                return
            channel, tag, source = HEADER.unpack_from(data)
            self.channels[channel].deliver(Arrived(source, tag, data[HEADER.size :]))
