"""What the members of an elastic job publish to each other, over connections of their own.

A member listens at one address for as long as it lives, and connects to each other one for a round
of agreement, and when it has waited for others for a while: one that computes answers too, so
whoever does not is frozen or cut off. Whoever accepts sends a nonce; what the other one then sends
is authenticated with it and the job's secret. Of what it publishes only the newest counts, so a
connection that is lost is made again, and no message is repeated. That nobody listens where a
member did shows that its process has ended: it never closes its listener while it lives.

Frames are JSON of limited size. Handles in them let others form a group with this member: they are
as secret as the network is, which the transport key encrypts for all that follows.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import closing, suppress
from typing import Any

from torchrelay._addresses import listen_at
from torchrelay._mesh import Frames
from torchrelay._processes import closed_in_children

__all__ = ["Peers", "join", "resolved", "split"]

_logger = logging.getLogger("torchrelay.training")
_VERSION = 2
_PUBLIC = b"torchrelay elastic"  # the key of what anyone may know
_REDIAL_S, _MOST_REDIAL_S = 0.05, 2.0
_HANDSHAKE_S = 10.0
_CANCEL_S = 0.05  # after which a task that does not end is cancelled again
_MOST_INCOMING = 1024
_BROKEN = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    asyncio.TimeoutError,
)


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not 0 <= int(port) < 1 << 16:
        raise ValueError(f"{port} is not a port")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolved(text: str) -> list[str]:
    """Return the addresses that a list of ``host:port`` stands for. Raises OSError, ValueError."""
    parts = [split(one.strip()) for one in text.split(",") if one.strip()]
    found = [socket.getaddrinfo(*part, type=socket.SOCK_STREAM) for part in parts]
    return sorted({join(str(one[4][0]), int(one[4][1])) for each in found for one in each})


class Peers:
    """This member's listener and connections, which a thread of its own serves.

    Args:
        address: where it listens, ``host:port``; port 0: any.
        secret: of the job. ``key_name``: compared with that of others, to name the cause.
        about: what must be equal on all members, described for messages.
        ask_after_s: how often this member connects anew to those that it waits for.

    Attributes:
        others: the addresses of those that it waits for.
        waits_since_s: since when, by ``time.monotonic``; 0.0: it does not wait for any.
        received: what others publish: member and value.
        found: by address, the member that listens there, empty if none does, and a time before
            that was seen.
        refusals: why others refuse this member, by address.

    Raises:
        OSError: it cannot listen at the address.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        key_name: str,
        about: dict[str, str],
        ask_after_s: float,
    ) -> None:
        self.others: set[str] = set()
        self.waits_since_s = self._asked_s = 0.0
        self._ask_after_s = ask_after_s
        self._secret, self._key_name, self._about = secret, key_name, about
        self._listener = closed_in_children(listen_at(*split(address)))
        self.address = join(split(address)[0], self._listener.getsockname()[1])
        self.member = f"{self.address}/{secrets.token_hex(4)}"
        self.received: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self.found: dict[str, tuple[str, float]] = {}
        self.refusals: dict[str, str] = {}
        self._value: dict[str, Any] = {}
        self._targets: dict[str, asyncio.Task[None]] = {}
        self._unreached: set[str] = set()  # to which there is no connection yet
        self._flushed: dict[str, dict[str, Any]] = {}  # by address, the value that was sent
        self._incoming = 0
        self._news = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._published = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="torchrelay-elastic", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, by which others see that this member has left."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join()

    def begin(self) -> None:
        """Make all connections anew, and forget what the earlier ones have shown, unless that was
        done since this member began to wait.
        """
        self._loop.call_soon_threadsafe(self._begin, self.waits_since_s)
        self.waits_since_s = 0.0

    def unanswered(self, longest_s: float) -> set[str]:
        """Return the addresses of ``others`` that have been asked for ``longest_s`` or longer, and
        have not answered.
        """
        silent = self.others - self.found.keys()  # first: asking anew changes the time before it
        return silent if time.monotonic() - self._asked_s > longest_s else set()

    def publish(self, value: dict[str, Any], addresses: Iterable[str]) -> None:
        """Publish ``value`` in the place of what was published before."""
        self._loop.call_soon_threadsafe(self._publish, value, {*addresses} - {self.address})

    def flush(self, value: dict[str, Any], addresses: Iterable[str], timeout_s: float) -> None:
        """Return when ``value`` is on its way to ``addresses``, or after ``timeout_s``."""
        end_s, others = time.monotonic() + timeout_s, {*addresses} - {self.address}
        while any(self._flushed.get(one) != value for one in others) and time.monotonic() < end_s:
            self.wait(0.01)

    def wait(self, longest_s: float) -> None:
        """Wait for news: something that was received, or that has become known of others."""
        self._news.wait(longest_s)
        self._news.clear()

    # --- in the thread

    def _run(self) -> None:
        self._main = self._loop.create_task(self._serve())
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()  # again where it was lost, as in _keep_publishing
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
        self._loop.close()
        self._listener.close()

    async def _serve(self) -> None:
        # Not `async with`: from Python 3.12 on, its end waits for the connections, which end later.
        server = await asyncio.start_server(self._answer, sock=self._listener)
        with closing(server):
            while True:
                await asyncio.sleep(self._ask_after_s / 2)
                since_s = self.waits_since_s
                if since_s and time.monotonic() - max(since_s, self._asked_s) > self._ask_after_s:
                    self._hang_up()
                    self._publish({}, self.others)

    def _begin(self, waits_since_s: float) -> None:
        if not self._asked_s > waits_since_s > 0.0:
            self._hang_up()

    def _hang_up(self) -> None:
        self._asked_s = time.monotonic()
        for task in self._targets.values():
            task.cancel()
        for known in (self._targets, self._unreached, self._flushed, self.found, self.refusals):
            known.clear()

    def _publish(self, value: dict[str, Any], addresses: set[str]) -> None:
        if value != self._value:
            self._value = value
            self._published.set()
            self._published = asyncio.Event()
        for address in addresses - self._targets.keys():
            self._dial(address)

    def _dial(self, address: str) -> None:
        self._targets[address] = self._loop.create_task(self._keep_publishing(address))

    async def _keep_publishing(self, address: str) -> None:
        redial_s = _REDIAL_S

        def is_wanted() -> bool:
            # Python before 3.12 loses a cancellation that comes when a connection does.
            return self._targets.get(address) is asyncio.current_task()

        while is_wanted():
            dialed_s = time.monotonic()
            self._unreached.add(address)
            try:
                dial = asyncio.open_connection(*split(address))
                reader, writer = await asyncio.wait_for(dial, _MOST_REDIAL_S)
                try:
                    if is_wanted():
                        self._unreached.discard(address)
                        await self._publish_to(address, reader, writer, dialed_s)
                finally:
                    writer.close()
            except ConnectionRefusedError:
                self.found[address] = "", dialed_s
                self._news.set()
            except asyncio.TimeoutError:
                continue  # it has waited long enough
            except _BROKEN:
                pass
            await asyncio.sleep(redial_s)
            redial_s = min(2 * redial_s, _MOST_REDIAL_S)

    async def _publish_to(
        self,
        address: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        dialed_s: float,
    ) -> None:
        theirs, nonce = Frames(_PUBLIC), secrets.token_hex(8)
        answers = _read(reader, theirs)
        greeting = await anext(answers)
        mine = {"version": _VERSION, "token or key": self._key_name}
        different = [name for name in mine if greeting[name] != mine[name]]
        if different:
            self._refuse(address, f"the {' and '.join(different)} of its job are not this member's")
        theirs.key, ours = self._key(greeting["nonce"], nonce), Frames(self._key(greeting["nonce"]))
        writer.transport.set_write_buffer_limits(0)
        writer.write(ours.pack({"member": self.member, "nonce": nonce, "about": self._about}))
        answer = await anext(answers)
        if "refused" in answer:
            self._refuse(address, str(answer["refused"]))
        self.found[address] = str(answer["member"]), dialed_s
        ended = asyncio.ensure_future(reader.read(1))
        # asyncio would log an exception that nobody asks for.
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())
        while not ended.done():
            value, published = self._value, asyncio.ensure_future(self._published.wait())
            if value:
                writer.write(ours.pack(value))
                await writer.drain()
            self._flushed[address] = value
            self._news.set()
            await asyncio.wait((ended, published), return_when=asyncio.FIRST_COMPLETED)
            published.cancel()

    def _refuse(self, address: str, reason: str) -> None:
        self.refusals[address] = reason
        self._news.set()
        raise ValueError(reason)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what another member publishes; turn away whoever is none."""
        nonce, ours = secrets.token_hex(8), Frames(_PUBLIC)
        self._incoming += 1
        try:
            if self._incoming > _MOST_INCOMING:
                raise ValueError("too many others are connected")
            greeting = {"version": _VERSION, "token or key": self._key_name, "nonce": nonce}
            writer.write(ours.pack(greeting))
            published = _read(reader, Frames(self._key(nonce)))
            hello = await asyncio.wait_for(anext(published), _HANDSHAKE_S)
            member, theirs = str(hello["member"]), hello["about"]
            different = [
                f"{name} is {theirs.get(name)} there, {mine} on {self.member}"
                for name, mine in self._about.items()
                if theirs.get(name) != mine
            ]
            text = f"{member} cannot be in this job: {'; '.join(different)}"
            ours.key = self._key(nonce, hello["nonce"])
            writer.write(ours.pack({"refused": text} if different else {"member": self.member}))
            if different:
                raise ValueError(text)
            self._hear(member.partition("/")[0])
            async for value in published:
                self.received.put((member, value))
                self._news.set()
        except asyncio.CancelledError:
            pass  # this member closes; asyncio would log it
        except _BROKEN as error:
            if not isinstance(error, OSError):
                peer = writer.get_extra_info("peername")
                _logger.warning("turned away the connection from %s: %s", peer, error)
        finally:
            self._incoming -= 1
            writer.close()

    def _hear(self, address: str) -> None:
        """Connect at once to one that has reached this member, instead of later."""
        if address in self._unreached:
            self._targets.pop(address).cancel()
            self._dial(address)

    def _key(self, *nonces: str) -> bytes:
        return hashlib.blake2b(json.dumps(nonces).encode(), key=self._secret).digest()


async def _read(reader: asyncio.StreamReader, frames: Frames) -> AsyncIterator[dict[str, Any]]:
    while data := await reader.read(1 << 16):
        frames.feed(data)
        for frame in frames:
            yield frame
    raise ConnectionResetError("closed")
