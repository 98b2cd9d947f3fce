"""``layout="huggingface"``: the model's tensors in files that transformers, peft and other readers
of safetensors take as they are, in the same commit as the rest of the state.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path as LocalPath
from typing import Any, Literal

import torch

from torchrelay import _torch
from torchrelay.checkpoint._types import check_count
from torchrelay.checkpoint.engine._group import Group
from torchrelay.checkpoint.plan._plan import EXPORT, Exports
from torchrelay.checkpoint.state._state import Leaf, finished, flatten, insert
from torchrelay.checkpoint.state._subclasses import SUBCLASS
from torchrelay.checkpoint.state._tensors import memory_of
from torchrelay.checkpoint.storage._contract import storage_errors
from torchrelay.errors import ArgumentError, UnsupportedError

__all__ = ["HuggingFace", "Layout", "exported", "layout_of"]

_MAX_SMALL_BYTES = 64 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")  # not small files


@dataclass(frozen=True)
class HuggingFace:
    """How ``layout=`` stores the model of a state: in ``model.safetensors``, or several such files,
    and their index, which need no pass of consolidation.

    Args:
        prefix: what the keys of the model begin with in the state, such as ``"model."``; by default
            those of the only module of the state.
        dtype: of the floating-point tensors in these files; the state keeps its own beside them. By
            default as they are: then they are stored once, for both purposes.
        rename: returns the name of a tensor in these files, or None to leave it out.
        files: what lies beside them: small files by name, or a folder, such as a snapshot, whose
            files other than weights are copied. ``config.json`` and ``generation_config.json`` of a
            model of transformers need not be given.
        name: what the files are called; ``"adapter_model"`` for an adapter of peft.
        max_file_bytes: larger models are divided.

    Raises:
        ArgumentError: ``max_file_bytes`` is less than 1, or ``name`` not one of a file.
    """

    prefix: str | None = None
    dtype: torch.dtype | None = None
    rename: Callable[[str], str | None] | None = None
    files: str | os.PathLike[str] | Mapping[str, str | bytes] | None = None
    name: str = "model"
    max_file_bytes: int = 5 << 30

    def __post_init__(self) -> None:
        check_count("max_file_bytes", self.max_file_bytes)
        if not Exports.FILE_NAME.fullmatch(self.name):
            raise ArgumentError(f"HuggingFace(name={self.name!r}): it cannot begin a file's name")


Layout = Literal["huggingface"] | HuggingFace | None


def layout_of(layout: Layout) -> HuggingFace | None:
    """Return what the argument ``layout`` of a save means. Raises ArgumentError."""
    if isinstance(layout, HuggingFace | None):
        return layout
    if layout != "huggingface":
        raise ArgumentError(f"layout={layout!r}: it is 'huggingface', or a HuggingFace(...)")
    return HuggingFace()


def exported(state: Any, layout: HuggingFace, ranks: Group) -> tuple[Any, Exports]:
    """Return a state whose tensors of the model are whole, each sharded one on one rank, and what a
    save writes to files of their own. Collective.

    Raises:
        ArgumentError: there is no model, two tensors have one name, or a file is too large.
        UnsupportedError: a tensor cannot be gathered.
    """
    found: list[tuple[dict[str, Leaf], Exports]] = []
    ranks.together(lambda: found.append(_chosen(state, layout)))
    ((leaves, exports),) = found
    loads: Counter[int] = Counter()
    converted: dict[Any, Any] = {}  # by the memory that it was
    made: dict[str, Any] = {}  # None on ranks that do not write it
    names: dict[str, str] = {}
    for key, name in exports.names.items():
        tensor: Any = _torch.waited(leaves[key].value).detach()
        changes = layout.dtype not in (None, tensor.dtype) and tensor.is_floating_point()
        value = tensor
        if changes:  # of tied tensors one
            memory = memory_of(tensor) if _torch.sharding_of(tensor) == "plain" else None
            value = converted.setdefault(memory or key, tensor.to(layout.dtype))
        if _torch.sharding_of(tensor) == "dtensor":
            writer = min(sorted(tensor.device_mesh.mesh.flatten().tolist()), key=loads.__getitem__)
            loads[writer] += tensor.nbytes
            whole = value.full_tensor()
            value = whole.cpu() if writer == ranks.global_rank else None
        stored = EXPORT + name if changes else key
        made[stored], names[stored] = value, name
    prepared: dict[Any, Any] = {
        key: value for key, value in made.items() if value is not None and key not in leaves
    }
    for key, leaf in leaves.items():
        value = made.get(key, leaf.value)
        if value is not None or key not in made:
            insert(prepared, leaf.path, value)
    return finished(prepared), replace(exports, names=names)


def _chosen(state: Any, layout: HuggingFace) -> tuple[dict[str, Leaf], Exports]:
    """Return the leaves of a state, and the names of those that are exported."""
    leaves = flatten(state, expand=True)
    prefix, model = _model_of(state, layout.prefix)
    names: dict[str, str] = {}
    for key, leaf in leaves.items():
        inner = key.removeprefix(prefix)
        if not key.startswith(prefix) or not isinstance(leaf.value, torch.Tensor):
            continue
        name = inner if layout.rename is None else layout.rename(inner)
        if name is None:
            continue
        if _torch.sharding_of(leaf.value) == "shards" or any(
            f"{key[:end]}.{SUBCLASS}" in leaves for end, c in enumerate(key) if c == "."
        ):
            raise UnsupportedError(f"{key}: the tensor cannot be made whole for layout=")
        names[key] = name
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice or not names:
        what = f"rename= gives two tensors the name {twice[0]!r}" if twice else "it has no tensor"
        raise ArgumentError(f"layout=: of the keys that begin with {prefix!r}, {what}")
    files = {**_configuration(model, layout), **_small_files(layout.files)}
    return leaves, Exports(names, files, layout.name, layout.max_file_bytes)


def _model_of(state: Any, prefix: str | None) -> tuple[str, Any]:
    """Return what the keys of the model begin with, and the model, if the state has it."""
    if isinstance(state, torch.nn.Module):
        return prefix or "", state
    items = state.items() if isinstance(state, Mapping) else ()
    modules = {f"{key}.": value for key, value in items if isinstance(value, torch.nn.Module)}
    if prefix is not None:
        return prefix, modules.get(prefix)
    if len(modules) != 1:
        raise ArgumentError(
            f"layout=: the state has {len(modules)} modules at its top; say what the keys of the "
            "model begin with: layout=HuggingFace(prefix='model.')"
        )
    return next(iter(modules.items()))


def _configuration(model: Any, layout: HuggingFace) -> dict[str, bytes]:
    """Return what ``save_pretrained`` of a model of transformers writes beside the weights."""
    found: dict[str, bytes] = {}
    for name in ("config", "generation_config") if layout.name == "model" else ():
        one: Any = copy.deepcopy(getattr(model, name, None))
        if not hasattr(one, "to_json_string"):
            continue
        if name == "config":
            one.architectures = [type(model).__name__.removeprefix("FSDP")]
            one.dtype = layout.dtype or getattr(model, "dtype", None)
        found[f"{name}.json"] = one.to_json_string().encode()
    return found


def _small_files(files: Any) -> dict[str, bytes]:
    if files is None:
        return {}
    if isinstance(files, Mapping):
        given = {name: one.encode() if isinstance(one, str) else one for name, one in files.items()}
    else:
        with storage_errors(f"reading the files of {os.fspath(files)}"):
            given = {
                path.name: path.read_bytes()
                for path in sorted(LocalPath(files).iterdir())
                if path.is_file()
                and not path.name.endswith(_WEIGHTS)
                and path.stat().st_size <= _MAX_SMALL_BYTES
            }
        given.pop("manifest.json", None)
    for name, content in given.items():
        is_small = len(content) <= _MAX_SMALL_BYTES and not name.endswith(_WEIGHTS)
        if not is_small or not Exports.FILE_NAME.fullmatch(name):
            raise ArgumentError(
                f"layout=: {name!r} cannot lie beside the weights: a small file has a name of "
                f"letters, digits, '.', '_' and '-', not that of weights, and at most "
                f"{_MAX_SMALL_BYTES} bytes"
            )
    return given
