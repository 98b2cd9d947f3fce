"""What a load does, found by comparing a state with a manifest. Changes nothing.

Of a dictionary, the state says which keys are read. So does a module, but for what goes through
code of its own: of that, of the state of optimizers, and of other objects, the checkpoint says it.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import compress
from typing import Any

import torch

from torchrelay import _torch
from torchrelay._boxes import Box
from torchrelay.checkpoint._tasks import no_collection
from torchrelay.checkpoint._types import METADATA, Manifest, is_container, is_metadata
from torchrelay.checkpoint.engine._read import ChunkSlice, segments_of
from torchrelay.checkpoint.format._quantized import Scales
from torchrelay.checkpoint.format._values import decode
from torchrelay.checkpoint.plan._part_plan import PartPlan, member
from torchrelay.checkpoint.state._metadata import restored
from torchrelay.checkpoint.state._optimizers import check_state, known_sections, may_lack, numbered
from torchrelay.checkpoint.state._parts import ModulePart, OptimizerPart, Part, is_empty
from torchrelay.checkpoint.state._state import (
    ORDINARY,
    ContainerClass,
    Leaf,
    check_put,
    insert,
    relative_path,
)
from torchrelay.checkpoint.state._subclasses import SUBCLASS, Subclass, block_of
from torchrelay.checkpoint.state._tensors import check_target, is_waiting, memory_of, tensor_state
from torchrelay.deferred import is_deferred
from torchrelay.deferred._shards import Shard as DeferredShard
from torchrelay.deferred._shards import local_box
from torchrelay.errors import ArgumentError, MismatchError

__all__ = ["LoadPlan", "Request", "match"]

Target = torch.Tensor | partial[torch.Tensor]

_SHOWN = 3  # keys that an error lists
_NEAR = 2  # keys that an error lists because they resemble a missing one
_COMPARED = 10_000  # keys that are searched for such


@dataclass(frozen=True)
class Request:
    """Arguments of :func:`torchrelay.checkpoint.load` that say what is read."""

    prefix: str = ""
    strict: bool = True
    initialize_missing: bool = False
    device: torch.device | str | None = None
    shard: DeferredShard | None = None


@dataclass
class LoadPlan:
    """Which bytes go to which tensors, and what each object is given.

    A target is a tensor, or a function that returns it once the deferred ones are materialised.
    ``fills`` are called after all is read.
    """

    location: str
    request: Request
    manifest: Manifest
    parts: Sequence[PartPlan]
    segments: list[ChunkSlice] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    fills: list[Callable[[], None]] = field(default_factory=list)
    missing: dict[str, tuple[PartPlan, Leaf]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def rest(self) -> PartPlan:
        """What the part of the state that is in no object is given."""
        return next((one for one in self.parts if one.part.owner is None), PartPlan(Part("")))

    def warn_of_initialized(self) -> None:
        """Warn about tensors that are initialised beside others that are not read, because these
        may be the same under another name or of another shape.
        """
        if self.request.strict or not self.request.initialize_missing:
            return
        waiting = [key for key, (_, leaf) in self.missing.items() if is_waiting(leaf.value)]
        unread = [*(key for key in waiting if key in self.manifest.tensors), *self.unexpected]
        if waiting and unread:
            warnings.warn(
                f"{self.location}: {_listed(waiting)} are initialised, not loaded; of the "
                f"checkpoint, {_listed(unread)} are not read",
                stacklevel=9,  # the caller of load()
            )

    def is_judge(self, item: PartPlan) -> bool:
        """Return whether an object decides which keys it needs, in the end: a strict module with
        hooks of others that may accept what is missing or unexpected, if something is there.
        """
        request, part = self.request, item.part
        return (
            request.strict
            and not request.initialize_missing
            and isinstance(part, ModulePart)
            and part.may_accept
            and bool(item.taken)
        )

    def give(self, item: PartPlan) -> Any:
        """Give an object its state; return what its ``load_state_dict`` returns."""
        part, strict = item.part, self.request.strict
        if isinstance(part, ModulePart) and part.is_plain:
            return None
        # Otherwise, what is lacking was initialised, or is another name of a tied tensor.
        left_out = {
            key.removeprefix(part.start)
            for key, (of, _) in self.missing.items()
            if of is item and (not strict or self.is_judge(item))
        }
        given = item.given(left_out=left_out, is_foreign=self.manifest.is_foreign)
        return part.hand_over(given, strict=strict)


@no_collection()
def match(parts: Sequence[Part], manifest: Manifest, request: Request, location: str) -> LoadPlan:
    """Return what a load of ``parts`` does.

    Raises:
        ArgumentError: a tensor cannot be filled, or two values have the same key.
        MismatchError: the checkpoint does not fit.
    """
    return _Matching(LoadPlan(location, request, manifest, [*map(PartPlan, parts)])).run()


class _Matching:
    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.manifest = plan.manifest
        self.known: set[str] = set()  # keys that the state has, or an object is given
        self.lacking: dict[str, tuple[PartPlan, Leaf]] = {}
        self.read: list[Leaf] = []
        self.tensors: dict[str, tuple[torch.Tensor, ...]] = {}  # that are filled, by key
        held = (*self.manifest.paths, *self.manifest.tensors, *self.manifest.objects)
        # In the order of the state, empty dictionaries among them.
        self.order = {key: index for index, key in enumerate(dict.fromkeys(held))}
        self.sorted = sorted(self.order)

    def run(self) -> LoadPlan:
        plan = self.plan
        for item in plan.parts:
            part = item.part
            keys = [] if part.owner is None else self._keys_of(part)
            if isinstance(part, ModulePart):
                names = [key.removeprefix(part.start) for key in keys]
                item.part = part = part.saved_with(self._metadata_of(part.start), names)
            if isinstance(part, OptimizerPart):
                item.parameters = numbered(part, self.manifest)
                check_state(part, item.parameters, self.manifest, keys, plan.location)
            self._match_leaves(item, keys)
            if part.owner is None:
                self._note_versions(part)
            for key in keys:
                if key not in self.known and self._takes(item, key):
                    self._take(item, key)
        self._drop_overwritten()
        # The second name of a tied tensor is filled by its first one.
        filled = set().union(*map(_identities, self.read)) if self.lacking else set()
        plan.missing = {
            key: found for key, found in self.lacking.items() if not _identities(found[1]) & filled
        }
        plan.unexpected = [
            key
            for key in (*self.manifest.tensors, *self.manifest.objects)
            if key.startswith(plan.request.prefix)
            and key not in self.known
            and not is_metadata(key)
            # Nor are the parts of a tensor that other ranks have.
            and (".@" not in key or f"{key.partition('.@')[0]}.{SUBCLASS}" not in self.known)
        ]
        if plan.request.strict:
            self._check_missing()
            self._check_unexpected()
        return plan

    def _keys_of(self, part: Part) -> list[str]:
        """Return the keys of the checkpoint that are an object's, in their order there."""
        inner = tuple(
            one.start
            for one in (item.part for item in self.plan.parts)
            if one.owner is not None and one is not part and one.start.startswith(part.start)
        )
        return sorted(
            (key for key in self._under(part.start) if not key.startswith(inner)),
            key=self.order.__getitem__,
        )

    def _under(self, start: str) -> list[str]:
        """Return the keys of the checkpoint that begin with ``start``, sorted."""
        first, last = (bisect_left(self.sorted, one) for one in (start, f"{start}\U0010ffff"))
        return self.sorted[first:last]

    def _metadata_of(self, start: str) -> dict[str, Any] | None:
        """Return the versions that the checkpoint has of the modules of a state dict, be it a part
        of a larger one; None if it has none.
        """
        steps = start.split(".")[:-1]
        for depth in range(len(steps), -1, -1):
            place = ".".join([*steps[:depth], METADATA])
            keys = self._under(f"{place}.")
            if keys or place in self.order:
                found: dict[str, Any] = {}
                for key in keys:
                    path = relative_path(self.manifest.paths.get(key, ()), key, f"{place}.")
                    insert(found, path, decode(key, self.manifest.objects.get(key, {})))
                inner = "".join(f"{step}." for step in steps[depth:])
                return {
                    f"{name}.".removeprefix(inner)[:-1]: local
                    for name, local in found.items()
                    if f"{name}.".startswith(inner)
                }
        return None

    def _note_versions(self, part: Part) -> None:
        """Give the state dicts in a dictionary the versions of what they are filled with."""
        noted = {key.split(METADATA)[0]: key for key in self.order if is_metadata(key)}
        for start, key in noted.items():
            path = relative_path(self.manifest.paths.get(key, ()), key, part.start)
            here = part.state
            for step in path[: path.index(METADATA)] if METADATA in path else ():
                here = member(here, step)
            if hasattr(here, "_metadata") and start.startswith(part.start):
                versions = restored(self._metadata_of(start) or {}, here)
                self.plan.fills.append(partial(setattr, here, "_metadata", versions))

    def _match_leaves(self, item: PartPlan, keys: Sequence[str]) -> None:
        """Match what the state has."""
        part = item.part
        has_free = part.owner is not None and any(
            part.is_free(str(leaf.path[0])) for leaf in part.leaves.values()
        )
        tops = {self._path(part, key)[0] for key in keys} if has_free else set()
        for name, leaf in part.leaves.items():
            key = part.start + name
            if key in self.known:
                raise ArgumentError(f"two values of the state have the key {key!r}")
            if part.owner is not None and part.is_free(str(leaf.path[0])):
                if self._lacks(part, key, leaf, tops):
                    self.lacking[key] = item, leaf
                continue
            self.known.add(key)
            if self._match_leaf(item, name, key, leaf):
                self.read.append(leaf)
            elif not is_empty(leaf.value):
                self.lacking[key] = item, leaf

    def _lacks(self, part: Part, key: str, leaf: Leaf, tops: set[Any]) -> bool:
        """Return whether the checkpoint lacks what only the object can judge further."""
        if isinstance(part, OptimizerPart) and leaf.path[0] in ("state", "param_groups"):
            return leaf.path[0] == "param_groups" and key not in self.order
        is_own = isinstance(part, ModulePart) and part.is_own(str(leaf.path[0]))
        return (bool(tops) < is_own or not is_own) and not (
            leaf.path[0] in tops or is_empty(leaf.value)
        )

    def _takes(self, item: PartPlan, key: str) -> bool:
        """Return whether an object is given a key that its state may lack."""
        part = item.part
        name = key.removeprefix(part.start)
        head, found, rest = name.partition(".@")
        if found and f"{part.start}{head}.{SUBCLASS}" in self.manifest.objects:
            self.known.add(key)  # of another rank, perhaps
            block = f"@{rest.partition('.')[0]}"
            if f"{head}.{SUBCLASS}" in part.leaves:
                mine = any(leaf.startswith(f"{head}.{block}.") for leaf in part.leaves)
                return mine and part.is_free(head)
            like: Any = item.parameter(self._path(part, key))
            if _torch.sharding_of(like) == "dtensor":
                return block == block_of(key, like)
            return True
        top = self._path(part, key)[0]
        if isinstance(part, OptimizerPart):
            return top in known_sections(part)
        return part.is_free(str(top)) or (self.plan.is_judge(item) and not is_metadata(key))

    def _path(self, part: Part, key: str) -> tuple[Any, ...]:
        return part.path(relative_path(self.manifest.paths.get(key, ()), key, part.start))

    def _take(self, item: PartPlan, key: str) -> None:
        """Record what an object is given as the checkpoint has it."""
        self.known.add(key)
        part = item.part
        name, path = key.removeprefix(part.start), self._path(part, key)
        item.paths.append(path)
        fresh = part.leaves.get(name)
        if key in self.manifest.objects:
            value = self.manifest.objects[key]
            if is_container(key):
                item.values[path] = ContainerClass(value)
            elif path[-1] == SUBCLASS:
                if fresh is not None and isinstance(fresh.value, Subclass):
                    fresh.value.check(self.plan.location, key, value)
                item.values[path] = value
            else:
                item.values[path] = decode(key, value)
            return
        if key not in self.manifest.tensors:
            item.values[path] = {}
            return
        item.taken[path] = name
        entry = self.manifest.tensors[key]
        entry.check_known(key, self.plan.location)
        if fresh is not None:
            self.read.append(fresh)
        mine: Any = None if fresh is None else fresh.value
        if isinstance(part, ModulePart) and is_waiting(mine) and mine.shape == entry.shape:
            item.waiting.append(name)
            self._read_tensor(item, name, key, mine)
        else:
            self._read_tensor(item, name, key, item.buffer(name, key, entry, path))

    def _match_leaf(self, item: PartPlan, name: str, key: str, leaf: Leaf) -> bool:
        """Record what to read for a leaf; return whether the checkpoint has it."""
        part = item.part
        is_tensor = isinstance(leaf.value, torch.Tensor)
        if key in (self.manifest.objects if is_tensor else self.manifest.tensors):
            here, there = ("a tensor", "a value") if is_tensor else ("a value", "a tensor")
            raise MismatchError(
                f"{self.plan.location}: {key!r} is {there} in the checkpoint and {here} here"
            )
        if is_tensor and key in self.manifest.tensors:
            if self._initializes_instead(part, key, leaf.value):
                return False
            item.taken[leaf.path] = name
            self._read_tensor(item, name, key, leaf.value)
            return True
        if key not in self.manifest.objects:
            return False
        value = self.manifest.objects[key]
        if isinstance(leaf.value, Subclass):
            leaf.value.check(self.plan.location, key, value)
        elif part.owner is None and not (is_empty(leaf.value) and decode(key, value) == leaf.value):
            check_put(part.state, leaf.path)
            item.values[leaf.path] = decode(key, value)
        return True

    def _initializes_instead(self, part: Part, key: str, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is initialised although the checkpoint has it, in another shape:
        a head for other labels.
        """
        request = self.plan.request
        may_be = request.initialize_missing and not request.strict and is_waiting(tensor)
        is_other = self.manifest.tensors[key].shape != tuple(tensor.shape)
        return may_be and is_other and isinstance(part, ModulePart)

    def _remedy_of_shape(self, part: Part, tensor: torch.Tensor, same_dtype: bool) -> str:
        if not (same_dtype and is_waiting(tensor) and isinstance(part, ModulePart)):
            return ""
        return "; strict=False with initialize_missing=True initialises it, as for a new head"

    def _read_tensor(self, item: PartPlan, name: str, key: str, tensor: torch.Tensor) -> None:
        """Record the segments of a tensor, and what to read each into."""
        part = item.part
        entry = self.manifest.tensors[key]
        entry.check_known(key, self.plan.location)
        (dtype, described, blocks), tensors = tensor_state(key, tensor)
        scales = Scales.of(self.manifest, key, dtype)
        if entry.shape != described.shape or (entry.dtype is not dtype and scales is None):
            raise MismatchError(
                f"{self.plan.location}: tensor {key!r} is {entry.dtype.name} of shape "
                f"{list(entry.shape)} in the checkpoint, and {dtype.name} of shape "
                f"{list(tensor.shape)} here"
                + self._remedy_of_shape(part, tensor, entry.dtype is dtype)
            )
        boxes = [block.box for block in blocks]
        is_deferred_here = is_waiting(tensor) and isinstance(part, ModulePart)
        if is_deferred_here and is_deferred(tensor):
            box = local_box(self.plan.request.shard, name, tensor)
            boxes = boxes if box is None else [box]
        self.tensors[key] = (tensor,) if is_deferred_here else tensors
        if scales is not None:
            self.known.add(scales.key)
            self.tensors[scales.key] = (scales.values,)
            self.plan.segments += scales.segments
            self.plan.targets += scales.targets
        for place, box in enumerate(boxes):
            if not is_deferred_here:
                check_target(key, tensors[place])
            segments = segments_of(key, entry, box)
            targets = [
                partial(_materialized, item, name, place, box, segment.inner)
                if is_deferred_here
                else _inside(tensors[place], box, segment.inner)
                for segment in segments
            ]
            if scales is not None:
                scaled = [
                    scales.scaled(segment.inner, target)
                    for segment, target in zip(segments, targets, strict=True)
                ]
                targets = [memory for memory, _ in scaled]
                self.plan.fills += [fill for _, fill in scaled]
            self.plan.segments += segments
            self.plan.targets += targets

    def _drop_overwritten(self) -> None:
        """Read a tensor that has several keys under the last of them only, which overwrites what
        the others have.
        """
        plan = self.plan
        filled = [one.data_ptr() for one in plan.targets if isinstance(one, torch.Tensor)]
        if len({*filled}) == len(plan.targets):
            return
        last = {(*map(memory_of, tensors),): key for key, tensors in self.tensors.items()}
        keys = {*last.values()}
        kept = [segment.key in keys for segment in plan.segments]
        plan.segments = [*compress(plan.segments, kept)]
        plan.targets = [*compress(plan.targets, kept)]

    def _check_missing(self) -> None:
        missing = self.plan.missing
        bad = [key for key, (one, leaf) in missing.items() if self._is_bad(key, one, leaf)]
        if bad:
            waiting = any(is_waiting(missing[key][1].value) for key in bad)
            raise MismatchError(
                f"{self.plan.location}: the checkpoint lacks {_listed(bad)}, which the state "
                f"has; {self._remedy(bad)}strict=False leaves them as they are"
                + (", initialize_missing=True initialises deferred ones" if waiting else "")
            )

    def _remedy(self, bad: list[str]) -> str:
        """Return a clause that names the prefixes with which the checkpoint has all the missing
        keys, else the keys that it has and that resemble the first.
        """
        first, *rest = [key.removeprefix(self.plan.request.prefix) for key in bad]
        ends = [key for key in self.order if f".{key}".endswith(f".{first}")]
        starts = [key.removesuffix(first) for key in ends]
        fits = [start for start in starts if all(start + name in self.order for name in rest)]
        if fits and len(self.plan.missing) == sum(
            len(item.part.leaves) for item in self.plan.parts
        ):
            return " or ".join(f"prefix={start!r}" for start in fits[:2]) + " finds them, "
        inner = [key for key in self.order if f".{bad[0]}".endswith(f".{key}")]
        near = ends or inner or get_close_matches(bad[0], [*self.order][:_COMPARED], n=_NEAR)
        return f"it has {_listed(near[:_NEAR])}, " if near else ""

    def _is_bad(self, key: str, item: PartPlan, leaf: Leaf) -> bool:
        """Return whether a strict load needs a key that the checkpoint lacks."""
        part = item.part
        if self.plan.is_judge(item):
            return False
        if is_waiting(leaf.value):
            return not self.plan.request.initialize_missing
        return not (isinstance(part, OptimizerPart) and may_lack(part, key, self.manifest))

    def _check_unexpected(self) -> None:
        for part in (item.part for item in self.plan.parts):
            extra = [key for key in self.plan.unexpected if key.startswith(part.start)]
            if part.owner is not None and extra:
                advice = (
                    "; it is of another kind of optimizer"
                    if isinstance(part, OptimizerPart)
                    else "; prefix= names what its keys begin with, strict=False ignores the rest"
                )
                raise MismatchError(
                    f"{self.plan.location}: the checkpoint has {_listed(extra)}, which this "
                    f"{type(part.owner).__name__} lacks{advice}"
                )


def _materialized(item: PartPlan, name: str, place: int, box: Box, inner: Box) -> torch.Tensor:
    """Return ``inner``, in coordinates of the whole tensor, of ``box``, the ``place``-th block of a
    tensor that was deferred when it was compared.
    """
    block = tensor_state(name, item.tensor(name)).tensors[place]
    return _inside(block, box, inner)


def _inside(tensor: torch.Tensor, box: Box, inner: Box) -> torch.Tensor:
    """Return the part ``inner`` of a tensor that holds ``box``, without a class
    of its own.
    """
    if type(tensor) not in ORDINARY:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    return tensor if inner == box else tensor[inner.within(box)]


def _identities(leaf: Leaf) -> set[Any]:
    """Return what two leaves have in common if they are one tensor."""
    if not isinstance(leaf.value, torch.Tensor):
        return set()
    local = getattr(leaf.value, "_local_tensor", leaf.value)
    memory = memory_of(local) if _torch.sharding_of(local) == "plain" else None
    return {id(leaf.value), memory or id(leaf.value)}


def _listed(keys: Iterable[str]) -> str:
    keys = [*keys]
    shown = ", ".join(map(repr, keys[:_SHOWN]))
    return shown if len(keys) <= _SHOWN else f"{shown} and {len(keys) - _SHOWN} more"
