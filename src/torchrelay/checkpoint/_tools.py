"""Operations on whole checkpoints for the command line: read without a model, and convert."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch

from torchrelay._boxes import Box
from torchrelay.checkpoint._save import save
from torchrelay.checkpoint._types import CONTAINER, INDEX, METADATA, is_container, is_metadata
from torchrelay.checkpoint.engine._output import grouped
from torchrelay.checkpoint.engine._read import ChunkReader, ChunkSlice, ReadOptions, segments_of
from torchrelay.checkpoint.format._manifest import PARSING_ERRORS, Parser, parse
from torchrelay.checkpoint.format._pickles import load_pickled
from torchrelay.checkpoint.format._values import Encoded, decode, encode
from torchrelay.checkpoint.state._state import (
    ContainerClass,
    Index,
    finished,
    flatten,
    insert,
    key_of,
    leaf_path,
    put,
)
from torchrelay.checkpoint.state._tensors import dtype_of
from torchrelay.checkpoint.storage._contract import storage_errors
from torchrelay.errors import (
    ArgumentError,
    CorruptionError,
    StorageError,
    UnavailableError,
    UnsupportedError,
)

__all__ = ["FORMATS", "convert", "read_state"]

_ORIGINALS = "torchrelay-values.json"  # in a file of torch.save: paths and encoded values
FORMATS = ("torchrelay", "dcp", "safetensors", "torch")
# A zip archive, or the pickled magic number of files from before torch 1.6.
_TORCH_STARTS = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")


def read_state(
    path: str, prefix: str = "", *, encoded: bool = False, plain: bool = False
) -> dict[str, Any]:
    """Return the state of a checkpoint of any format, nested as it was saved, on the CPU.

    Args:
        path: a checkpoint of ours or of DCP, safetensors files, or a file of ``torch.save``.
        prefix: only keys that begin with it are read; it is removed from them.
        encoded: leave what is not a tensor as it is in the checkpoint.
        plain: return no dictionaries or tuples of a class that ``torch.load`` refuses.

    Raises:
        ArgumentError: no key begins with ``prefix``.
        CorruptionError: it is damaged.
        StorageError: there is none.
        UnsupportedError: it holds what cannot be read.
    """
    state: dict[str, Any] = {}
    if _is_torch_file(path):
        leaves = flatten(_read_torch(path), expand=True)
        for key, inner in _paths({key: leaf.path for key, leaf in leaves.items()}, prefix, path):
            insert(state, inner, leaves[key].value)
        found: dict[str, Any] = finished(state)
        return found
    reader = ChunkReader.open(path, ReadOptions(), ChunkReader.check_all)
    with closing(reader):
        manifest = reader.manifest.without_exports()
        targets: list[tuple[ChunkSlice, torch.Tensor]] = []
        keys = dict.fromkeys((*manifest.paths, *manifest.tensors, *manifest.objects))
        paths = {key: leaf_path(manifest.paths.get(key, (key,))) for key in keys}
        for key, inner in _paths(paths, prefix, path):
            if key in manifest.objects:
                stored = manifest.objects[key]
                if is_container(key):
                    found_class = ContainerClass(stored)
                    is_kept = not plain or _is_read(found_class.empty())
                    value: Any = found_class if is_kept else ContainerClass(None)
                else:
                    value = Encoded(stored) if encoded else decode(key, stored)
            elif key not in manifest.tensors:
                value = {}
            else:
                entry = manifest.tensors[key]
                entry.check_known(key, path)
                value = torch.empty(
                    entry.shape, dtype=getattr(torch, entry.dtype.name), device="cpu"
                )
                whole = Box.whole(entry.shape)
                segments = segments_of(key, entry, whole)
                targets += [(one, value[one.inner.within(whole)]) for one in segments]
            insert(state, inner, value)
        reader.fill(targets, verify=True)
        read: dict[str, Any] = finished(state)
        return read


def _paths(
    paths: Mapping[str, tuple[Any, ...]], prefix: str, location: str
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the keys that begin with ``prefix``, and their paths without it."""
    keys = [key for key in paths if not is_metadata(key)]
    if keys and not any(key.startswith(prefix) for key in keys):
        shown = ", ".join(map(repr, keys[:3]))
        raise ArgumentError(
            f"{location}: no key begins with {prefix!r}; its {len(keys)} keys begin with {shown}"
        )
    for key, path in paths.items():
        if key.startswith(prefix):
            inner = _without(prefix, path)
            is_whole = len(inner) > 1 or inner[0] in (METADATA, CONTAINER)
            if not is_metadata(key) or is_whole:  # else it is of what the prefix divides
                yield key, inner


def _without(prefix: str, path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a path whose key begins with ``prefix``, without it."""
    if not prefix:
        return path
    for count in range(1, len(path)):
        if f"{key_of(path[:count])}." == prefix:
            return path[count:]
    return (key_of(path).removeprefix(prefix),)


def _is_torch_file(path: str) -> bool:
    """Return whether a file begins as those of ``torch.save``, whatever it is called."""
    if not os.path.isfile(path):
        return False
    with storage_errors(f"reading {path}"), open(path, "rb") as file:
        return file.read(max(map(len, _TORCH_STARTS))).startswith(_TORCH_STARTS)


def _read_torch(path: str) -> dict[str, Any]:
    try:
        # torch would go by the name of the file
        with storage_errors(f"reading {path}"), open(path, "rb") as file:
            found = load_pickled(file)
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from None
    except StorageError:
        raise
    except Exception as error:
        raise CorruptionError(f"{path}: torch.load refuses it ({error})") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{path}: it holds a {type(found).__name__}, not a state dict")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = _originals_name(archive)
            if name in archive.namelist():
                _restore(found, archive.read(name), path)
    return found


def _restore(state: dict[str, Any], originals: bytes, where: str) -> None:
    """Put the values that :func:`_write_torch` replaced back in their place."""
    what = f"what convert added for values ({_ORIGINALS})"
    try:
        for steps, value in parse(originals, where, what):
            put(state, leaf_path(Parser(where).path("a value", steps)), decode(where, value))
    except PARSING_ERRORS as error:
        raise CorruptionError(f"{where}: {what} is damaged ({error})") from None


def convert(
    source: str, target: str, to: str, max_file_bytes: int, *, prefix: str = ""
) -> list[str]:
    """Write the state of ``source`` to ``target`` in another format.

    Args:
        source: anything that :func:`read_state` reads.
        target: a folder; for ``"torch"`` a file. It must not exist yet.
        to: one of :data:`FORMATS`. Safetensors files hold tensors only.
        max_file_bytes: safetensors files larger than this are split, with an index beside them.
        prefix: only keys that begin with it are written, with it removed.

    Returns:
        the keys of values that the format cannot hold: safetensors files lack all of them, DCP's
        checkpoints lack empty dictionaries, files of ``torch.save`` have something similar in the
        place of some.

    Raises:
        ArgumentError: the format is unknown, ``target`` exists, no key begins with ``prefix``, or
        the state holds what the format cannot.
        UnsupportedError: it holds a tensor that no checkpoint can hold.
    """
    if to not in FORMATS:
        raise ArgumentError(f"--to {to}: it must be one of {', '.join(FORMATS)}")
    if os.path.exists(target):
        raise ArgumentError(f"{target} exists already; choose another name")
    is_other = to in ("dcp", "torch")
    state = read_state(source, prefix, encoded=not is_other, plain=is_other)
    if to == "torchrelay":
        save(state, target, no_dist=True)
    elif to == "torch":
        return _write_torch(state, target)
    elif to == "dcp":
        return _write_dcp(state, target)
    else:
        return _write_safetensors(state, target, max_file_bytes)
    return []


def _write_dcp(state: dict[str, Any], target: str) -> list[str]:
    """Write a checkpoint of DCP; return the keys of empty dictionaries, which it cannot hold."""
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        with _writing(target):
            try:
                dcp.save(state, checkpoint_id=target, no_dist=True)
            except dcp.CheckpointException as error:  # of this process alone
                (cause, _), *_ = error.failures.values()
                raise (cause.__context__ or cause) from None
    leaves = flatten(state, expand=True)
    return [key for key, leaf in leaves.items() if leaf.is_empty and not is_metadata(key)]


@contextmanager
def _writing(target: str) -> Iterator[None]:
    """Convert errors of writing ``target``, and remove what was written of it."""
    try:
        with storage_errors(f"writing {target}"):
            try:
                yield
            except RuntimeError as error:  # torch's writer ends with one, if the file is not whole
                raise (error.__context__ or error) from None
    except BaseException:
        if os.path.isdir(target):
            shutil.rmtree(target)
        elif os.path.exists(target):
            os.unlink(target)
        raise


def _write_torch(state: dict[str, Any], target: str) -> list[str]:
    """Write a file that ``torch.load`` reads by default.

    In place of a value that it refuses, the file has a similar one. The value itself is in a part
    of the file of which only :func:`read_state` knows, so that nothing is lost on the way back.

    Returns:
        the keys of such values.
    """
    originals: dict[str, Any] = {}
    for key, leaf in flatten(state, expand=True).items():
        if is_metadata(key):
            continue
        path = [_stored_step(key, step) for step in leaf.path]
        if not isinstance(leaf.value, torch.Tensor) and not _is_read(leaf.value):
            originals[key] = path, encode(key, leaf.value)
            put(state, leaf.path, _similar(leaf.value))
    with _writing(target):
        with open(target, "wb") as file:
            torch.save(state, file)
        if originals:
            with zipfile.ZipFile(target, "a") as archive:
                archive.writestr(_originals_name(archive), json.dumps([*originals.values()]))
    return [*originals]


def _originals_name(archive: zipfile.ZipFile) -> str:
    """Return the name of the part with the values in a file of ``torch.save``, whose parts must all
    be in one folder.
    """
    return f"{archive.namelist()[0].partition('/')[0]}/{_ORIGINALS}"


def _stored_step(key: str, step: Any) -> Any:
    if isinstance(step, Index):
        return step.stored()
    if not _is_read(step):
        raise ArgumentError(
            f"{key}: torch.load refuses a dictionary with the key {step!r}; convert to another "
            "format, or save str(key)"
        )
    return step if type(step) is str else [encode(f"{key}: a key", step)]


def _is_read(value: Any) -> bool:
    """Return whether ``torch.load`` reads a value by default."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _similar(value: Any) -> Any:  # noqa: PLR0911 - one for each kind
    """Return the nearest to a value that ``torch.load`` reads by default."""
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        except TypeError:  # torch has no such dtype
            return value.astype(str).tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if isinstance(value, bytes):
        return value or bytearray()  # it refuses b""
    if isinstance(value, Mapping):
        return {key if _is_read(key) else str(key): _similar(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_similar, value))
    if isinstance(value, frozenset) and _is_read({*value}):
        return {*value}
    if isinstance(value, list | set | frozenset | range | deque):
        return [*map(_similar, value)]
    return value if _is_read(value) else str(value)


def _write_safetensors(state: dict[str, Any], target: str, max_file_bytes: int) -> list[str]:
    """Write the tensors of a state; return the keys of values that are not tensors."""
    try:
        from safetensors import SafetensorError  # noqa: PLC0415
        from safetensors.torch import save_file  # noqa: PLC0415
    except ImportError:
        raise UnavailableError("safetensors is missing; pip install safetensors") from None
    tensors: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    memory: set[int] = set()
    for key, leaf in flatten(state).items():
        if not isinstance(leaf.value, torch.Tensor):
            left_out.append(key)
            continue
        if dtype_of(key, leaf.value).width > 1:
            raise ArgumentError(
                f"{key}: safetensors files hold no tensors of {leaf.value.dtype}; convert to "
                "another format, or save its torch.view_as_real()"
            )
        tensor = leaf.value.contiguous()
        if tensor.untyped_storage().data_ptr() in memory:
            tensor = tensor.clone()  # save_file refuses tensors that share memory
        memory.add(tensor.untyped_storage().data_ptr())
        tensors[key] = tensor
    if not tensors:
        raise ArgumentError(
            "there is no tensor to write, and safetensors files hold tensors only; it has "
            f"{', '.join(left_out[:3])}"
        )
    groups = grouped(tensors, (tensor.nbytes for tensor in tensors.values()), max_file_bytes)
    with _writing(target), storage_errors(f"writing {target}", SafetensorError):
        os.makedirs(target)
        weights: dict[str, str] = {}
        for number, keys in enumerate(groups, 1):
            part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            name = f"model{part}.safetensors"
            found = {key: tensors[key] for key in keys}
            save_file(found, os.path.join(target, name), {"format": "pt"})
            weights.update(dict.fromkeys(keys, name))
        if len(groups) == 1:
            return left_out
        total = sum(tensor.nbytes for tensor in tensors.values())
        with open(os.path.join(target, INDEX), "w") as file:
            json.dump({"metadata": {"total_size": total}, "weight_map": weights}, file, indent=2)
    return left_out
