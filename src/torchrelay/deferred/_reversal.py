"""Back to deferred: what is known of a tensor's making after it was materialised."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torchrelay import _torch
from torchrelay.deferred._graph import History, Region, StorageRecord
from torchrelay.deferred._modules import children_first
from torchrelay.deferred._schedule import END, Schedule
from torchrelay.deferred._tensor import FakeTensor, fake_from_region, go_back
from torchrelay.errors import ArgumentError, DeferredError, UnsupportedError

__all__ = ["dematerialize", "remember"]


class _Trace(NamedTuple):
    """Where the values of a materialised tensor come from. Keeps records alive, but no memory.

    Attributes:
        length: of the record when the tensor was materialised.
        state: of the tensor then.
    """

    region: Region
    record: StorageRecord
    length: int
    state: tuple[Any, ...]


_traces: Any = WeakIdKeyDictionary()


def remember(tensor: torch.Tensor, region: Region, history: History) -> None:
    """Note that ``tensor`` was just materialised from ``region``, the storage of ``history``."""
    if not history.record.reads_outside:  # else the record keeps somebody else's memory
        for node in history.record:
            node.finish()
        record = region.storage.keep_record(history)
        _traces[tensor] = _Trace(region, record, len(record), _state(tensor))


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what changes with the values: writes count the version up, ``.data = ...`` replaces
    the memory.
    """
    local = getattr(tensor, "_local_tensor", tensor)
    version = -1 if local.is_inference() else local._version
    return version, local.dtype, _torch.weak_storage(local)


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
        for prefix, submodule in children_first(module)
        for registry in (submodule._parameters, submodule._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    ]
    # Each tensor once, under the first of its names.
    first = {id(tensor): (name, tensor) for _, _, name, tensor in reversed(places)}
    regions = {key: _region_of(name, tensor) for key, (name, tensor) in first.items()}
    fakes = {key: fake_from_region(one, one.storage.begin_again()) for key, one in regions.items()}
    for node in Schedule([(region.storage, END) for region in regions.values()]).nodes:
        node.keep_again()
    new = {key: go_back(tensor, fakes[key]) for key, (_, tensor) in first.items()}
    for _, tensor in first.values():  # it may be filled from elsewhere next
        _traces.pop(tensor, None)
    for registry, name, _, tensor in places:
        registry[name] = new[id(tensor)]  # type: ignore[assignment]


def _region_of(name: str, tensor: torch.Tensor) -> Region:
    """Return the region whose last state a deferred or materialised tensor has; raise as
    dematerialize().
    """
    if isinstance(tensor, FakeTensor):
        if not tensor._region.storage.deferred:
            raise DeferredError(f"{name} was made by fake_mode(), which records nothing.")
        if tensor._history.escaped is None:
            return tensor._region
    trace: _Trace | None = _traces.get(tensor)
    if trace is None:
        raise DeferredError(
            f"{name} was not made by deferred_init(), or its initialisation read real tensors from "
            "outside, or it shares memory with a tensor that was materialized before: there is no "
            "record to go back to. Save its values instead."
        )
    if trace.state != _state(tensor) or trace.length != len(trace.record):
        raise DeferredError(
            f"{name} has been changed since it was materialized, as by a training step, and going "
            "back to its record would lose that. Save its values instead."
        )
    return trace.region
