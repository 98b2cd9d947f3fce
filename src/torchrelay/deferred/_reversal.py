"""Back to deferred: what is known of a tensor's making after it was materialised.

A trace is the recorded operations that decide one tensor's values. It holds no memory of the
tensor's own.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch

from torchrelay import _torch
from torchrelay.deferred._graph import History, Node, Region, Storage, map_tensors
from torchrelay.deferred._modules import children_first
from torchrelay.deferred._schedule import END, Schedule
from torchrelay.deferred._tensor import FakeTensor, fake_from_region, go_back
from torchrelay.errors import ArgumentError, DeferredError, UnsupportedError

__all__ = ["Trace", "dematerialize", "remember"]


@dataclass
class Trace:
    """The operations that decide the values of ``region``, in order."""

    region: Region
    nodes: list[Node]

    @classmethod
    def of_fake(cls, fake: FakeTensor) -> Trace | None:
        """Return what is run to materialise ``fake`` alone; None if its memory has escaped."""
        region = fake._region
        if region.storage.history().escaped is not None:
            return None
        return cls(region, Schedule([(region.storage, END)], cached=False).nodes)


_traces: dict[int, tuple[Trace, int]] = {}


def remember(tensor: torch.Tensor, trace: Trace | None) -> None:
    """Note that ``tensor`` was just materialised by the operations of ``trace``."""
    if trace is None or any(node.reads_outside for node in trace.nodes):
        return  # the trace would keep somebody else's memory
    key = id(tensor)
    _traces[key] = trace, _version(tensor)
    weakref.finalize(tensor, _traces.pop, key, None).atexit = False


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
    traces = [_trace_of(name, tensor) for name, tensor in first.values()]
    fakes = _rebuilt(traces)
    new = {
        id(tensor): go_back(tensor, fake)
        for (_, tensor), fake in zip(first.values(), fakes, strict=True)
    }
    for registry, name, _, tensor in places:
        registry[name] = new[id(tensor)]  # type: ignore[assignment]


def _trace_of(name: str, tensor: torch.Tensor) -> Trace:
    """Return the trace of a deferred or of a materialised tensor; raise as dematerialize()."""
    if isinstance(tensor, FakeTensor):
        if not tensor._region.storage.deferred:
            raise DeferredError(f"{name} was made by fake_mode(), which records nothing.")
        trace, version = Trace.of_fake(tensor), _version(tensor)
    else:
        trace, version = _traces.get(id(tensor), (None, 0))
    if trace is None:
        raise DeferredError(
            f"{name} was not made by deferred_init(), or its initialisation read real tensors from "
            "outside, or it shares memory with a tensor that was materialized before: there is no "
            "record to go back to. Save its values instead."
        )
    if version != _version(tensor):
        raise DeferredError(
            f"{name} has been changed since it was materialized, as by a training step, and going "
            "back to its record would lose that. Save its values instead."
        )
    return trace


def _rebuilt(traces: list[Trace]) -> list[FakeTensor]:
    """Return a deferred tensor for each trace, on one copy of the record."""
    copier = _Copier()
    nodes = {node.seq: node for trace in traces for node in trace.nodes}
    regions = [copier.region(trace.region) for trace in traces]
    for seq in sorted(nodes):
        copier.node(nodes[seq])
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
        new.link()
