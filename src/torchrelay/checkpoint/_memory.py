"""Checkpoints in memory, as checkpoints at URLs: ``torchrelay://job/step-12``. What lies on this
host is read through descriptors of its segments, the rest by byte range from other hosts. Imports
no torch.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from torchrelay import _native, config
from torchrelay._platform import boot_id
from torchrelay.checkpoint._local import LocalFolder
from torchrelay.checkpoint._manifest import Head
from torchrelay.checkpoint._memory_part import PartInfo, file_name, manifest_of
from torchrelay.checkpoint._memory_peers import PIECE_BYTES, Peer
from torchrelay.checkpoint._memory_socket import MemoryClient
from torchrelay.checkpoint._types import MANIFEST, Sizes
from torchrelay.errors import PeerLostError, StorageError
from torchrelay.transport import network

__all__ = ["SCHEME", "InMemory", "Memory", "MemoryFolder", "memory_url"]

SCHEME = "torchrelay://"


def memory_url(job: str, step: int) -> str:
    return f"{SCHEME}{job}/step-{step}"


@dataclass
class InMemory:
    """A checkpoint in memory: its parts, and who has each; ``None`` is this host."""

    info: PartInfo  # of any part
    parts: dict[int, tuple[PartInfo, Peer | None]] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """The parts that nobody has whom this process reaches."""
        return [index for index in range(self.info.world_size) if index not in self.parts]


class Memory:
    """The memory of all hosts of a job, as this process reaches it."""

    def __init__(self, job: str) -> None:
        """Connect.

        Raises:
            OSError: this host has no memory server of the job.
            TorchRelayError: as for :class:`MemoryClient`.
        """
        self.client = MemoryClient(job)
        self._peers: list[Peer] = []
        token, interface, addresses = self.client.ask("peers")
        settings = config.load(config.TransportSettings)
        if addresses:
            joined = network(settings, token=token, interface=interface)
            self._peers = [Peer(joined, one, settings.peer_timeout_s) for one in addresses]

    def checkpoints(self) -> list[InMemory]:
        """Return the checkpoints of which parts are in memory, the newest first.

        A server that does not answer is left out, with what only it has.
        """
        found: dict[tuple[int, int, str], InMemory] = {}

        def add(info: PartInfo, peer: Peer | None) -> None:
            one = found.setdefault((info.step, info.saved_at_ns, info.save_id), InMemory(info))
            one.parts.setdefault(info.part, (info, peer))

        for info, _ in self.client.ask("list"):
            add(info, None)
        for peer in self._peers:
            try:
                for values in peer.call("list")[0]["parts"]:
                    add(PartInfo(*values), peer)
            except PeerLostError:
                continue
        return [found[key] for key in sorted(found, reverse=True)]

    def close(self) -> None:
        self.client.close()


class MemoryFolder(LocalFolder):
    """A checkpoint in memory, or all of a job's."""

    request_bytes = 4 * PIECE_BYTES

    def __init__(self, url: str) -> None:
        super().__init__(url)
        job, _, self._name = url.removeprefix(SCHEME).rstrip("/").partition("/")
        with self._lost():
            try:
                self._memory = Memory(job)
            except OSError as error:
                raise StorageError(
                    errno.ENOENT, f"{url}: this host has no memory server of that job"
                ) from error
        self._reading = threading.Lock()  # peers are used by one thread at a time

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Convert the loss of a server to the error of a storage."""
        try:
            yield
        except PeerLostError as error:
            raise StorageError(errno.EIO, f"{self.location}: {error}") from error

    @cached_property
    def _whole(self) -> dict[str, InMemory]:
        """The checkpoints that are whole, by name; of one name the newest."""
        with self._lost(), self._reading:
            found = [one for one in self._memory.checkpoints() if not one.missing]
        return {f"step-{one.info.step}": one for one in reversed(found)}

    @cached_property
    def _parts(self) -> dict[str, tuple[PartInfo, Peer | None]]:
        """The parts of this checkpoint, by the names of their files."""
        if self._name not in self._whole:
            raise StorageError(
                errno.ENOENT, f"{self.location}: no such checkpoint is whole in memory"
            )
        parts = self._whole[self._name].parts.values()
        return {file_name(info.rank): (info, peer) for info, peer in parts}

    @cached_property
    def _manifest(self) -> bytes:
        parts = sorted(self._parts.values(), key=lambda part: part[0].part)
        with self._lost(), self._reading:
            records = [
                self._memory.client.ask("record", info.key)
                if peer is None
                else peer.call("record", key=info.key)[1]
                for info, peer in parts
            ]
        first = parts[0][0]
        return manifest_of(records, Head(first.saved_at_ns, first.save_id, self._name))

    @property
    def identity(self) -> str:
        is_here = all(peer is None for _, peer in self._parts.values())
        return f"{boot_id()}/{self._memory.client.folder}" if is_here else ""

    @property
    def replaced(self) -> bool:
        return False

    @property
    def removed(self) -> bool:
        return False

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
        with self._lost(), self._reading:
            fd: int = self._memory.client.ask("open", self._parts[name][0].key)
        return fd

    def _is_here(self, name: str) -> bool:
        return self._parts[name][1] is None

    def read(self, name: str, offset: int, into: memoryview) -> None:
        info, peer = self._parts[name]
        if peer is None:
            super().read(name, offset, into)
            return
        with self._lost(), self._reading:
            for start in range(0, len(into), PIECE_BYTES):
                piece = into[start : start + PIECE_BYTES]

                def fill(data: memoryview, piece: memoryview = piece) -> None:
                    piece[:] = data

                arguments = {"start": offset + start, "size_bytes": len(piece)}
                peer.post("read", into=fill, key=info.key, **arguments)
            peer.finish()

    def checksums(self, name: str, starts: Sizes, sizes: Sizes) -> bytes:
        if self._is_here(name):
            return super().checksums(name, starts, sizes)
        data = np.empty(int(starts[-1] + sizes[-1] - starts[0]), np.uint8)
        self.read(name, int(starts[0]), memoryview(data.data))
        return _native.crc32c_of_memory(starts - starts[0] + np.uint64(data.ctypes.data), sizes)

    def map(self, name: str, offset: int, size_bytes: int) -> memoryview | None:
        return super().map(name, offset, size_bytes) if self._is_here(name) else None

    def close(self) -> None:
        super().close()
        self._memory.close()
