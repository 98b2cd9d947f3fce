"""Writes the damaged checkpoints beside this file; each folder is a copy of ``good`` with one thing
wrong.

They are kept in the repository, so that what today's reader refuses, tomorrow's still does. Run
this file to make them anew after a change of the format:
``python tests/faults/checkpoint/damaged/make.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchrelay import _native
from torchrelay.checkpoint import save

HERE = Path(__file__).parent
DATA = "data-00000-00000.safetensors"


def state() -> dict[str, Any]:
    """What ``good`` holds."""
    return {
        "weight": torch.arange(60, dtype=torch.float32).reshape(6, 10),
        "bias": torch.arange(5, dtype=torch.float64),
        "step": 7,
    }


def _sealed(document: dict[str, Any]) -> bytes:
    """A manifest whose own checksum is right."""
    document.pop("crc32c", None)
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    return body + f',\n"crc32c":"{_native.crc32c(body):08x}"}}\n'.encode()


def _edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        document = json.loads((folder / "manifest.json").read_text())
        change(document)
        (folder / "manifest.json").write_bytes(_sealed(document))

    return edit


def _data(change: Callable[[bytearray], bytes | bytearray]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / DATA).write_bytes(change(bytearray((folder / DATA).read_bytes())))

    return edit


def _flip(position: int) -> Callable[[bytearray], bytearray]:
    def flip(data: bytearray) -> bytearray:
        data[position] ^= 1
        return data

    return flip


def _chunk(document: dict[str, Any], key: str = "weight") -> dict[str, Any]:
    found: dict[str, Any] = document["tensors"][key]["chunks"][0]
    return found


def _missing(folder: Path) -> None:
    (folder / DATA).unlink()


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _cut_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-40])


def _flipped_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"step":7', b'"step":6'))


def _foreign_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"name": "a web app", "icons": []}\n')


def _duplicate_key(folder: Path) -> None:
    text = (folder / "manifest.json").read_bytes().rpartition(b',\n"crc32c"')[0]
    text = text.replace(b'"step":7', b'"step":7,"step":8')
    body = f',\n"crc32c":"{_native.crc32c(text):08x}"}}\n'.encode()
    (folder / "manifest.json").write_bytes(text + body)


def _symlink(folder: Path) -> None:
    (folder / DATA).unlink()
    (folder / DATA).symlink_to(f"../absent/{DATA}")


def _claims_terabytes(document: dict[str, Any]) -> None:
    size = 10**12
    document["tensors"]["weight"]["shape"] = [size]
    _chunk(document).update(offsets=[0], sizes=[size], bytes=[512, 512 + 4 * size], crc32c="")
    document["files"][DATA]["size_bytes"] = 512 + 4 * size
    del document["tensors"]["bias"]


def _traversal(document: dict[str, Any]) -> None:
    document["files"]["../../etc/passwd"] = document["files"].pop(DATA)


def _overlapping_chunks(document: dict[str, Any]) -> None:
    chunk = _chunk(document)
    start = chunk["bytes"][0]
    document["tensors"]["weight"]["chunks"] = [
        {**chunk, "sizes": [4, 10], "bytes": [start, start + 160], "name": "a"},
        {**chunk, "offsets": [3, 0], "sizes": [3, 10], "bytes": [start, start + 120], "name": "b"},
    ]


def _overlapping_bytes(document: dict[str, Any]) -> None:
    weight, bias = _chunk(document), _chunk(document, "bias")
    bias["bytes"] = [weight["bytes"][0] + 8, weight["bytes"][0] + 48]


# Folder: what is done to it, the error's type, and what its message must have.
CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "data-truncated": (
        _data(lambda data: data[:-9]),
        "CorruptionError",
        f"{DATA}: the file has .* cut short",
    ),
    "data-appended": (_data(lambda data: data + b"x"), "CorruptionError", "replaced or appended"),
    "data-bit-flipped": (
        _data(_flip(-1)),
        "CorruptionError",
        f"{DATA}: tensor 'bias' is damaged between bytes",
    ),
    "header-bit-flipped": (_data(_flip(20)), "CorruptionError", f"{DATA}: the header, bytes 0 to"),
    "data-missing": (_missing, "CorruptionError", f"{DATA}: the file is missing"),
    "data-foreign": (
        _data(lambda data: bytes(len(data))),
        "CorruptionError",
        "the header, bytes 0 to",
    ),
    "manifest-missing": (_no_manifest, "CorruptionError", "manifest.json is missing"),
    "manifest-truncated": (
        _cut_manifest,
        "CorruptionError",
        "manifest.json: the manifest is damaged or cut short",
    ),
    "manifest-bit-flipped": (_flipped_manifest, "CorruptionError", "its checksum does not match"),
    "manifest-foreign": (
        _foreign_manifest,
        "CorruptionError",
        "not the manifest of a TorchRelay checkpoint",
    ),
    "manifest-duplicate-key": (_duplicate_key, "CorruptionError", "the key 'step' occurs twice"),
    "version-newer": (
        _edited(lambda d: d.update(version=2)),
        "UnsupportedError",
        "version 2.*reads version 1",
    ),
    "version-older": (
        _edited(lambda d: d.update(version=0)),
        "UnsupportedError",
        "version 0.*reads version 1",
    ),
    "path-traversal": (_edited(_traversal), "CorruptionError", "not the name of a data file"),
    "symlink": (_symlink, "CorruptionError", f"{DATA}: a symbolic link.*is missing"),
    "chunks-overlap": (
        _edited(_overlapping_chunks),
        "CorruptionError",
        "'weight'.*two chunks overlap",
    ),
    "bytes-overlap": (_edited(_overlapping_bytes), "CorruptionError", f"overlap in {DATA} at byte"),
    "chunk-outside-tensor": (
        _edited(lambda d: _chunk(d).update(offsets=[1, 0])),
        "CorruptionError",
        "'weight'.*out of range",
    ),
    "chunk-outside-file": (
        _edited(lambda d: _chunk(d).update(bytes=[10**6, 10**6 + 240])),
        "CorruptionError",
        "'weight'.*out of range",
    ),
    "chunk-missing": (
        _edited(lambda d: d["tensors"]["weight"].update(chunks=[])),
        "CorruptionError",
        "0 of 60 elements",
    ),
    "negative-size": (
        _edited(lambda d: _chunk(d).update(sizes=[-6, -10])),
        "CorruptionError",
        "'weight'.*out of range",
    ),
    "chunk-in-unlisted-file": (
        _edited(lambda d: _chunk(d).update(file="data-00009-00000.safetensors")),
        "CorruptionError",
        "'weight' lies in 'data-00009-00000.safetensors', which the manifest does not list",
    ),
    "chunk-without-bytes": (
        _edited(lambda d: _chunk(d).pop("bytes")),
        "CorruptionError",
        "tensor 'weight' lacks 'bytes'",
    ),
    "checksums-cut": (
        _edited(lambda d: _chunk(d).update(crc32c="AAA=")),
        "CorruptionError",
        "'weight', the chunk at .*, has 2 bytes of checksums for 240 bytes",
    ),
    "checksums-not-base64": (
        _edited(lambda d: _chunk(d).update(crc32c="####AA==")),
        "CorruptionError",
        "tensor 'weight' is damaged",
    ),
    "header-claims-gigabytes": (
        _edited(lambda d: d["files"][DATA].update(header_bytes=10**12, size_bytes=2 * 10**12)),
        "CorruptionError",
        f"the header of file {DATA}",
    ),
    "claims-terabytes": (_edited(_claims_terabytes), "MismatchError", r"shape \[1000000000000\]"),
    "unknown-dtype": (
        _edited(lambda d: d["tensors"]["weight"].update(dtype="float7")),
        "UnsupportedError",
        "'weight' has the dtype float7, which",
    ),
    "shape-mismatch": (
        _edited(
            lambda d: (
                d["tensors"]["weight"].update(shape=[10, 6]),
                _chunk(d).update(sizes=[10, 6]),
            )[0]
        ),
        "MismatchError",
        r"'weight' is float32 of shape \[10, 6\] in the checkpoint, "
        r"and float32 of shape \[6, 10\] here",
    ),
    "dtype-mismatch": (
        _edited(lambda d: d["tensors"]["weight"].update(dtype="int32")),
        "MismatchError",
        "'weight' is int32",
    ),
    "value-of-unknown-kind": (
        _edited(lambda d: d["objects"].update(step={"$pickle": "gASVAAAAAAAA"})),
        "UnsupportedError",
        "step: DCP stored it as a pickle that is not run",
    ),
}


def main() -> None:
    for folder in HERE.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    save(state(), HERE / "good", fsync=False)
    for name, (damage, _, _) in CASES.items():
        shutil.copytree(HERE / "good", HERE / name)
        damage(HERE / name)


if __name__ == "__main__":
    main()
