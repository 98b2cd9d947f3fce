"""Modules whose tensors have addresses of their own, behind which memory comes and goes.

An address without memory cannot be read. While a module runs before all its bytes have arrived,
operators wait for those that they need (:class:`Arrivals`); whatever else reads them fails, and
never reads bytes that are another model's. A module that runs once all have arrived needs none of
this.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchrelay import _torch
from torchrelay.deferred import is_deferred
from torchrelay.switching.device._contract import DeviceMemory
from torchrelay.switching.models._layout import Grouped, TensorSpec, view_of

__all__ = ["Arrivals", "Binding"]


class Binding:
    """A module whose tensors view addresses that no other model of the process has, now or later.

    The tensors are made once; the same objects, where the module has memory of its own. Each group
    has granules of its own, which are mapped as a whole.
    """

    def __init__(self, module: torch.nn.Module, grouped: Grouped, memory: DeviceMemory) -> None:
        """Take `module`, whose tensors are those of the layout; no group has memory yet.

        Raises:
            SegmentError: the process has no addresses left.
        """
        self.module = module
        self.grouped = grouped
        self._granule = memory.granule_bytes
        self._group_starts = grouped.starts(self._granule)
        self._offsets = [-1] * len(grouped.groups)  # of each group in the memory; -1: not mapped
        self._places: tuple[int, ...] = ()  # what `bind` was called with, if all groups are there
        layout = grouped.layout
        self._range = memory.reserve(max(self._group_starts[-1], self._granule))
        self._end = self._range.address + self._group_starts[-1]
        addresses = [self._range.address] * len(layout.storages)
        for group, start in enumerate(self._group_starts[:-1]):
            for storage, offset in grouped.places(group):
                addresses[storage] += start + offset
        filled = sorted((at, one) for one, at in enumerate(addresses) if layout.storages[one])
        self._address_of = {one: at for at, one in filled}
        self._addresses = [at for at, _ in filled]
        self._storages = [one for _, one in filled]
        self._absent = set(self._storages)
        made = [
            _torch.storage_at(at, size_bytes, memory.device)
            for at, size_bytes in zip(addresses, layout.storages, strict=True)
        ]
        for spec in layout.tensors:
            _place(module, spec, made[spec.storage])

    def bind(self, offsets: Sequence[int], missing: Sequence[int] = ()) -> None:
        """Map the groups at `offsets` of the memory, except for those that are `missing`; costs
        nothing if they are there already.
        """
        if self._places == offsets and not missing:
            return
        self._places = ()
        for group, offset in enumerate(offsets):
            self.map(group, -1 if group in missing else offset)
        if not missing:
            self._places = tuple(offsets)

    def leave(self, groups: Sequence[int] | None = None) -> None:
        """Unmap groups, by default all, because others get their memory."""
        self._places = ()
        for group in range(len(self._offsets)) if groups is None else groups:
            self.map(group, -1)

    def absent(self, tensor: torch.Tensor) -> int | None:
        """Return the storage that `tensor` views, if it has no memory."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse tensors and subclasses without memory of their own
            return None
        if not self._range.address <= address < self._end:
            return None
        storage = self._storages[bisect_right(self._addresses, address) - 1]
        return storage if storage in self._absent else None

    def trace(self, run: Callable[[], object], used: Callable[[int], object]) -> None:
        """Run the module, all of which is bound, without memory, and call `used` with each storage
        when an operator first needs it, and gets it.
        """
        offsets = list(self._offsets)
        shown: set[int] = set()  # granules that parts of a storage are in
        runs: list[tuple[int, int]] = []

        def show(storage: int) -> None:
            used(storage)
            group = self.grouped.group_of[storage]
            at = self._address_of[storage] - self._range.address
            first = at // self._granule
            last = (at + self.grouped.layout.storages[storage] - 1) // self._granule
            wanted = [first + (first in shown), last + 1 - (last in shown and last > first)]
            shown.update((first, last))
            start, size = wanted[0] * self._granule, (wanted[1] - wanted[0]) * self._granule
            if size > 0:
                offset = offsets[group] + start - self._group_starts[group]
                self._range.map(start, offset, size)
                runs.append((start, size))
            self._absent.discard(storage)

        self.leave()
        try:
            with Arrivals(self, show):
                run()
        finally:
            for start, size in runs:
                self._range.unmap(start, size)
            self.bind(offsets)

    def map(self, group: int, offset: int) -> None:
        """Let `group` have the memory from `offset`, with its bytes, or none for -1."""
        before = self._offsets[group]
        start, end = self._group_starts[group : group + 2]
        if before == offset:
            return
        if before >= 0 and end > start:
            self._range.unmap(start, end - start)
        self._offsets[group] = -1
        self._absent.update(self.grouped.groups[group])
        if offset >= 0:
            if end > start:
                self._range.map(start, offset, end - start)
            self._offsets[group] = offset
            self._absent.difference_update(self.grouped.groups[group])


class Arrivals(TorchDispatchMode):
    """Before each operator, waits for the absent storages that its arguments view."""

    def __init__(self, binding: Binding, wait: Callable[[int], None]) -> None:
        """`wait` returns once the storage has memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._binding = binding
        self._wait = wait

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping each call, for which it would import its compiler."""
        return False

    @_torch.never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in _tensors(args, kwargs):
            storage = self._binding.absent(value)
            if storage is not None:
                self._wait(storage)
        return func(*args, **(kwargs or {}))


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operator's arguments; flat ones without the cost of a tree."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from (one for one in tree_iter(value) if isinstance(one, torch.Tensor))
    if kwargs:
        yield from (one for one in tree_iter(kwargs) if isinstance(one, torch.Tensor))


def _place(module: torch.nn.Module, spec: TensorSpec, storage: torch.UntypedStorage) -> None:
    """Let the tensor of `spec` view `storage`: the module's own one, to which it may have other
    references, unless that has no memory or cannot be changed.
    """
    view = view_of(storage, spec.dtype, spec.offset, spec.shape, spec.stride)
    prefix, _, name = spec.paths[0].rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(prefix), name)
    if is_deferred(tensor) or tensor.is_inference() or not tensor.is_leaf:
        tensor = torch.nn.Parameter(view, spec.requires_grad) if spec.is_parameter else view
    tensor.data = view
    tensor.requires_grad_(spec.requires_grad)
    for path in spec.paths:
        prefix, _, name = path.rpartition(".")
        owner = module.get_submodule(prefix)
        if getattr(owner, name) is not tensor:
            # setattr, as recurrent layers keep a list of their weights up to date by it.
            setattr(owner, name, tensor)
