"""Back to deferred: what is known of a tensor's making after it was materialised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torchrelay import _torch
from torchrelay.deferred._graph import (
    History,
    Node,
    Region,
    Storage,
    StorageRecord,
    map_tensors,
    next_seq,
)
from torchrelay.deferred._modules import children_first
from torchrelay.deferred._schedule import END, Schedule
from torchrelay.deferred._tensor import FakeTensor, fake_from_region, go_back
from torchrelay.errors import ArgumentError, DeferredError, UnsupportedError

__all__ = ["dematerialize", "remember"]


class _Trace(NamedTuple):
    """Where the values of a materialised tensor come from. Keeps records alive, but no memory.

    Attributes:
        before: its values are those of ``region`` at this place in the program.
        version: of the tensor when it was materialised.
    """

    region: Region
    record: StorageRecord
    before: int
    version: int


_traces: Any = WeakIdKeyDictionary()


def remember(tensor: torch.Tensor, region: Region, history: History) -> None:
    """Note that ``tensor`` was just materialised from ``region``, the storage of ``history``."""
    if not history.record.reads_outside:  # else the record keeps somebody else's memory
        for node in history.record:
            node.finish()
        record = region.storage.keep_record(history)
        _traces[tensor] = _Trace(region, record, next_seq(), _version(tensor))


def _version(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return -1 if local.is_inference() else local._version


def dematerialize(module: torch.nn.Module) -> None:
    """Free the memory of ``module``'s tensors, which become deferred again with the same values.

    A parameter that had become a slice is whole again. What had become a DTensor is a new object.

    Raises:
        ArgumentError: ``module`` is not a module.
        DeferredError: a tensor has no record, or changed since its materialisation. Nothing is
            changed.
        UnsupportedError: FSDP2 manages the module. Nothing is changed.
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"dematerialize() takes a module, not {type(module).__name__}.")
    if _torch.has_fsdp2(module):
        raise UnsupportedError(
            "dematerialize(): fully_shard() keeps the memory of the parameters of this module, or "
            "of a part of it, beside the module. Build the module anew with deferred_init(), or "
            "save its values."
        )
    places = [
        (registry, name, f"{prefix}{name}", tensor)
        for prefix, submodule in children_first(module, "")
        for registry in (submodule._parameters, submodule._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    ]
    # Each tensor once, under the first of its names.
    first = {id(tensor): (name, tensor) for _, _, name, tensor in reversed(places)}
    fakes = _rebuilt([_state_of(name, tensor) for name, tensor in first.values()])
    new = {
        id(tensor): go_back(tensor, fake)
        for (_, tensor), fake in zip(first.values(), fakes, strict=True)
    }
    for registry, name, _, tensor in places:
        registry[name] = new[id(tensor)]  # type: ignore[assignment]


def _state_of(name: str, tensor: torch.Tensor) -> tuple[Region, int]:
    """Return the region and the place in the program whose values a deferred or materialised tensor
    has; raise as dematerialize().
    """
    if isinstance(tensor, FakeTensor):
        if not tensor._region.storage.deferred:
            raise DeferredError(f"{name} was made by fake_mode(), which records nothing.")
        if tensor._history.escaped is None:
            return tensor._region, END
    trace: _Trace | None = _traces.get(tensor)
    if trace is None:
        raise DeferredError(
            f"{name} was not made by deferred_init(), or its initialisation read real tensors from "
            "outside, or it shares memory with a tensor that was materialized before: there is no "
            "record to go back to. Save its values instead."
        )
    if trace.version != _version(tensor):
        raise DeferredError(
            f"{name} has been changed since it was materialized, as by a training step, and going "
            "back to its record would lose that. Save its values instead."
        )
    return trace.region, trace.before


def _rebuilt(states: list[tuple[Region, int]]) -> list[FakeTensor]:
    """Return a deferred tensor for each state, on one copy of the record."""
    copier = _Copier()
    regions = [copier.region(region) for region, _ in states]
    schedule = Schedule([(region.storage, before) for region, before in states], cached=False)
    for node in schedule.nodes:
        copier.node(node)
    return [fake_from_region(region, region.storage.history()) for region in regions]


class _Copier:
    """Copies nodes, regions and storages, each once."""

    def __init__(self) -> None:
        self._storages: dict[Storage, tuple[Storage, History]] = {}
        self._regions: dict[int, tuple[Region, Region]] = {}

    def _storage(self, old: Storage) -> tuple[Storage, History]:
        found = self._storages.get(old)
        if found is None:
            new = Storage(old.size_bytes, old.device, deferred=True)
            found = self._storages[old] = new, new.history()
        return found

    def region(self, old: Region) -> Region:
        found = self._regions.get(id(old))
        if found is None:
            found = self._regions[id(old)] = (
                old,
                old._replace(storage=self._storage(old.storage)[0]),
            )
        return found[1]

    def node(self, old: Node) -> None:
        args, kwargs = map_tensors((old.args, old.kwargs), Region, self.region)
        reads = tuple(map(self.region, old.reads))
        outputs = tuple(None if region is None else self.region(region) for region in old.outputs)
        kept = [*old.reads, *(old.writes if len(old.targets()) > 1 else ())]
        keeps = tuple(self._storage(region.storage)[1] for region in kept)
        writes = tuple(map(self.region, old.writes))
        new = replace(
            old, args=args, kwargs=kwargs, reads=reads, writes=writes, outputs=outputs, keeps=keeps
        )
        new.records = ()
        new.link(any(target.storage.history().record.reads_outside for target in old.targets()))
