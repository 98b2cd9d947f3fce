"""Checkpoints in memory, as checkpoints at URLs: ``torchrelay://job/step-12``. What lies on this
host is read through descriptors of its segments, the rest by byte range from other hosts. Imports
no torch.
"""

from __future__ import annotations

import errno
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from torchrelay import config
from torchrelay._platform import boot_id
from torchrelay.checkpoint._types import MANIFEST, Sizes
from torchrelay.checkpoint.format._manifest import Head
from torchrelay.checkpoint.memory._part import PartInfo, file_name, manifest_of
from torchrelay.checkpoint.memory._peers import PIECE_BYTES, Peer
from torchrelay.checkpoint.memory._socket import MemoryClient
from torchrelay.checkpoint.storage._contract import Folder
from torchrelay.checkpoint.storage._local import LocalFolder
from torchrelay.errors import PeerLostError, StorageError
from torchrelay.transport import network

__all__ = ["SCHEME", "InMemory", "MemoryFolder", "MemoryServers"]

SCHEME = "torchrelay://"


@dataclass
class InMemory:
    """A checkpoint in memory: its parts, and who has each; ``None`` is this host."""

    info: PartInfo  # of any part
    parts: dict[int, tuple[PartInfo, Peer | None]] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """The parts that nobody has whom this process reaches."""
        return [part for part in range(self.info.world_size) if part not in self.parts]


class MemoryServers:
    """The memory servers of a job, as they are asked by one process."""

    def __init__(self, client: MemoryClient) -> None:
        self.client = client
        token, interface, addresses = client.ask("peers")
        settings = config.load(config.TransportSettings)
        self._peers: list[Peer] = []
        if addresses:
            joined = network(settings, token=token, interface=interface)
            self._peers = [Peer(joined, one, settings.peer_timeout_s) for one in addresses]
        self.reading = threading.Lock()  # servers are asked by one thread at a time

    @cached_property
    def checkpoints(self) -> list[InMemory]:
        """The checkpoints of which parts are in memory, the newest first. A server that does not
        answer is left out, with what only it has.
        """
        found: dict[tuple[int, int, str], InMemory] = {}

        def add(info: PartInfo, peer: Peer | None) -> None:
            one = found.setdefault((info.step, info.saved_at_ns, info.save_id), InMemory(info))
            one.parts.setdefault(info.part, (info, peer))

        with self.reading:
            for info in self.client.ask("list"):
                add(info, None)
            for peer in self._peers:
                with suppress(PeerLostError):
                    for values in peer.call("list")[0]["parts"]:
                        add(PartInfo(*values), peer)
        return [found[key] for key in sorted(found, reverse=True)]


class MemoryFolder(LocalFolder):
    """A checkpoint in memory, or all of a job's; a path, too: its own.

    What a server does not answer raises :class:`PeerLostError`.
    """

    request_bytes = 4 * PIECE_BYTES

    def __init__(self, url: str, servers: MemoryServers | None = None) -> None:
        """Connect to the memory servers of a job, unless they are given.

        Raises:
            StorageError: this host has none.
            UnavailableError: as for :class:`MemoryClient`.
        """
        super().__init__(url)
        job, _, self._name = url.removeprefix(SCHEME).rstrip("/").partition("/")
        self._is_own = servers is None
        if servers is None:
            try:
                client = MemoryClient(job)
            except OSError as error:
                what = f"{url}: this host has no memory server of that job"
                raise StorageError(errno.ENOENT, what) from error
            servers = MemoryServers(client)
        self.servers = servers

    def __fspath__(self) -> str:
        return self.location

    @cached_property
    def _whole(self) -> dict[str, InMemory]:
        """The checkpoints that are whole, by name; of one name the newest."""
        found = [one for one in self.servers.checkpoints if not one.missing]
        return {f"step-{one.info.step}": one for one in reversed(found)}

    @cached_property
    def _parts(self) -> dict[str, tuple[PartInfo, Peer | None]]:
        """The parts of this checkpoint, by the names of their files."""
        if self._name not in self._whole:
            what = f"{self.location}: no such checkpoint is whole in memory"
            raise StorageError(errno.ENOENT, what)
        parts = sorted(self._whole[self._name].parts.items())
        return {file_name(info.rank): (info, peer) for _, (info, peer) in parts}

    @cached_property
    def _manifest(self) -> bytes:
        parts = [*self._parts.values()]
        with self.servers.reading:
            records = [
                self.servers.client.ask("record", info.key)
                if peer is None
                else peer.call("record", key=info.key)[1]
                for info, peer in parts
            ]
        first = parts[0][0]
        return manifest_of(records, Head(first.saved_at_ns, first.save_id, self._name))

    @property
    def identity(self) -> str:
        is_here = all(peer is None for _, peer in self._parts.values())
        return f"{boot_id()}/{self.servers.client.folder}" if is_here else ""

    @property
    def replaced(self) -> bool:
        return False

    removed = replaced

    def names(self) -> list[str]:
        if not self._name:
            return [*self._whole]
        return [*self._parts, MANIFEST] if self._name in self._whole else []

    def folders(self) -> list[str]:
        return [f"{self.location.rstrip('/')}/{name}" for name in self.names() if not self._name]

    def linked(self) -> frozenset[str]:
        return frozenset()

    def content(self, name: str, most: int) -> bytes:
        return self._manifest[:most] if name == MANIFEST else super().content(name, most)

    def size_bytes(self, name: str) -> int:
        return len(self._manifest) if name == MANIFEST else self._parts[name][0].size_bytes

    def _open(self, name: str) -> int:
        key = self._parts[name][0].key  # which may have to be asked for
        with self.servers.reading:
            fd: int = self.servers.client.ask("open", key)
        return fd

    def read(self, name: str, offset: int, into: memoryview) -> None:
        info, peer = self._parts[name]
        if peer is None:
            super().read(name, offset, into)
            return
        with self.servers.reading:
            for start in range(0, len(into), PIECE_BYTES):
                piece = into[start : start + PIECE_BYTES]

                def fill(data: memoryview, piece: memoryview = piece) -> None:
                    piece[:] = data

                arguments = {"start": offset + start, "size_bytes": len(piece)}
                peer.post("read", into=fill, key=info.key, **arguments)
            peer.finish()

    def checksums(self, name: str, starts: Sizes, sizes: Sizes, into: Sizes | None = None) -> bytes:
        of = Folder if self._parts[name][1] else LocalFolder
        return of.checksums(self, name, starts, sizes, into)

    def map(self, name: str, offset: int, size_bytes: int) -> memoryview | None:
        is_here = self._parts[name][1] is None
        return super().map(name, offset, size_bytes) if is_here else None

    def close(self) -> None:
        super().close()
        if self._is_own:
            self.servers.client.close()
