"""Loading of a checkpoint into a state or a module, in any layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchrelay.checkpoint._foreign import open_checkpoint
from torchrelay.checkpoint._group import Group, group_of
from torchrelay.checkpoint._optimizers import start_state
from torchrelay.checkpoint._plan import deal_blocks
from torchrelay.checkpoint._progress import Progress, tracking
from torchrelay.checkpoint._read import VERIFY, ChunkReader, Segment, segments_of, whole_segments
from torchrelay.checkpoint._save import check_count
from torchrelay.checkpoint._state import (
    Leaf,
    dtype_of,
    flatten,
    is_stateful,
    is_waiting,
    put,
    tensor_state,
)
from torchrelay.checkpoint._storage import Folder
from torchrelay.checkpoint._types import Box, Manifest
from torchrelay.checkpoint._values import decode
from torchrelay.checkpoint._write import default_threads
from torchrelay.deferred import is_deferred, materialize_module
from torchrelay.deferred._shards import Shard as DeferredShard
from torchrelay.deferred._shards import local_slices
from torchrelay.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MAX_BUFFER_BYTES", "check_verify", "load", "verify"]

MAX_BUFFER_BYTES = 256 << 20
_SHOWN = 3  # keys that an error lists


def load(
    state: Any,
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    strict: bool = True,
    verify: str = "data",
    threads: int | None = None,
    max_buffer_bytes: int = MAX_BUFFER_BYTES,
    progress: Progress = False,
    device: torch.device | str | None = None,
    shard: DeferredShard | None = None,
    group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Read a checkpoint into ``state``. Collective over ``group``.

    Each rank reads the byte ranges of its own shards, straight into the tensors, which may be cut
    otherwise than the saved ones. All that this rank needs is verified before the first tensor is
    changed: a checkpoint that is damaged or does not fit leaves the state as it was, on every rank.

    Args:
        state: as for :func:`save`. Tensors are filled in place; other values of a dictionary are
            replaced. An optimizer that has not stepped gets its state tensors first, by a step with
            gradients and learning rates of zero. Of a module with deferred tensors, those in the
            checkpoint get memory and are read, and only the others are initialised.
        path: what :func:`save` wrote, what ``torch.distributed.checkpoint`` wrote, a
            ``.safetensors`` file, or a folder of them.
        prefix: what the keys of ``state`` begin with in the checkpoint, such as ``"model."``.
        strict: whether every key of the state must be in the checkpoint, and for modules and other
            stateful objects every key of the checkpoint in the state.
        verify: ``"data"``: the checksums of all that is read; ``"header"``: the headers of the
            files; ``"none"``.
        threads: how many read at once; by default the usable cores, at most 4.
        max_buffer_bytes: memory for what cannot be read straight into its tensor.
        progress: True for a progress bar on the coordinator, or a function (bytes done, bytes in
            all).
        device: where deferred tensors go.
        shard: how deferred tensors are cut, as for :func:`torchrelay.deferred.materialize_module`.
        group: the ranks that take part; by default the default process group, or this process
            alone.
        no_dist: whether this process is alone, although there is a process group.

    Raises:
        CorruptionError: the checkpoint is damaged; the message names file, tensor and byte. On
            every rank.
        MismatchError: it does not fit the state: a key, shape or dtype. On every rank.
        StorageError: it is not there or cannot be read.
        UnsupportedError: another version of the format.
    """
    check_verify(verify)
    threads = check_count("threads", threads, default_threads())
    check_count("max_buffer_bytes", max_buffer_bytes, 1)
    ranks = group_of(group, no_dist)
    loading = _Loading(state, prefix, strict, device, shard)
    with closing(loading):
        ranks.together(lambda: loading.open(path, threads, max_buffer_bytes, verify))
        if verify == "data":
            loading.verify(ranks)
        with tracking(
            progress, loading.size_bytes, "loading", shown=ranks.is_coordinator
        ) as advance:
            ranks.together(lambda: loading.fill(advance))
        loading.finish()


def check_verify(verify: str) -> None:
    if verify not in VERIFY:
        raise ArgumentError(f"verify = {verify!r}: it must be one of {', '.join(VERIFY)}")


@dataclass
class _Part:
    """A stateful object (module, optimizer) of the state; without an owner, the rest of it."""

    owner: Any
    name: str  # the key in the state, empty for the state itself
    state: Any
    deferred: frozenset[str] = frozenset()  # names of deferred tensors that the checkpoint has
    # Which part of a tensor a plain one will be.
    slices: dict[str, Box] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return f"{self.name}." if self.name else ""

    @classmethod
    def of(cls, owner: Any, name: str) -> _Part:
        if isinstance(owner, torch.nn.Module):
            return cls(owner, name, owner.state_dict(keep_vars=True))
        return cls(owner, name, owner.state_dict())

    def leaves(self) -> dict[str, Leaf]:
        return flatten(self.state)

    def finish(self) -> None:
        """Load the state into its owner, unless its own tensors were filled."""
        if self.owner is None:
            return
        if isinstance(self.owner, torch.nn.Module):
            own = {id(t) for t in (*self.owner.parameters(), *self.owner.buffers())}
            if all(id(leaf.value) in own for leaf in self.leaves().values()):
                return
        self.owner.load_state_dict(self.state)


def _parts(state: Any) -> list[_Part]:
    if is_stateful(state):
        return [_Part.of(state, "")]
    if not isinstance(state, MutableMapping):
        raise ArgumentError(
            f"a state is a dictionary, a module or has state_dict(); got {type(state).__name__}"
        )
    rest = {name: value for name, value in state.items() if not is_stateful(value)}
    parts = [_Part.of(value, str(name)) for name, value in state.items() if is_stateful(value)]
    return [*parts, _Part(None, "", rest)]


class _Loading:
    """One load: which bytes go to which tensor."""

    def __init__(self, state: Any, prefix: str, strict: bool, device: Any, shard: Any) -> None:
        self._root = state
        self._prefix = prefix
        self._strict = strict
        self._device = device
        self._shard = shard
        self._parts: list[_Part] = []
        self._objects: list[tuple[_Part, Leaf, Any]] = []
        self._segments: list[Segment] = []
        self._files = ExitStack()
        self._started: list[torch.optim.Optimizer] = []

    def open(
        self, path: str | os.PathLike[str], threads: int, max_buffer_bytes: int, verify: str
    ) -> None:
        """Read the manifest and compare it with the state; changes nothing."""
        self._parts = _parts(self._root)

        def check(folder: Folder, manifest: Manifest) -> None:
            self._folder, self._manifest = folder, manifest
            self._files.callback(folder.close)
            self._reader = ChunkReader(
                folder, manifest, threads=threads, max_buffer_bytes=max_buffer_bytes
            )
            self._objects, self._segments = [], []
            self._match()
            if verify != "none":
                self._reader.check_files(segment.chunk.file for segment in self._segments)

        open_checkpoint(path, check)

    def close(self) -> None:
        """Close the files; undo what a failed load has started."""
        self._files.close()
        for optimizer in self._started:
            optimizer.state.clear()

    @property
    def size_bytes(self) -> int:
        return sum(s.inner.numel * s.entry.dtype.itemsize for s in self._segments)

    def _match(self) -> None:
        missing: list[str] = []
        for part in self._parts:
            part.deferred = self._deferred(part)
            self._start(part)
            leaves = part.leaves()
            for key, leaf in leaves.items():
                if not self._match_leaf(part, key, leaf):
                    missing.append(self._prefix + part.prefix + key)
            if self._strict and part.owner is not None:
                self._check_extra(part, leaves)
        if missing and self._strict:
            raise MismatchError(
                f"{self._folder.location}: the checkpoint lacks {_listed(missing)}, which the "
                "state has; prefix= names what its keys begin with, strict=False leaves them as "
                "they are"
            )

    def _deferred(self, part: _Part) -> frozenset[str]:
        if not isinstance(part.owner, torch.nn.Module):
            return frozenset()
        return frozenset(
            name
            for name, value in part.state.items()
            if is_waiting(value) and self._prefix + part.prefix + name in self._manifest.tensors
        )

    def _start(self, part: _Part) -> None:
        """Create the state of an optimizer that has none, if the checkpoint has it."""
        owner = part.owner
        if not isinstance(owner, torch.optim.Optimizer) or owner.state:
            return
        start = f"{self._prefix}{part.prefix}state."
        if any(key.startswith(start) for key in self._manifest.tensors) and start_state(owner):
            self._started.append(owner)
            part.state = owner.state_dict()

    def _match_leaf(self, part: _Part, name: str, leaf: Leaf) -> bool:
        """Record what to read for a leaf; return whether the checkpoint has it, or it can be
        initialised instead.
        """
        key = self._prefix + part.prefix + name
        if isinstance(leaf.value, torch.Tensor):
            if key in self._manifest.tensors:
                for box in self._boxes(part, name, key, leaf.value):
                    self._segments += segments_of(key, self._manifest.tensors[key], box)
                return True
            kind = "a tensor"
        else:
            if key in self._manifest.objects:
                self._objects.append((part, leaf, decode(key, self._manifest.objects[key])))
                return True
            kind = "a value"
        if key in self._manifest.tensors or key in self._manifest.objects:
            other = "a value" if kind == "a tensor" else "a tensor"
            raise MismatchError(
                f"{self._folder.location}: {key!r} is {other} in the checkpoint and {kind} here"
            )
        return is_waiting(leaf.value)

    def _boxes(self, part: _Part, name: str, key: str, tensor: torch.Tensor) -> Iterator[Box]:
        entry, dtype = self._manifest.tensors[key], dtype_of(key, tensor)
        if entry.shape != tuple(tensor.shape) or entry.dtype != dtype:
            raise MismatchError(
                f"{self._folder.location}: tensor {key!r} is {entry.dtype.name} of shape "
                f"{list(entry.shape)} in the checkpoint, and {dtype.name} of shape "
                f"{list(tensor.shape)} here"
            )
        slices = local_slices(self._shard, name, tensor) if is_deferred(tensor) else None
        if slices is None:
            yield from (shard.box for shard in tensor_state(key, tensor).shards)
            return
        full = (*slices, *(slice(None),) * (tensor.ndim - len(slices)))
        ranges = [range(*item.indices(size)) for item, size in zip(full, tensor.shape, strict=True)]
        box = Box(tuple(r.start for r in ranges), tuple(len(r) for r in ranges))
        part.slices[name] = box
        yield box

    def _check_extra(self, part: _Part, leaves: Mapping[str, Leaf]) -> None:
        start = self._prefix + part.prefix
        known = {start + name for name in leaves}
        held = (*self._manifest.tensors, *self._manifest.objects)
        extra = [key for key in held if key.startswith(start) and key not in known]
        if extra:
            what = type(part.owner).__name__
            advice = (
                "this optimizer has a state only after its first step"
                if isinstance(part.owner, torch.optim.Optimizer)
                else "prefix= names what its keys begin with, strict=False ignores the rest"
            )
            raise MismatchError(
                f"{self._folder.location}: the checkpoint has {_listed(extra)}, which this {what} "
                f"lacks; {advice}"
            )

    def verify(self, ranks: Group) -> None:
        """Verify what any rank reads; a block that several ranks of a host read, on one of them."""
        wanted = ranks.together(
            lambda: (self._folder.identity, self._reader.blocks_of(self._segments))
        )
        identity, blocks = wanted[ranks.rank]
        if identity:
            alike = [rank for rank, (other, _) in enumerate(wanted) if other == identity]
            for name in blocks:
                readers = [rank for rank in alike if name in wanted[rank][1]]
                touched = np.stack([wanted[rank][1][name] for rank in readers])
                blocks[name] = deal_blocks(touched, readers.index(ranks.rank))
        ranks.together(lambda: self._reader.verify_blocks(blocks))

    def fill(self, advance: Callable[[int], None] | None) -> None:
        """Materialise the deferred tensors and read everything."""
        targets: list[tuple[Segment, torch.Tensor]] = []
        for part in self._parts:
            if isinstance(part.owner, torch.nn.Module) and is_deferred(part.owner):
                materialize_module(
                    part.owner, device=self._device, shard=self._shard, uninitialized=part.deferred
                )
                part.state = part.owner.state_dict(keep_vars=True)
            for name, leaf in part.leaves().items():
                key = self._prefix + part.prefix + name
                if isinstance(leaf.value, torch.Tensor) and key in self._manifest.tensors:
                    targets += self._targets(key, leaf.value, part.slices.get(name))
        self._reader.fill(targets, advance)

    def _targets(
        self, key: str, tensor: torch.Tensor, part: Box | None
    ) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Return what to read into a tensor of the state; ``part``: its part of the saved
        tensor.
        """
        entry = self._manifest.tensors[key]
        shards = tensor_state(key, tensor).shards
        if part is not None and shards[0].holders is None:
            shards = (replace(shards[0], box=part),)
        for shard in shards:
            for segment in segments_of(key, entry, shard.box):
                inner = segment.inner
                within = tuple(
                    slice(a - b, a - b + size)
                    for a, b, size in zip(
                        inner.offsets, shard.box.offsets, inner.sizes, strict=True
                    )
                )
                yield segment, shard.tensor[within]

    def finish(self) -> None:
        """Set the values, and load what was read into its owners."""
        for part, leaf, value in self._objects:
            put(part.state if part.owner is not None else self._root, leaf.path, value)
        for part in self._parts:
            part.finish()
        self._started.clear()


def _listed(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:_SHOWN]))
    return shown if len(keys) <= _SHOWN else f"{shown} and {len(keys) - _SHOWN} more"


def verify(
    path: str | os.PathLike[str], *, threads: int | None = None, progress: Progress = False
) -> None:
    """Check every byte of a checkpoint against its manifest, headers and checksums.

    Raises:
        CorruptionError: the first damage found; the message names file, tensor and byte.
        StorageError: the checkpoint is not there or cannot be read.
    """
    threads = check_count("threads", threads, default_threads())

    def reader_of(folder: Folder, manifest: Manifest) -> ChunkReader:
        return ChunkReader(folder, manifest, threads=threads, max_buffer_bytes=MAX_BUFFER_BYTES)

    folder, manifest = open_checkpoint(
        path, lambda *found: reader_of(*found).check_files(found[1].files)
    )
    with closing(folder):
        size_bytes = sum(file.size_bytes for file in manifest.files.values())
        with tracking(progress, size_bytes, "verifying") as advance:
            reader_of(folder, manifest).verify(whole_segments(manifest), advance)
