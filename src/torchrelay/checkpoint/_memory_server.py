"""The process that keeps a job's checkpoints in the memory of a host. It outlives its trainers.

There is one per user, host and job. Trainers pass it the segments that they have staged; it
computes the checksums and sends copies to its partner, the server of another host. It keeps two
checkpoints: the newest that all ranks know to be whole, and the one that is being saved. Only who
loads decides that a checkpoint is whole: it is, if all its parts are on servers that can be
reached.

It ends some time after the last trainer has left, and its memory with it. Imports no torch.
"""

from __future__ import annotations

import io
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrelay import _native, config
from torchrelay._helper import Channel
from torchrelay._platform import anonymous_file, path_inside
from torchrelay.checkpoint._engine import described
from torchrelay.checkpoint._memory_part import FileLayout, PartInfo, check_part
from torchrelay.checkpoint._memory_peers import PIECE_BYTES, Peer, PeerServer
from torchrelay.checkpoint._memory_socket import SOCKET, accepted, remove
from torchrelay.errors import (
    CapacityError,
    OperationTimeoutError,
    PeerLostError,
    StorageError,
    from_json,
    to_json,
)
from torchrelay.transport import network

__all__ = ["MemoryServer"]

_POLL_S = 0.2
_BACKLOG = 128


@dataclass
class _Part:
    """A part that is here: of a rank of this host, or the copy of another host's."""

    info: PartInfo
    file: io.FileIO  # closed when nobody reads it any more
    record: bytes = b""  # once the part is whole and has checksums
    is_copy: bool = False
    is_done: bool = False  # it is whole, and at the partner if there is one, or never will be
    error: dict[str, Any] | None = None


@dataclass
class _Attempt:
    """The job since its ranks last met: those of an earlier meeting are refused."""

    name: str = ""
    token: bytes = b""
    interface: str = ""
    peers: Sequence[str] = ()  # addresses of the other servers
    partner: str | None = None
    network: _native.TcpNetwork | None = None
    server: PeerServer | None = None


@dataclass
class _Client:
    """A connection of this host: what it has sent before."""

    channel: Channel
    attempt: str = ""
    layout: FileLayout | None = None


@dataclass
class MemoryServer:
    """The state of the process. Each client has a thread; ``_changed`` protects what they share."""

    folder: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    settings: config.Checkpoint = field(default_factory=lambda: config.load(config.Checkpoint))

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: dict[tuple[str, int], _Part] = {}
        self._expected: dict[tuple[str, int], int] = {}  # bytes of parts that are being staged
        self._attempt = _Attempt()
        self._trainers, self._is_dropped = 0, False
        self._left_at_s = time.monotonic()
        self._transport = config.load(config.TransportSettings)

    def run(self, listener: socket.socket) -> None:
        """Serve until no trainer has been there for ``memory_ttl_s``, or all is dropped."""
        listener.settimeout(_POLL_S)
        while self._seconds_left() > 0:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _seconds_left(self) -> float:
        with self._changed:
            if self._trainers:
                return self.settings.memory_ttl_s
            if self._is_dropped:
                return 0.0
            return self._left_at_s + self.settings.memory_ttl_s - time.monotonic()

    def _serve(self, connection: socket.socket) -> None:
        if not accepted(connection):
            return
        client = _Client(Channel(connection))
        with suppress(PeerLostError):
            while received := client.channel.receive():
                self._reply(client, *received)
        client.channel.close()
        if client.attempt:
            with self._changed:
                self._trainers -= 1
                self._left_at_s = time.monotonic()

    def _reply(self, client: _Client, request: tuple[str, Sequence[Any]], fds: list[int]) -> None:
        name, arguments = request
        try:
            files = [io.FileIO(fd, "r+") for fd in fds]
            value = getattr(self, f"do_{name}")(client, *arguments, *files)
        except Exception as error:
            client.channel.send((None, to_json(error)))
            return
        if isinstance(value, io.FileIO):
            client.channel.send((None, None), [value.fileno()])
        else:
            client.channel.send((value, None))

    # What trainers ask

    def do_join(self, client: _Client, attempt: str, token: bytes, interface: str) -> str:
        """Take part in an attempt, which ends the one before; return this server's address."""
        with self._changed:
            if attempt != self._attempt.name:
                if self._attempt.server is not None:
                    self._attempt.server.close()
                joined = network(self._transport, token=token, interface=interface)
                server = PeerServer(joined, self._answer)
                self._attempt = _Attempt(attempt, token, interface, network=joined, server=server)
            self._trainers += not client.attempt
            client.attempt, self._is_dropped = attempt, False
            assert self._attempt.server is not None
            return self._attempt.server.address

    def do_meet(self, client: _Client, peers: Sequence[str], partner: str | None) -> None:
        with self._changed:
            self._check(client)
            self._attempt.peers, self._attempt.partner = peers, partner

    def do_begin(self, client: _Client, info: PartInfo, whole: str) -> None:
        """Make place for a part: forget all checkpoints but this one and that which is ``whole``.

        Raises:
            CapacityError: there is not enough left.
        """
        with self._changed:
            self._check(client)
            self._expect(info, whole)

    def do_stage(
        self,
        client: _Client,
        info: PartInfo,
        whole: str,
        layout: FileLayout | None,
        objects: Sequence[Any],
        file: io.FileIO,
    ) -> None:
        """Take a part that is staged. Its checksums are computed, and it is copied, meanwhile."""
        client.layout = layout or client.layout
        with self._changed:
            self._check(client)
            part = self._add(info, file)
            peer = None
            if self._attempt.partner is not None and self._attempt.network is not None:
                timeout_s = self._transport.peer_timeout_s
                peer = Peer(self._attempt.network, self._attempt.partner, timeout_s)
        arguments = (part, client.layout, objects, whole, peer)
        threading.Thread(target=self._complete, args=arguments, daemon=True).start()

    def do_wait(self, client: _Client, key: tuple[str, int], timeout_s: float) -> None:
        """Wait until a part is whole and copied.

        Raises:
            TorchRelayError: why it never will be.
        """
        with self._changed:
            self._check(client)
            part = self._parts.get(key)
            if part is None:
                raise StorageError("the part of the checkpoint is not in memory any more")
            if not self._changed.wait_for(lambda: part.is_done, timeout_s):
                raise OperationTimeoutError(
                    f"the checkpoint of step {part.info.step} in memory is not whole, or not "
                    f"copied, after {timeout_s:g} s"
                )
            if part.error is not None:
                raise from_json(part.error)

    def do_drop(self, client: _Client) -> None:
        """Forget everything, and end when the last trainer leaves."""
        with self._changed:
            self._parts.clear()
            self._expected.clear()
            self._is_dropped = True

    # What any client asks

    def do_list(self, client: _Client) -> list[tuple[PartInfo, bool]]:
        """Return the whole parts that are here, and whether each is a copy."""
        with self._changed:
            return [(part.info, part.is_copy) for part in self._parts.values() if part.record]

    def do_peers(self, client: _Client) -> tuple[bytes, str, Sequence[str]]:
        """Return the token of the job's network, its interface, and the other servers."""
        with self._changed:
            return self._attempt.token, self._attempt.interface, self._attempt.peers

    def do_open(self, client: _Client, key: tuple[str, int]) -> io.FileIO:
        return self._whole(key).file

    def do_record(self, client: _Client, key: tuple[str, int]) -> bytes:
        return self._whole(key).record

    def do_status(self, client: _Client) -> dict[str, Any]:
        with self._changed:
            return {
                "id": self.id,
                "pid": os.getpid(),
                "trainers": self._trainers,
                "bytes": self._used_bytes(),
                "limit_bytes": _limit_bytes(self.settings),
                "ends_in_s": None if self._trainers else self._seconds_left(),
            }

    # Parts

    def _check(self, client: _Client) -> None:
        if client.attempt != self._attempt.name:
            raise PeerLostError(
                "the job has been started again, or another job saves to the same path: its ranks "
                "have taken over the checkpoints in memory"
            )

    def _used_bytes(self) -> int:
        held = sum(part.info.size_bytes for part in self._parts.values())
        return held + sum(self._expected.values())

    def _expect(self, info: PartInfo, whole: str) -> None:
        kept = {whole, info.save_id}
        self._parts = {key: part for key, part in self._parts.items() if key[0] in kept}
        self._expected = {key: size for key, size in self._expected.items() if key[0] in kept}
        used, limit = self._used_bytes(), _limit_bytes(self.settings)
        if used + info.size_bytes > limit:
            raise CapacityError(
                f"the checkpoint of step {info.step} needs {info.size_bytes} bytes of this host's "
                f"memory, of which {used} of {limit} are in use; raise "
                "TORCHRELAY_CHECKPOINT_MEMORY_BYTES, or save to the disk only (memory=False)"
            )
        self._expected[info.key] = info.size_bytes

    def _add(self, info: PartInfo, file: io.FileIO) -> _Part:
        if self._expected.pop(info.key, None) is None:
            raise StorageError(f"the checkpoint of step {info.step} was given up meanwhile")
        part = self._parts[info.key] = _Part(info, file)
        return part

    def _whole(self, key: tuple[str, int]) -> _Part:
        with self._changed:
            part = self._parts.get((key[0], key[1]))
            if part is None or not part.record:
                raise StorageError("the part of the checkpoint is not in memory any more")
            return part

    def _complete(
        self, part: _Part, layout: FileLayout, objects: Sequence[Any], whole: str, peer: Peer | None
    ) -> None:
        try:
            record = layout.record(part.info.rank, part.file.fileno(), objects)
            with self._changed:
                part.record = record
            if peer is not None:
                _copy(part, whole, peer)
        except Exception as error:
            part.error = described(error, part.info.rank)
            if part.record:
                part.error["message"] += (
                    f" (while the checkpoint of step {part.info.step}, which is whole on its own "
                    "host, was copied to the partner)"
                )
        with self._changed:
            part.is_done = True
            self._changed.notify_all()

    # What other servers, and ranks of other hosts, ask

    def _answer(
        self, name: str, values: dict[str, Any], contents: memoryview
    ) -> tuple[dict[str, Any], Any]:
        if name == "list":
            with self._changed:
                parts = [part.info for part in self._parts.values() if part.record]
            return {"parts": parts}, b""
        if name == "offer":
            info = PartInfo(*values["info"])
            with self._changed:
                self._expect(info, values["whole"])
                fd = anonymous_file("torchrelay-checkpoint", info.size_bytes)
                self._add(info, io.FileIO(fd, "r+")).is_copy = True
            return {}, b""
        key, start = tuple(values["key"]), values.get("start", 0)
        if name == "read":
            size_bytes = min(values["size_bytes"], PIECE_BYTES)
            return {}, os.pread(self._whole(key).file.fileno(), size_bytes, start)
        if name == "record":
            return {}, self._whole(key).record
        with self._changed:
            part = self._parts.get(key)
        if part is None or not part.is_copy or part.record:
            raise StorageError("the copy of a checkpoint was given up meanwhile")
        if name == "write":
            if start + len(contents) > part.info.size_bytes:
                raise StorageError("a copy of a checkpoint is larger than was said")
            os.pwrite(part.file.fileno(), contents, start)
        else:
            record = bytes(contents)
            check_part(record, part.file.fileno())
            part.record, part.is_done = record, True
        return {}, b""


def _limit_bytes(settings: config.Checkpoint) -> int:
    """Return the most bytes that all parts together may take."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # of the container
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return settings.memory_bytes or memory // 2


def _copy(part: _Part, whole: str, peer: Peer) -> None:
    """Send a part to the partner, which compares it with its checksums. Blocks."""
    peer.call("offer", info=part.info, whole=whole)
    key, size_bytes = part.info.key, part.info.size_bytes
    for start in range(0, size_bytes, PIECE_BYTES):
        piece = os.pread(part.file.fileno(), min(PIECE_BYTES, size_bytes - start), start)
        peer.post("write", piece, key=key, start=start)
    peer.call("finish", part.record, key=key)


def main(folder: str, lock_fd: int) -> None:
    """Listen in ``folder``, go to the background, and serve. The lock ends with the process."""
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(FileNotFoundError):  # of one that was killed
        os.unlink(SOCKET, dir_fd=here)
    listener.bind(path_inside(here, SOCKET))
    listener.listen(_BACKLOG)
    if os.fork():
        os._exit(0)  # whoever started it knows now that it listens
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: _end(folder))
    MemoryServer(folder).run(listener)
    _end(folder)


def _end(folder: str) -> None:
    remove(folder)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
