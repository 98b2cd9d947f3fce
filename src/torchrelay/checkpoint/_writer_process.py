"""The process that writes what an asynchronous save has staged. It outlives a killed trainer.

It is started once per trainer with the file descriptor of a socket, receives jobs from it one after
another, and exits when the trainer does. It imports no torch, so it starts fast and stays small.

The writers of several ranks communicate through the folder that is being written: each leaves a
note there when its part is durable; the coordinator's writer waits for all notes, and commits.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torchrelay import _native
from torchrelay.checkpoint._assemble import (
    ChunkRecord,
    Description,
    PartRecord,
    TensorDescription,
    assemble,
    record_of,
)
from torchrelay.checkpoint._catalog import Keep, retain
from torchrelay.checkpoint._failures import describe, rebuild
from torchrelay.checkpoint._storage import Transaction, open_transaction, split
from torchrelay.checkpoint._types import DTYPES, Box, DataFile
from torchrelay.checkpoint._write import Source, write_part
from torchrelay.errors import OperationTimeoutError, PeerLostError

__all__ = ["receive", "send"]

_POLL_S = 0.02
_MAX_FDS = 2


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send a message and duplicates of the descriptors ``fds``."""
    data = json.dumps(message).encode()
    header = len(data).to_bytes(8, "little")
    if fds:
        socket.send_fds(sock, [header], list(fds))
    else:
        sock.sendall(header)
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors. Blocks.

    Raises:
        EOFError: the other end is closed.
    """
    header, fds, _, _ = socket.recv_fds(sock, 8, _MAX_FDS)
    header += _exactly(sock, 8 - len(header)) if header else b""
    if not header:
        raise EOFError
    message: dict[str, Any] = json.loads(_exactly(sock, int.from_bytes(header, "little")))
    return message, list(fds)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def main(fd: int) -> None:
    """Serve one trainer until it closes its end."""
    staging: _native.SharedMemory | None = None
    with socket.socket(fileno=fd) as sock:
        while True:
            try:
                job, fds = receive(sock)
            except (EOFError, ConnectionError):
                return
            if job["new_staging"]:
                staging = _native.SharedMemory.from_fd(fds[0], True)
                os.close(fds.pop(0))
            try:
                _Job(job, staging, fds).run()
                answer: dict[str, Any] = {"error": None}
            except Exception as error:
                answer = {"error": describe(error)}
            try:
                send(sock, answer)
            except ConnectionError:
                # The trainer is gone; the checkpoint is committed or discarded all the same.
                return


class _Job:
    """One save: this rank's part and, on the coordinator, the commit."""

    def __init__(
        self, job: dict[str, Any], staging: _native.SharedMemory | None, fds: list[int]
    ) -> None:
        self._job = job
        self._staging = staging
        self._transaction: Transaction = open_transaction(job["path"], fsync=job["fsync"])
        self._coordinates = job["index"] == 0
        if self._coordinates:
            self._transaction.take_over(job["id"], fds)

    def run(self) -> None:
        """Run the save. Returns when the checkpoint is committed.

        Raises:
            TorchRelayError: it failed, on whichever rank.
        """
        if self._coordinates:
            try:
                self._coordinate()
            finally:
                self._transaction.discard()  # does nothing after a commit
            if self._job["keep"] is not None:
                retain(self._job["path"], Keep(**self._job["keep"]))
            return
        note = self._transaction.open_note(self._note(self._job["index"]))
        note.finish(json.dumps(self._outcome()).encode())
        self._await_commit()

    @staticmethod
    def _note(index: int) -> str:
        return f"torchrelay-part-{index:05d}.json"

    def _coordinate(self) -> None:
        outcomes = {0: self._outcome()}
        self._until(lambda: self._collect(outcomes), lambda: self._missing(outcomes))
        for index, outcome in sorted(outcomes.items()):
            if "error" in outcome:
                raise rebuild(outcome["error"], self._job["ranks"][index])
        records = [_record(outcomes[index]) for index in range(len(self._job["ranks"]))]
        everyone = [_description(described) for described in self._job["everyone"]]
        _, name = split(self._job["path"])
        manifest, files = assemble(everyone, records, name=name, save_id=self._job["id"])
        self._transaction.commit(manifest, files)

    def _outcome(self) -> dict[str, Any]:
        try:
            part = write_part(
                self._transaction,
                self._job["rank"],
                [self._source(source) for source in self._job["sources"]],
                threads=self._job["threads"],
                checksum=self._job["checksum"],
            )
        except Exception as error:
            return {"error": describe(error)}
        return _record_json(record_of(part))

    def _source(self, source: dict[str, Any]) -> Source:
        dtype, box = DTYPES[source["dtype"]], Box(tuple(source["offsets"]), tuple(source["sizes"]))
        start = source["start"]
        assert self._staging is not None
        data = memoryview(self._staging)[start : start + box.numel * dtype.itemsize]  # type: ignore[arg-type]
        return Source(tuple(source["keys"]), dtype, tuple(source["shape"]), box, lambda: data)

    def _collect(self, outcomes: dict[int, dict[str, Any]]) -> bool:
        for index in range(1, len(self._job["ranks"])):
            if index not in outcomes:
                note = self._transaction.read_note(self._note(index))
                if note is not None:
                    outcomes[index] = json.loads(note)
        return len(outcomes) == len(self._job["ranks"])

    def _missing(self, outcomes: dict[int, dict[str, Any]]) -> list[int]:
        return [rank for index, rank in enumerate(self._job["ranks"]) if index not in outcomes]

    def _await_commit(self) -> None:
        note = self._note(self._job["index"])
        self._until(lambda: not self._transaction.under_way(note), lambda: [self._job["ranks"][0]])
        if self._transaction.committed_id() != self._job["id"]:
            coordinator = self._job["ranks"][0]
            raise PeerLostError(
                f"{self._job['path']}: the checkpoint was discarded; look at the output of rank "
                f"{coordinator}, which coordinates the save, for the reason",
                ranks=(coordinator,),
            )

    def _until(self, condition: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        deadline = time.monotonic() + self._job["timeout_s"]
        while not condition():
            if time.monotonic() > deadline:
                ranks = missing()
                raise OperationTimeoutError(
                    f"{self._job['path']}: the writers of ranks {ranks} did not finish their parts "
                    f"within {self._job['timeout_s']:g} s; the checkpoint is discarded",
                    ranks=ranks,
                )
            time.sleep(_POLL_S)


def _record_json(record: PartRecord) -> dict[str, Any]:
    return {
        "files": {name: asdict(file) for name, file in record.files.items()},
        "chunks": record.chunks,
    }


def _record(outcome: dict[str, Any]) -> PartRecord:
    chunks = [
        ChunkRecord(tuple(keys), Box(tuple(offsets), tuple(sizes)), text)
        for keys, (offsets, sizes), text in outcome["chunks"]
    ]
    return PartRecord({name: DataFile(**file) for name, file in outcome["files"].items()}, chunks)


def _description(described: dict[str, Any]) -> Description:
    tensors = {
        key: TensorDescription(dtype, tuple(shape))
        for key, (dtype, shape, *_) in described["tensors"].items()
    }
    paths = {
        key: tuple(tuple(item) if isinstance(item, list) else item for item in path)
        for key, path in described["paths"].items()
    }
    return Description(tensors, described["objects"], paths)


if __name__ == "__main__":
    main(int(sys.argv[1]))
