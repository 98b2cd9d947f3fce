"""Requests between memory servers, and of ranks to them, over the job's network. Imports no torch.

A message is the length of a JSON object, the object, and bytes. Whoever asks has few requests open,
so that neither side holds more than a few pieces in memory.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from torchrelay import _native
from torchrelay.errors import PeerLostError, ProtocolError, from_json, to_json

__all__ = ["PIECE_BYTES", "Handler", "Peer", "PeerServer"]

PIECE_BYTES = 1 << 20
_OPEN_REQUESTS = 8
_MAX_PEERS = 1024  # that a server answers; whoever has not asked for longest is disconnected
_POLL_S = 0.5
_LENGTH = struct.Struct("<I")
# Returns the reply to a call: its values, and bytes.
Handler = Callable[[str, dict[str, Any], memoryview], tuple[dict[str, Any], Any]]

_logger = logging.getLogger("torchrelay.checkpoint")


def _packed(values: dict[str, Any]) -> bytes:
    text = json.dumps(values).encode()
    return _LENGTH.pack(len(text)) + text


def _unpacked(message: memoryview) -> tuple[dict[str, Any], memoryview]:
    (length,) = _LENGTH.unpack_from(message)
    end = _LENGTH.size + length
    return json.loads(bytes(message[_LENGTH.size : end])), message[end:]


class Peer:
    """A memory server, as one thread asks it.

    Args:
        network: of the same token as the server's.
        timeout_s: after so long without an answer it is lost.
    """

    def __init__(self, network: _native.Network, address: str, timeout_s: float) -> None:
        self._endpoint = network.open("torchrelay-checkpoint")
        self._endpoint.connect(0, address)
        self._from, self._timeout_s = self._endpoint.address, timeout_s
        self.address = address
        self._asked = 0
        self._open: deque[Callable[[memoryview], None] | None] = deque()

    def call(self, name: str, contents: Any = b"", **values: Any) -> tuple[dict[str, Any], bytes]:
        """Ask, and return the answer: values and bytes. Blocks.

        Raises:
            TorchRelayError: what the server raised.
            PeerLostError: it has not answered for the timeout.
        """
        self.finish()
        answer: list[memoryview] = []
        self.post(name, contents, answer.append, **values)
        reply = self._take()
        return reply, bytes(answer[0])

    def post(
        self,
        name: str,
        contents: Any = b"",
        into: Callable[[memoryview], None] | None = None,
        **values: Any,
    ) -> None:
        """Ask, without waiting for the answer unless too many requests are open; ``into`` gets the
        bytes of the answer.
        """
        while len(self._open) >= _OPEN_REQUESTS:
            self._take()
        self._asked += 1
        request = {"call": name, "id": self._asked, "from": self._from, "values": values}
        self._endpoint.send(0, _packed(request), contents)
        self._open.append(into)

    def finish(self) -> None:
        """Wait for all answers."""
        while self._open:
            self._take()

    def _take(self) -> dict[str, Any]:
        message = self._endpoint.receive(self._timeout_s)
        if message is None:
            raise PeerLostError(
                f"the memory server at {self.address.partition('|')[0]} has not answered for "
                f"{self._timeout_s:g} s"
            )
        reply, contents = _unpacked(message)
        expected = self._asked - len(self._open) + 1
        if reply["id"] != expected:
            raise ProtocolError(f"a memory server answered {reply['id']}, not {expected}")
        into = self._open.popleft()
        if reply["error"] is not None:
            raise from_json(reply["error"])
        if into is not None:
            into(contents)
        values: dict[str, Any] = reply["values"]
        return values


class PeerServer:
    """Answers peers in a thread of its own, until it is closed."""

    def __init__(self, network: _native.Network, handler: Handler) -> None:
        self._endpoint = network.open("torchrelay-checkpoint")
        self.address = self._endpoint.address
        self._handler = handler
        self._peers: OrderedDict[str, int] = OrderedDict()
        self._is_closed = False
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Answer nothing any more. The thread ends soon."""
        self._is_closed = True

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                message = self._endpoint.receive(_POLL_S)
                if message is not None and not self._is_closed:
                    self._answer(*_unpacked(message))
            except Exception:  # of a peer of another version
                _logger.exception("a request of another memory server is ignored")

    def _answer(self, request: dict[str, Any], contents: memoryview) -> None:
        reply: dict[str, Any] = {"id": request["id"], "error": None, "values": {}}
        data: Any = b""
        try:
            reply["values"], data = self._handler(request["call"], request["values"], contents)
        except Exception as error:
            reply["error"] = to_json(error)
        self._endpoint.send(self._connected(request["from"]), _packed(reply), data)

    def _connected(self, address: str) -> int:
        """Return the id of a peer; connect to it when it asks for the first time."""
        if address not in self._peers:
            used = self._peers.popitem(last=False)[1] if len(self._peers) >= _MAX_PEERS else None
            self._peers[address] = len(self._peers) if used is None else used
            self._endpoint.connect(self._peers[address], address)
        self._peers.move_to_end(address)
        return self._peers[address]
