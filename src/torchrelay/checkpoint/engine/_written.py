"""What the ranks of a save have written, and the manifest that is made of it. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torchrelay._boxes import Box, tiling_fault
from torchrelay.checkpoint._tasks import no_collection
from torchrelay.checkpoint._types import MAX_HEADER_BYTES, DataFile, StatePath
from torchrelay.checkpoint.engine._output import ChunkRecord
from torchrelay.checkpoint.format import _manifest
from torchrelay.checkpoint.format._manifest import Head
from torchrelay.checkpoint.plan._plan import Description
from torchrelay.errors import ArgumentError, MismatchError

__all__ = ["Written", "assemble"]


@dataclass
class Written:
    """What one rank has written, for the coordinator. With DCP's planner also its encoded values by
    key.
    """

    files: dict[str, DataFile] = field(default_factory=dict)
    chunks: list[ChunkRecord] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    exported: dict[str, Sequence[str]] = field(default_factory=dict)  # tensors, by file

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Written:
        """Return what a rank has written, from its ``vars()`` as JSON."""
        chunks = [
            ChunkRecord(tuple(keys), Box(tuple(offsets), tuple(sizes)), text)
            for keys, (offsets, sizes), text in values["chunks"]
        ]
        files = {name: DataFile(*file) for name, file in values["files"].items()}
        return cls(files, chunks, exported=values["exported"])


@no_collection()
def assemble(
    descriptions: Sequence[Description],
    parts: Sequence[Written],
    head: Head,
    names: Mapping[str, str] = MappingProxyType({}),
    small: Mapping[str, DataFile] = MappingProxyType({}),
) -> tuple[bytes, dict[str, int]]:
    """Return the manifest of a checkpoint whose parts are written, and the sizes of its files.

    Args:
        descriptions: the descriptions of the ranks; one description if it is the same for all.
        parts: what all ranks have written.
        head: what the first line of the manifest says.
        names: of files that are called otherwise in the checkpoint than in the parts.
        small: files of no part.

    Raises:
        ArgumentError: no reader would take it: a tensor has too many dimensions, or a header or the
            manifest is too long.
        MismatchError: the parts do not make whole tensors.
    """
    chunks: dict[str, dict[Box, str]] = defaultdict(dict)
    files: dict[str, DataFile] = {names[name]: file for name, file in small.items()}
    for part in parts:
        files.update({names.get(name, name): file for name, file in part.files.items()})
        for keys, box, text in part.chunks:
            entry = text
            for name in part.exported:
                entry = entry.replace(f'"file":"{name}"', f'"file":"{names[name]}"', 1)
            for key in keys:
                chunks[key].setdefault(box, entry)
    tensors: dict[str, str] = {}
    objects: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    for part in parts:
        objects.update(part.objects)
    for description in descriptions:
        objects.update(description.objects)
        paths.update(description.layout.paths)
        for key, (dtype, shape, *_) in description.layout.tensors.items():
            if key not in tensors:
                if len(shape) > _manifest.MAX_DIMS:
                    raise ArgumentError(
                        f"{key}: a checkpoint holds tensors of at most {_manifest.MAX_DIMS} "
                        f"dimensions, and this one has {len(shape)}; reshape it"
                    )
                found = sorted(chunks[key].items())
                fault = tiling_fault(shape, [box for box, _ in found])
                if fault:
                    raise MismatchError(
                        f"the ranks together do not hold the whole tensor {key!r} of shape "
                        f"{list(shape)}: {fault}"
                    )
                tensors[key] = _manifest.tensor_text(dtype, shape, [text for _, text in found])
    data = _manifest.to_bytes(
        head,
        world_size=len(parts),
        files=files,
        tensors=tensors,
        objects=objects,
        paths=paths,
    )
    header_bytes = max((file.header_bytes for file in files.values()), default=0)
    for what, size_bytes, limit_bytes in (
        ("the manifest", len(data), _manifest.MAX_MANIFEST_BYTES),
        ("the header of a data file", header_bytes, MAX_HEADER_BYTES),
    ):
        if size_bytes > limit_bytes:
            raise ArgumentError(
                f"{head.name}: {what} would have {size_bytes} bytes, more than the {limit_bytes} "
                "that readers take; save fewer tensors and values, or shorten their keys"
            )
    return data, {name: file.size_bytes for name, file in files.items()}
