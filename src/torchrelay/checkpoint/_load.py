"""Loading of a checkpoint into a state or a module, in any layout."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torchrelay import _telemetry, _torch
from torchrelay._progress import Progress, tracking
from torchrelay.checkpoint._catalog import newest_inside
from torchrelay.checkpoint._group import Group, check_same, group_of
from torchrelay.checkpoint._inventory import encoded
from torchrelay.checkpoint._optimizers import fitted, may_lack
from torchrelay.checkpoint._read import (
    MAX_BUFFER_BYTES,
    ChunkReader,
    ReadOptions,
    Segment,
    deal_blocks,
    segments_of,
    warn_without_checksums,
    within,
)
from torchrelay.checkpoint._snapshots import converted
from torchrelay.checkpoint._state import (
    ORDINARY,
    SUBCLASS,
    Leaf,
    Subclass,
    check_put,
    flatten,
    is_stateful,
    key_of,
    put,
)
from torchrelay.checkpoint._storage import Path, text_of
from torchrelay.checkpoint._tasks import no_collection
from torchrelay.checkpoint._tensors import (
    check_target,
    is_waiting,
    memory_of,
    tensor_state,
)
from torchrelay.checkpoint._types import Box
from torchrelay.checkpoint._values import decode
from torchrelay.deferred import is_deferred, materialize_module
from torchrelay.deferred._shards import Shard as DeferredShard
from torchrelay.deferred._shards import local_slices
from torchrelay.errors import ArgumentError, MismatchError, StorageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LoadResult", "load", "verify"]

_ATTEMPTS = 10  # for checkpoints that savers replace or remove again and again
_SHOWN = 3  # keys that an error lists
_NEAR = 2  # keys that an error lists because they resemble a missing one
_COMPARED = 10_000  # keys that are searched for such


class LoadResult(NamedTuple):
    """The keys that a checkpoint and the state of this rank did not have in common, as
    ``Module.load_state_dict`` returns them.

    The names are those in the checkpoint. ``missing_keys`` also has what was initialised instead,
    but no second name of a tied tensor that was read under its first. ``unexpected_keys`` has only
    keys that begin with ``prefix``.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load(
    state: Any,
    path: Path,
    *,
    prefix: str = "",
    strict: bool = True,
    initialize_missing: bool = False,
    verify: str = "data",
    overwrite: bool = False,
    threads: int | None = None,
    max_buffer_bytes: int = MAX_BUFFER_BYTES,
    progress: Progress = False,
    device: torch.device | str | None = None,
    shard: DeferredShard | None = None,
    group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadResult:
    """Read a checkpoint into ``state``. Collective over ``group``.

    Each rank reads the byte ranges of its own shards, straight into the tensors, which may be cut
    otherwise than the saved ones. All that this rank needs is verified, and all its tensors are
    checked, before the first one is changed: a checkpoint that is damaged or does not fit leaves
    the state as it was, on every rank. With ``overwrite``, tensors may hold damaged values when the
    error is raised.

    Args:
        state: as for :func:`save`. Tensors are filled in place; other values of a dictionary are
            replaced. An optimizer gets the state that the checkpoint has, as by its
            ``load_state_dict()``, whether it has stepped or not; options of its groups that the
            checkpoint lacks stay. Of a module with deferred tensors, those in the checkpoint get
            memory and are read.
        path: what :func:`save` wrote, what ``torch.distributed.checkpoint`` wrote, a
            ``.safetensors`` file, or a folder of them. Of a folder that holds checkpoints of ours,
            the newest is read, which one rank chooses for all.
        prefix: what the keys of ``state`` begin with in the checkpoint, such as ``"model."``.
        strict: whether every key of the state must be in the checkpoint, and for modules and other
            stateful objects every key of the checkpoint in the state. Otherwise, what the
            checkpoint lacks stays as it is; deferred tensors stay deferred.
        initialize_missing: whether deferred tensors of modules that the checkpoint lacks are
            initialised, as eager ones would be, also with ``strict``; with ``strict=False``, those
            that it has in another shape, too, with a warning that names them.
        verify: ``"data"``: the checksums of all that is read (files of other libraries have none;
            for a checkpoint saved with ``checksum=False`` a warning says so); ``"header"``: the
            headers of the files; ``"none"``.
        overwrite: whether data are verified while they are read, which is faster, but leaves
            damaged or incomplete values in the tensors of ``state`` after a
            :class:`~torchrelay.CorruptionError`. For a state that is given up in that case.
        threads: how many read at once; by default the usable cores, at most 4.
        max_buffer_bytes: memory for what cannot be read straight into its tensor.
        progress: True for a progress bar on the coordinator, or a function (bytes done, bytes in
            all).
        device: where deferred tensors go.
        shard: how deferred tensors are cut, as for :func:`torchrelay.deferred.materialize_module`.
        group: the ranks that take part; by default the default process group, or this process
            alone.
        no_dist: whether this process is alone, although there is a process group.

    Returns:
        the keys that only the state or only the checkpoint has.

    Raises:
        ArgumentError: a tensor of the state cannot be filled: it is on the meta device, say, or
            expanded. On every rank.
        CorruptionError: the checkpoint is damaged; the message names file, tensor and byte. On
            every rank.
        DeferredError: a tensor outside a module, or a parameter of an optimizer, is deferred.
        MismatchError: it does not fit the state: a key, shape or dtype; or the ranks read
            different checkpoints. On every rank.
        StorageError: it is not there or cannot be read.
        UnsupportedError: another version of the format.
    """
    reading = ReadOptions(verify, threads, max_buffer_bytes)
    ranks = group_of(group, no_dist)
    loading = _Loading(
        state, ranks, prefix, strict, initialize_missing, overwrite, reading, device, shard
    )
    with _telemetry.event("checkpoint", "load", text_of(path)) as running, loading.files:
        loading.open(path)
        if verify == "data" and not overwrite:
            loading.verify()
        running.size_bytes = size_bytes = loading.size_bytes

        def fill() -> None:
            with tracking(progress, size_bytes, "loading", shown=ranks.is_coordinator) as advance:
                loading.fill(advance)

        ranks.together(fill)
    return loading.result


class _Part:
    """A stateful object (module, optimizer) of the state; without an owner, the rest of it."""

    def __init__(self, start: str, owner: Any = None) -> None:
        self.owner = owner
        self.start = start  # what its keys begin with in the checkpoint
        self.state: Any = {}
        self.leaves: dict[str, Leaf] = {}
        if owner is not None:
            self.renew()

    def renew(self) -> None:
        """Read the owner's state, again if the tensors of a module are materialised now."""
        options = {"keep_vars": True} if isinstance(self.owner, torch.nn.Module) else {}
        self.state = self.owner.state_dict(**options)
        self.leaves = flatten(self.state)

    def finish(self) -> None:
        """Load the state into its owner, unless its own tensors were filled."""
        if self.owner is None:
            return
        if isinstance(self.owner, torch.nn.Module):
            own = {
                id(inner)
                for tensor in (*self.owner.parameters(), *self.owner.buffers())
                for inner in (tensor, *_torch.inner_tensors(tensor))
            }
            if all(
                id(leaf.value) in own or isinstance(leaf.value, Subclass)
                for leaf in self.leaves.values()
            ):
                return
        self.owner.load_state_dict(self.state)


def _parts(state: Any, prefix: str) -> list[_Part]:
    """Return the stateful objects at any depth of a state, and the rest of it."""
    if is_stateful(state):
        return [_Part(prefix, state)]
    if not isinstance(state, MutableMapping):
        raise ArgumentError(
            f"a state is a dictionary, a module or has state_dict(); got {type(state).__name__}"
        )
    parts, rest = [], _Part(prefix)
    rest.state = state
    for key, leaf in flatten(state).items():
        if is_stateful(leaf.value):
            parts.append(_Part(f"{prefix}{key_of(leaf.path)}.", leaf.value))
        else:
            rest.leaves[key] = leaf
    return [*parts, rest]


def _materialized(part: _Part, name: str, place: int, box: Box, inner: Box) -> torch.Tensor:
    """Return ``inner``, in coordinates of the whole tensor, of ``box``, the ``place``-th block of a
    tensor that was deferred when it was compared.
    """
    block = tensor_state(name, part.leaves[name].value).tensors[place]
    return _inside(block, box, inner)


@dataclass
class _Loading:
    """One load: which bytes go to which tensor. The fields are the arguments of :func:`load`."""

    state: Any
    ranks: Group
    prefix: str
    strict: bool
    initialize_missing: bool
    overwrite: bool
    reading: ReadOptions
    device: torch.device | str | None
    shard: DeferredShard | None
    files: ExitStack = field(default_factory=ExitStack)

    def open(self, path: Path) -> None:
        """Open one checkpoint on all ranks, and compare it with the state; changes nothing.

        Of a folder of checkpoints, the coordinator chooses the newest.

        Raises:
            MismatchError: the checkpoint does not fit, or the ranks opened different ones.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            chosen = self.ranks.coordinate(lambda: newest_inside(path))
            place = text_of(path) if chosen is None else f"{text_of(path).rstrip('/')}/{chosen}"
            try:
                opened = self.ranks.together(partial(self._open, place))
            except StorageError as error:
                # If retention has removed the one that was chosen, the newest is another one now.
                if chosen is None or error.errno != errno.ENOENT or attempt == _ATTEMPTS:
                    raise
                continue
            may_be_replaced = len({place for place, _ in opened}) == 1 and attempt < _ATTEMPTS
            if len({fingerprint for _, fingerprint in opened}) > 1 and may_be_replaced:
                continue
            check_same(self.ranks.ranks, opened)
            return

    def _open(self, path: str) -> tuple[str, str]:
        """Open the checkpoint at ``path``; return it and its fingerprint."""

        def check(reader: ChunkReader) -> None:
            self.files.callback(reader.close)
            self._location = reader.folder.location
            self._parts = _parts(self.state, self.prefix)
            self._fingerprint = reader.manifest.fingerprint
            reader.manifest = converted(
                reader.manifest, [(part.start, part.owner, part.leaves) for part in self._parts]
            )
            self._reader, self._manifest = reader, reader.manifest
            self._objects: list[tuple[_Part, Leaf, Any]] = []
            self._segments: list[Segment] = []
            self._targets: list[torch.Tensor | partial[torch.Tensor]] = []
            self._tensors: dict[str, tuple[torch.Tensor, ...]] = {}  # by key
            self._match()
            if self.reading.verify != "none":
                reader.check_files(segment.chunk.file for segment in self._segments)

        ChunkReader.open(path, self.reading, check)
        if self.reading.verify == "data" and self.ranks.is_coordinator:
            warn_without_checksums(self._manifest, self._location)
        return path, self._fingerprint

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    @no_collection()
    def _match(self) -> None:
        """Find what to read for each leaf, and compare the keys.

        Raises:
            MismatchError: the checkpoint does not fit the state.
        """
        known: dict[str, _Part] = {}
        lacking: dict[str, tuple[_Part, Leaf]] = {}
        read: list[Leaf] = []
        for part in self._parts:
            self._fit_optimizer(part)
            for name, leaf in part.leaves.items():
                key = part.start + name
                if key in known:
                    raise ArgumentError(f"two values of the state have the key {key!r}")
                known[key] = part
                if self._match_leaf(part, name, key, leaf):
                    read.append(leaf)
                else:
                    lacking[key] = part, leaf
        self._drop_overwritten()
        # The second name of a tied tensor is filled by its first one.
        filled = set().union(*map(_identities, read)) if lacking else set()
        self._missing = {
            key: found for key, found in lacking.items() if not _identities(found[1]) & filled
        }
        held = (*self._manifest.tensors, *self._manifest.objects)
        unexpected = [key for key in held if key.startswith(self.prefix) and key not in known]
        self.result = LoadResult([*self._missing], unexpected)
        if self.strict:
            self._check_missing()
            self._check_unexpected()
        elif self.initialize_missing and self.ranks.is_coordinator:
            self._warn_of_initialized()

    def _fit_optimizer(self, part: _Part) -> None:
        """Make the state dict of an optimizer as the checkpoint has it."""
        owner, state = part.owner, part.state
        if (
            isinstance(owner, torch.optim.Optimizer)
            and isinstance(state.get("state"), dict)
            and isinstance(state.get("param_groups"), list)
        ):
            part.state = fitted(owner, state, self._manifest, part.start)
            part.leaves = flatten(part.state)

    def _check_missing(self) -> None:
        bad = [key for key, (part, leaf) in self._missing.items() if self._is_bad(key, part, leaf)]
        if bad:
            waiting = any(is_waiting(self._missing[key][1].value) for key in bad)
            raise MismatchError(
                f"{self._location}: the checkpoint lacks {_listed(bad)}, which the state "
                f"has; {self._remedy(bad)}strict=False leaves them as they are"
                + (", initialize_missing=True initialises deferred ones" if waiting else "")
            )

    def _remedy(self, bad: list[str]) -> str:
        """Return a clause that names the prefixes with which the checkpoint has all the missing
        keys, else the keys that it has and that resemble the first.
        """
        held = {**self._manifest.tensors, **self._manifest.objects}
        first, *rest = [key.removeprefix(self.prefix) for key in bad]
        ends = [key for key in held if f".{key}".endswith(f".{first}")]
        starts = [key.removesuffix(first) for key in ends]
        fits = [start for start in starts if all(start + name in held for name in rest)]
        if fits and len(self._missing) == sum(len(part.leaves) for part in self._parts):
            return " or ".join(f"prefix={start!r}" for start in fits[:2]) + " finds them, "
        inner = [key for key in held if f".{bad[0]}".endswith(f".{key}")]
        near = ends or inner or get_close_matches(bad[0], [*held][:_COMPARED], n=_NEAR)
        return f"it has {_listed(near[:_NEAR])}, " if near else ""

    def _is_bad(self, key: str, part: _Part, leaf: Leaf) -> bool:
        """Return whether a strict load needs a key that the checkpoint lacks."""
        if is_waiting(leaf.value):
            return not self.initialize_missing
        is_option = isinstance(part.owner, torch.optim.Optimizer) and may_lack(
            part.owner, key, self._manifest, part.start
        )
        return not is_option

    def _check_unexpected(self) -> None:
        for part in self._parts:
            extra = [key for key in self.result.unexpected_keys if key.startswith(part.start)]
            if part.owner is not None and extra:
                raise MismatchError(
                    f"{self._location}: the checkpoint has {_listed(extra)}, which this "
                    f"{type(part.owner).__name__} lacks; prefix= names what its keys begin with, "
                    "strict=False ignores the rest"
                )

    def _match_leaf(self, part: _Part, name: str, key: str, leaf: Leaf) -> bool:
        """Record what to read for a leaf; return whether the checkpoint has it."""
        is_tensor = isinstance(leaf.value, torch.Tensor)
        if key in (self._manifest.objects if is_tensor else self._manifest.tensors):
            here, there = ("a tensor", "a value") if is_tensor else ("a value", "a tensor")
            raise MismatchError(
                f"{self._location}: {key!r} is {there} in the checkpoint and {here} here"
            )
        if is_tensor and key in self._manifest.tensors:
            if self._initializes_instead(part, key, leaf.value):
                return False
            self._match_tensor(part, name, key, leaf.value)
            return True
        if key not in self._manifest.objects:
            return False
        value = self._manifest.objects[key]
        if not isinstance(leaf.value, Subclass):
            check_put(part.state, leaf.path)
            self._objects.append((part, leaf, decode(key, value)))
        elif value != encoded(key, leaf):
            raise MismatchError(
                f"{self._location}: {key.removesuffix(f'.{SUBCLASS}')!r} is of another "
                f"tensor class in the checkpoint than here, or has other parameters: {value} and "
                f"{encoded(key, leaf)}"
            )
        return True

    def _initializes_instead(self, part: _Part, key: str, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is initialised although the checkpoint has it, in another shape:
        a head for other labels.
        """
        may_be = self.initialize_missing and not self.strict and is_waiting(tensor)
        is_other = self._manifest.tensors[key].shape != tuple(tensor.shape)
        return may_be and is_other and isinstance(part.owner, torch.nn.Module)

    def _remedy_of_shape(self, part: _Part, tensor: torch.Tensor, same_dtype: bool) -> str:
        if not (same_dtype and is_waiting(tensor) and isinstance(part.owner, torch.nn.Module)):
            return ""
        return "; strict=False with initialize_missing=True initialises it, as for a new head"

    def _warn_of_initialized(self) -> None:
        """Warn about tensors that are initialised beside others that are not read, because these
        may be the same under another name or of another shape.
        """
        waiting = [key for key, (_, leaf) in self._missing.items() if is_waiting(leaf.value)]
        other = [key for key in waiting if key in self._manifest.tensors]
        if waiting and (other or self.result.unexpected_keys):
            unread = [*other, *self.result.unexpected_keys]
            warnings.warn(
                f"{self._location}: {_listed(waiting)} are initialised, not loaded; of the "
                f"checkpoint, {_listed(unread)} are not read",
                stacklevel=8,  # the caller of load()
            )

    def _match_tensor(self, part: _Part, name: str, key: str, tensor: torch.Tensor) -> None:
        """Record the segments of a tensor, and what to read each into."""
        entry = self._manifest.tensors[key]
        entry.check_known(key, self._location)
        (dtype, described, blocks), tensors = tensor_state(key, tensor)
        if entry.shape != described.shape or entry.dtype is not dtype:
            raise MismatchError(
                f"{self._location}: tensor {key!r} is {entry.dtype.name} of shape "
                f"{list(entry.shape)} in the checkpoint, and {dtype.name} of shape "
                f"{list(tensor.shape)} here"
                + self._remedy_of_shape(part, tensor, entry.dtype is dtype)
            )
        boxes = [block.box for block in blocks]
        is_deferred_here = is_waiting(tensor) and isinstance(part.owner, torch.nn.Module)
        if is_deferred_here and is_deferred(tensor):
            slices = local_slices(self.shard, name, tensor)
            boxes = boxes if slices is None else [_box_of(slices, tensor.shape)]
        self._tensors[key] = (tensor,) if is_deferred_here else tensors
        for place, box in enumerate(boxes):
            if not is_deferred_here:
                check_target(key, tensors[place])
            segments = segments_of(key, entry, box)
            self._segments += segments
            self._targets += [
                partial(_materialized, part, name, place, box, segment.inner)
                if is_deferred_here
                else _inside(tensors[place], box, segment.inner)
                for segment in segments
            ]

    def _drop_overwritten(self) -> None:
        """Read a tensor that has several keys under the last of them only, which overwrites what
        the others have.
        """
        filled = [one.data_ptr() for one in self._targets if isinstance(one, torch.Tensor)]
        if len({*filled}) == len(self._targets):
            return
        last = {(*map(memory_of, tensors),): key for key, tensors in self._tensors.items()}
        keys = {*last.values()}
        kept = [segment.key in keys for segment in self._segments]
        self._segments = [*compress(self._segments, kept)]
        self._targets = [*compress(self._targets, kept)]

    def verify(self) -> None:
        """Verify what any rank reads; a block that several ranks of a host read, on one of them."""
        ranks = self.ranks
        wanted = ranks.together(
            lambda: (self._reader.folder.identity, self._reader.blocks_of(self._segments))
        )
        identity, blocks = wanted[ranks.rank]
        if identity:
            alike = [rank for rank, (other, _) in enumerate(wanted) if other == identity]
            for name in blocks:
                readers = [rank for rank in alike if name in wanted[rank][1]]
                touched = np.stack([wanted[rank][1][name] for rank in readers])
                blocks[name] = deal_blocks(touched, readers.index(ranks.rank))
        ranks.together(lambda: self._reader.verify_blocks(blocks))

    def fill(self, advance: Callable[[int], None]) -> None:
        """Materialise the deferred tensors, read everything, and set the values."""
        for part in self._parts:
            if isinstance(part.owner, torch.nn.Module) and is_deferred(part.owner):
                self._materialize(part)
        targets = (target() if isinstance(target, partial) else target for target in self._targets)
        self._reader.fill(
            zip(self._segments, targets, strict=True),
            advance,
            verify=self.reading.verify == "data" and self.overwrite,
        )
        for part, leaf, value in self._objects:
            put(part.state, leaf.path, value)
        for part in self._parts:
            part.finish()

    def _materialize(self, part: _Part) -> None:
        missing = {name for name in part.leaves if part.start + name in self._missing}
        materialize_module(
            part.owner,
            device=self.device,
            shard=self.shard,
            uninitialized=part.leaves.keys() - missing,
            leave_deferred=() if self.initialize_missing else missing,
        )
        part.renew()


def _box_of(slices: tuple[slice, ...], shape: torch.Size) -> Box:
    full = (*slices, *(slice(None),) * (len(shape) - len(slices)))
    ranges = [range(*item.indices(size)) for item, size in zip(full, shape, strict=True)]
    return Box(tuple(r.start for r in ranges), tuple(map(len, ranges)))


def _inside(tensor: torch.Tensor, box: Box, inner: Box) -> torch.Tensor:
    """Return the part ``inner`` of a tensor that holds ``box``, without a class
    of its own.
    """
    if type(tensor) not in ORDINARY:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    return tensor if inner == box else tensor[within(inner, box)]


def _identities(leaf: Leaf) -> set[Any]:
    """Return what two leaves have in common if they are one tensor."""
    if not isinstance(leaf.value, torch.Tensor):
        return set()
    local = getattr(leaf.value, "_local_tensor", leaf.value)
    memory = memory_of(local) if _torch.sharding_of(local) == "plain" else None
    return {id(leaf.value), memory or id(leaf.value)}


def _listed(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:_SHOWN]))
    return shown if len(keys) <= _SHOWN else f"{shown} and {len(keys) - _SHOWN} more"


def verify(path: Path, *, threads: int | None = None, progress: Progress = False) -> bool:
    """Check every byte of a checkpoint against its manifest, headers and checksums.

    Returns:
        True if every byte is as it was written. False if the checkpoint has no checksums, because
        it was saved with ``checksum=False`` or by another library: sizes and headers are as they
        should be, and the values of tensors were not checked.

    Raises:
        CorruptionError: the first damage found; the message names file, tensor and byte.
        StorageError: the checkpoint is not there or cannot be read.
    """
    options = ReadOptions(threads=threads)
    reader = ChunkReader.open(path, options, ChunkReader.check_all)
    with closing(reader):
        size_bytes = sum(file.size_bytes for file in reader.manifest.files.values())
        with tracking(progress, size_bytes, "verifying") as advance:
            reader.verify_all(advance)
    return reader.manifest.has_checksums
