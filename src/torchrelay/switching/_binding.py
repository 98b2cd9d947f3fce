"""Modules whose tensors view memory elsewhere, which may not have arrived yet.

While a module runs, a tensor whose bytes have not arrived has an address behind which there is no
memory. Operators wait for it (:class:`Arrivals`); whatever else reads it fails, and never reads
bytes that are another model's. A module that runs once all have arrived needs none of this.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchrelay import _torch
from torchrelay.errors import ModelError
from torchrelay.switching._contract import align
from torchrelay.switching._layout import ModelLayout, TensorSpec, view_of

__all__ = ["Arrivals", "Binding"]


@dataclass
class _Slot:
    """A storage of the module, and the memory that its tensors view."""

    size_bytes: int
    absent: torch.UntypedStorage  # without memory behind it
    # With each tensor, the view that it is of the absent storage.
    tensors: list[tuple[torch.Tensor, TensorSpec, torch.Tensor]] = field(default_factory=list)
    memory: torch.UntypedStorage | None = None
    address: int = 0  # of `memory`


class Binding:
    """A module whose tensors view memory elsewhere, one storage at a time.

    The module's own tensors are replaced, so that a deferred module needs no memory. A storage is
    absent until :meth:`bind` is called for it.
    """

    def __init__(
        self, module: torch.nn.Module, layout: ModelLayout, device: torch.device, nowhere: int
    ) -> None:
        """Take `module`, whose tensors are those of `layout`.

        Args:
            nowhere: the first of `layout.size_bytes` addresses of `device` without memory.
        """
        self.module = module
        self.layout = layout
        self._device = device
        self._kept = ""  # the path of a tensor of which something else keeps a view
        self._slots: list[_Slot] = []
        self._starts: list[int] = []  # of the storages while they are absent
        self._end = nowhere
        for size_bytes in layout.storages:
            self._starts.append(self._end)
            self._slots.append(_Slot(size_bytes, _torch.storage_at(self._end, size_bytes, device)))
            self._end += align(size_bytes)
        for spec in layout.tensors:
            slot = self._slots[spec.storage]
            tensor = torch.empty(0, dtype=spec.dtype, device=device)
            if spec.is_parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=spec.requires_grad)
            else:
                tensor.requires_grad_(spec.requires_grad)
            tensor.data = _view(slot.absent, spec)
            for path in spec.paths:
                _replace(module, path, tensor)
            slot.tensors.append((tensor, spec, _view(slot.absent, spec)))

    def addresses(self) -> list[int]:
        """Return where each storage is bound; 0 for those that are absent or empty."""
        return [slot.address for slot in self._slots]

    def bind(self, storage: int, address: int) -> None:
        """Let the tensors of `storage` view the bytes at `address`; free if they do already."""
        slot = self._slots[storage]
        if slot.address == address or not slot.size_bytes:
            return
        memory = _torch.storage_at(address, slot.size_bytes, self._device)
        for tensor, spec, _ in slot.tensors:
            tensor.data = _view(memory, spec)
        self._leave(slot)
        slot.memory, slot.address = memory, address

    def unbind(self, storage: int) -> None:
        """Make the storage absent."""
        slot = self._slots[storage]
        for tensor, _, view in slot.tensors:
            tensor.data = view
        self._leave(slot)

    def check(self) -> None:
        """Raise :class:`ModelError` if something else views memory that a storage has left."""
        if self._kept:
            raise ModelError(
                f"the model keeps a view of {self._kept} from one request to the next, and its "
                "weights move: make the view in each call of forward, or keep a clone of it"
            )

    def absent(self, tensor: torch.Tensor) -> int | None:
        """Return the storage that `tensor` views, if it is an absent one."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse tensors and subclasses without memory of their own
            return None
        if not self._starts or not self._starts[0] <= address < self._end:
            return None
        return bisect_right(self._starts, address) - 1

    def correct(self, tensor: torch.Tensor, storage: int) -> None:
        """Let a view of `storage`, made while that was absent, view its memory."""
        slot = self._slots[storage]
        if self.absent(tensor) is not None and slot.memory is not None:
            offset = int(tensor.storage_offset())
            tensor.data = view_of(slot.memory, tensor.dtype, offset, tensor.shape, tensor.stride())

    def _leave(self, slot: _Slot) -> None:
        memory, slot.memory, slot.address = slot.memory, None, 0
        if memory is None or not _torch.is_viewed(memory):
            return
        gc.collect()  # uncollected garbage does not count
        if _torch.is_viewed(memory):
            self._kept = slot.tensors[0][1].paths[0]


class Arrivals(TorchDispatchMode):
    """Before each operator, waits for the absent storages that its arguments view."""

    def __init__(self, binding: Binding, wait: Callable[[int], None]) -> None:
        """`wait` returns once the storage is bound."""
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
                with torch.inference_mode(False):
                    self._wait(storage)
                    self._binding.correct(value, storage)
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


def _view(storage: torch.UntypedStorage, spec: TensorSpec) -> torch.Tensor:
    return view_of(storage, spec.dtype, spec.offset, spec.shape, spec.stride)


def _replace(module: torch.nn.Module, path: str, tensor: torch.Tensor) -> None:
    prefix, _, name = path.rpartition(".")
    # setattr, as recurrent layers keep a list of their weights up to date by it.
    setattr(module.get_submodule(prefix), name, tensor)
