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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchrelay import _native, config
from torchrelay._helper import Channel
from torchrelay._platform import anonymous_file, path_inside, user_at_other_end
from torchrelay.checkpoint.engine._engine import described
from torchrelay.checkpoint.memory._part import FileLayout, PartInfo, check_part
from torchrelay.checkpoint.memory._peers import PIECE_BYTES, Peer, PeerServer
from torchrelay.checkpoint.memory._socket import SOCKET, remove
from torchrelay.errors import (
    ArgumentError,
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
    """A part that is here, or is expected: of a rank of this host, or a copy of another host's."""

    info: PartInfo
    file: io.FileIO | None = None  # closed when nobody reads it any more
    is_checked: bool = True  # nobody computes its checksums
    record: bytes = b""  # once the part is whole and has checksums
    is_confirmed: bool = True  # nothing changed while its trainer copied it
    is_done: bool = False  # it is whole, and at the partner if there is one, or never will be
    error: dict[str, Any] | None = None

    @property
    def is_whole(self) -> bool:
        return bool(self.record) and self.is_confirmed

    def fileno(self) -> int:
        assert self.file is not None
        return self.file.fileno()


class _Attempt(NamedTuple):
    """The job since its ranks last met: ranks of an earlier meeting are refused."""

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
    has_left: bool = False


class MemoryServer:
    """The state of the process. Each client has a thread; ``_changed`` protects what they share."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._settings = config.load(config.Checkpoint)
        self._transport = config.load(config.TransportSettings)
        self._changed = threading.Condition()
        self._parts: dict[tuple[str, int], _Part] = {}
        self._attempt = _Attempt()
        self._clients, self._trainers, self._left_at_s = 0, 0, time.monotonic()
        self._ttl_s = self._settings.memory_ttl_s

    def run(self, listener: socket.socket) -> None:
        """Serve until no trainer has been there for ``memory_ttl_s``, or all is dropped; but not
        while a client is connected, which may be about to join.
        """
        listener.settimeout(_POLL_S)
        while self._clients or time.monotonic() < self._left_at_s + self._ttl_s:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                with self._changed:
                    self._clients += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        client = _Client(Channel(connection))
        try:
            if user_at_other_end(connection) == os.geteuid():
                while received := client.channel.receive():
                    self._reply(client, *received)
        except PeerLostError:
            return
        finally:
            client.channel.close()
            with self._changed:
                self._clients, client.has_left = self._clients - 1, True
                self._changed.notify_all()
                if client.attempt:
                    self._trainers, self._left_at_s = self._trainers - 1, time.monotonic()

    def _reply(self, client: _Client, request: tuple[str, Sequence[Any]], fds: list[int]) -> None:
        name, arguments = request
        try:
            files = [io.FileIO(fd, "r+") for fd in fds]
            value = getattr(self, f"do_{name}")(client, *arguments, *files)
        except Exception as error:
            client.channel.send((None, to_json(error)))
            return
        is_file = isinstance(value, _Part)
        client.channel.send((None if is_file else value, None), [value.fileno()] if is_file else [])

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
            client.attempt, self._ttl_s = attempt, self._settings.memory_ttl_s
            assert self._attempt.server is not None
            return self._attempt.server.address

    def do_meet(self, client: _Client, peers: Sequence[str], partner: str | None) -> None:
        with self._of(client):
            self._attempt = self._attempt._replace(peers=peers, partner=partner)

    def do_begin(self, client: _Client, info: PartInfo, whole: str) -> None:
        """Make place for a part: forget all checkpoints but this one and that which is ``whole``.

        Raises:
            CapacityError: there is not enough left.
        """
        with self._of(client):
            self._expect(info, whole)

    def do_stage(
        self,
        client: _Client,
        info: PartInfo,
        whole: str,
        layout: FileLayout | None,
        objects: Sequence[Any],
        is_confirmed: bool,
        file: io.FileIO,
    ) -> None:
        """Take a part that is staged. Its checksums are computed, and it is copied, meanwhile.

        It is not whole before it is confirmed.
        """
        client.layout = layout or client.layout
        with self._of(client):
            part, (*_, partner, joined, _) = self._part(info.key), self._attempt
            part.file, part.is_confirmed = file, is_confirmed
        assert joined is not None
        peer = partner and Peer(joined, partner, self._transport.peer_timeout_s)
        part.is_checked = False
        arguments = (client, part, client.layout, objects, whole, peer)
        threading.Thread(target=self._complete, args=arguments, daemon=True).start()

    def do_confirm(self, client: _Client, key: tuple[str, int]) -> None:
        with self._of(client):
            self._part(key).is_confirmed = True
            self._changed.notify_all()

    def do_wait(self, client: _Client, key: tuple[str, int], timeout_s: float) -> None:
        """Wait until a part is whole and copied.

        Raises:
            TorchRelayError: why it never will be.
        """
        with self._of(client):
            part = self._part(key)
            if not self._changed.wait_for(lambda: part.is_done, timeout_s):
                raise OperationTimeoutError(
                    f"the checkpoint of step {part.info.step} in memory is not whole, or not "
                    f"copied, after {timeout_s:g} s"
                )
            if part.error is not None:
                raise from_json(part.error)

    # What any client asks

    def do_drop(self, client: _Client) -> None:
        """Forget everything, and end when the last trainer leaves.

        Raises:
            ArgumentError: its trainers run, and this client is none of them.
        """
        with self._changed:
            if self._trainers and client.attempt != self._attempt.name:
                raise ArgumentError(
                    "trainers of this job run; drop what it has in memory after they have ended"
                )
            self._parts, self._ttl_s = {}, 0.0

    def do_list(self, client: _Client | None = None) -> list[PartInfo]:
        """Return the whole parts that are here, also those of which the checksums are computed."""
        with self._changed:
            self._changed.wait_for(lambda: all(part.is_checked for part in self._parts.values()))
            return [part.info for part in self._parts.values() if part.is_whole]

    def do_peers(self, client: _Client) -> tuple[bytes, str, Sequence[str]]:
        """Return the token of the job's network, its interface, and the other servers."""
        return self._attempt[1:4]

    def do_open(self, client: _Client, key: tuple[str, int]) -> _Part:
        return self._whole(key)

    def do_record(self, client: _Client, key: tuple[str, int]) -> bytes:
        return self._whole(key).record

    def do_status(self, client: _Client) -> dict[str, Any]:
        with self._changed:
            passed_s = 0.0 if self._trainers else time.monotonic() - self._left_at_s
            return {
                "id": self._id,
                "pid": os.getpid(),
                "trainers": self._trainers,
                "used_bytes": self._used_bytes(),
                "seconds_left": self._ttl_s - passed_s,
            }

    # Parts

    @contextmanager
    def _of(self, client: _Client) -> Iterator[None]:
        with self._changed:
            if client.attempt != self._attempt.name:
                raise PeerLostError(
                    "the job has been started again, or another job saves to the same path: its "
                    "ranks have taken over the checkpoints in memory"
                )
            yield

    def _used_bytes(self) -> int:
        return sum(part.info.size_bytes for part in self._parts.values())

    def _expect(self, info: PartInfo, whole: str) -> _Part:
        kept = {whole, info.save_id}
        self._parts = {key: part for key, part in self._parts.items() if key[0] in kept}
        used, limit = self._used_bytes(), _limit_bytes(self._settings)
        if used + info.size_bytes > limit:
            raise CapacityError(
                f"the checkpoint of step {info.step} needs {info.size_bytes} bytes of this host's "
                f"memory, of which {used} of {limit} are in use; raise "
                "TORCHRELAY_CHECKPOINT_MEMORY_BYTES, or save to the disk only (memory=False)"
            )
        return self._parts.setdefault(info.key, _Part(info))

    def _part(self, key: tuple[str, int]) -> _Part:
        part = self._parts.get(key)
        if part is None:
            raise StorageError("the part of the checkpoint is not in memory any more")
        return part

    def _whole(self, key: tuple[str, int]) -> _Part:
        with self._changed:
            part = self._part(key)
            if not part.is_whole:
                raise StorageError(f"the checkpoint of step {part.info.step} is not whole")
            return part

    def _check(self, part: _Part, layout: FileLayout, objects: Sequence[Any]) -> None:
        try:
            part.record = layout.record(part.info.rank, part.fileno(), objects)
        finally:
            with self._changed:
                part.is_checked = True
                self._changed.notify_all()

    def _complete(
        self,
        client: _Client,
        part: _Part,
        layout: FileLayout,
        objects: Sequence[Any],
        whole: str,
        peer: Peer | None,
    ) -> None:
        try:
            self._check(part, layout, objects)
            if peer is not None:
                _copy(part, whole, peer)
                with self._changed:
                    self._changed.wait_for(lambda: part.is_confirmed or client.has_left)
                if part.is_confirmed:
                    peer.call("confirm", key=part.info.key)
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
            return {"parts": self.do_list()}, b""
        if name == "offer":
            info = PartInfo(*values["info"])
            with self._changed:
                fd = anonymous_file("torchrelay-checkpoint", info.size_bytes)
                file = io.FileIO(fd, "r+")  # closed if there is no place for it
                part = self._expect(info, values["whole"])
                part.file, part.is_confirmed = file, False
            return {}, b""
        key, start = tuple(values["key"]), values.get("start", 0)
        if name == "record":
            return {}, self._whole(key).record
        if name == "read":
            size_bytes = min(values["size_bytes"], PIECE_BYTES)
            return {}, os.pread(self._whole(key).fileno(), size_bytes, start)
        with self._changed:
            part = self._part(key)
            if name == "confirm":
                part.is_confirmed = True
                return {}, b""
        is_outside = name == "write" and start + len(contents) > part.info.size_bytes
        if part.record or is_outside:
            raise StorageError("a copy of a checkpoint is not what was offered")
        if name == "write":
            os.pwrite(part.fileno(), contents, start)
        else:
            check_part(bytes(contents), part.fileno())
            part.record = bytes(contents)
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
        piece = os.pread(part.fileno(), min(PIECE_BYTES, size_bytes - start), start)
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
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # the output of whoever started it ends with that
    signal.signal(signal.SIGTERM, lambda *_: _end(folder))
    MemoryServer().run(listener)
    _end(folder)


def _end(folder: str) -> None:
    remove(folder)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
