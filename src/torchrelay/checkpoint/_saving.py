"""What every way to save does: write this rank's part, and on the coordinator assemble the manifest
from all parts, commit, and remove old checkpoints. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torchrelay._progress import no_progress
from torchrelay.checkpoint import _manifest
from torchrelay.checkpoint._boxes import tiling_fault
from torchrelay.checkpoint._catalog import check_keep, open_transaction, retain
from torchrelay.checkpoint._storage import Path, split
from torchrelay.checkpoint._tasks import no_collection
from torchrelay.checkpoint._types import Box, DataFile, StatePath, TensorDescription
from torchrelay.checkpoint._write import Data, Part, PlannedChunk, SaveOptions, write_part
from torchrelay.errors import MismatchError, StorageError, TorchRelayError, to_json

__all__ = [
    "Description",
    "Saving",
    "StateLayout",
    "assemble",
    "described",
]


_NAMES_RANK = re.compile(r"rank \d+: ")


class Saving:
    """One save, as a rank takes part in it.

    Raises:
        ArgumentError: ``path`` cannot be the path of a checkpoint, or not of one with ``keep=``.
    """

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self._options = options
        self._keep = check_keep(options.keep, path)
        self.transaction = open_transaction(path, fsync=options.fsync)
        self.path = self.transaction.location

    def check_shared(self, save_id: str) -> None:
        """Check that this rank finds the coordinator's save at its path.

        Raises:
            StorageError: it does not.
        """
        if not self.transaction.is_marked(save_id):
            raise StorageError(
                errno.ENOENT,
                f"this rank saves to {self.path}, but does not find the coordinator's save there: "
                "all ranks must save to the same path, on storage that they share",
            )

    def write(
        self,
        rank: int,
        chunks: Sequence[PlannedChunk],
        data: Sequence[Data],
        progress: Callable[[int], None] = no_progress,
    ) -> Part:
        """Write this rank's part: chunks and the data of each. Blocks until it is durable.

        Raises:
            StorageError: a file cannot be written.
        """
        return write_part(self.transaction, rank, chunks, data, self._options, progress)

    def commit(
        self, everyone: Sequence[Description], parts: Sequence[Part], save_id: str | None = None
    ) -> None:
        """Commit the checkpoint. Coordinator only. Arguments as for :func:`assemble`.

        Raises:
            MismatchError: the parts do not make whole tensors.
            StorageError: it cannot be committed.
        """
        _, name = split(self.path)
        self.transaction.commit(*assemble(everyone, parts, name=name, save_id=save_id))

    def retain(self) -> None:
        """Remove what ``keep=`` does not keep. Coordinator only, after the commit."""
        if self._keep is not None:
            retain(self.path, self._keep)


@dataclass(frozen=True)
class StateLayout:
    """What a rank's state consists of, without values and data.

    ``owners`` gives the first key of a tensor that has several; it is empty if no element of the
    tensor is on this rank.
    """

    tensors: Mapping[str, TensorDescription]
    paths: Mapping[str, StatePath]
    owners: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> bytes:
        """Equal for two ranks exactly if their layouts are, apart from empty owners."""
        owners = {key: owner for key, owner in self.owners.items() if owner}
        text = json.dumps([dict(part) for part in (self.tensors, self.paths, owners)])
        return hashlib.sha256(text.encode()).digest()

    def owner(self, key: str) -> str | None:
        """Return the first key of the tensor at ``key``; None if nothing of it is here."""
        return (self.owners.get(key, key) or None) if key in self.tensors else None


class Description(NamedTuple):
    """A rank's state without data: the ranks compare it, and the manifest is made from it.
    ``objects`` are the encoded values.
    """

    layout: StateLayout
    objects: Mapping[str, Any]

    def fingerprint(self) -> bytes:
        """Equal for two ranks exactly if their descriptions are, apart from empty owners."""
        text = json.dumps(dict(self.objects))
        return self.layout.digest + hashlib.sha256(text.encode()).digest()


@no_collection()
def assemble(
    everyone: Sequence[Description],
    parts: Sequence[Part],
    *,
    name: str,
    save_id: str | None = None,
) -> tuple[bytes, dict[str, int]]:
    """Return the manifest of a checkpoint whose parts are written, and the sizes of its files.

    Args:
        everyone: the descriptions of the ranks; one description if it is the same for all.
        parts: what all ranks have written.
        name: the last part of the checkpoint's path.
        save_id: the checkpoint's id; by default a random one.

    Raises:
        MismatchError: the parts do not make whole tensors.
    """
    chunks: dict[str, dict[Box, str]] = defaultdict(dict)
    files: dict[str, DataFile] = {}
    for part in parts:
        files.update(part.files)
        for keys, box, text in part.chunks:
            for key in keys:
                chunks[key].setdefault(box, text)
    tensors: dict[str, str] = {}
    objects: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    for part in parts:
        objects.update(part.objects)
    for description in everyone:
        objects.update(description.objects)
        paths.update(description.layout.paths)
        for key, (dtype, shape, *_) in description.layout.tensors.items():
            if key not in tensors:
                found = sorted(chunks[key].items())
                fault = tiling_fault(shape, [box for box, _ in found])
                if fault:
                    raise MismatchError(
                        f"the ranks together do not hold the whole tensor {key!r} of shape "
                        f"{list(shape)}: {fault}"
                    )
                tensors[key] = _manifest.tensor_text(dtype, shape, [text for _, text in found])
    data = _manifest.to_bytes(
        save_id=save_id or secrets.token_hex(8),
        name=name,
        saved_at_ns=time.time_ns(),
        world_size=len(parts),
        files=files,
        tensors=tensors,
        objects=objects,
        paths=paths,
    )
    return data, {name: file.size_bytes for name, file in files.items()}


def described(error: Exception, rank: int) -> dict[str, Any]:
    """Return an error as JSON values, with a message that names the rank it happened on."""
    found = to_json(error)
    if not _NAMES_RANK.match(found["message"]):
        found["message"] = f"rank {rank}: {found['message']}"
    if not isinstance(error, TorchRelayError):
        found["ranks"] = [rank]
    return found
