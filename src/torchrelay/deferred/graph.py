"""What deferred initialisation remembers: storages, the operations that write them, and regions of them.

A fake tensor is a *region* (dtype, size, stride, offset) of a :class:`Storage` that has no memory yet. Views
are therefore not operations: they are other regions of the same storage. A :class:`Node` is one operation
that allocates or writes storages; its tensor arguments are regions, and its place in the program is ``seq``.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from torchrelay.deferred.positions import Position
from torchrelay.errors import DeferredError

__all__ = [
    "Constant",
    "External",
    "History",
    "Node",
    "Region",
    "Storage",
    "map_tensors",
    "next_seq",
]

next_seq = itertools.count(1).__next__


class History(list["Node"]):
    """The operations not yet run that write a storage, in program order.

    Fake tensors and the operations that read the storage own it; those that write it do not, so that a
    storage that nobody can reach any more frees its history, and its memory, at once.

    Attributes:
        real: the memory, once it exists; the list then holds only what has not been applied to it.
    """

    __slots__ = ("__weakref__", "real")

    def __init__(self) -> None:
        super().__init__()
        self.real: torch.UntypedStorage | None = None


class Storage:
    """Memory that a fake tensor would have: how large, where, and which operations write and read it.

    Attributes:
        size_bytes: what the real storage has, in bytes.
        device: where the real storage will be.
        deferred: whether operations on it are recorded; a plain fake's are not.
        readers: the operations that read it, held weakly: a reader matters only to who needs its result.
    """

    __slots__ = ("_history", "deferred", "device", "readers", "shadow", "size_bytes")

    def __init__(self, size_bytes: int, device: torch.device, deferred: bool) -> None:
        self.size_bytes = size_bytes
        self.device = device
        self.deferred = deferred
        self.readers: list[weakref.ref[Node]] = []
        self.shadow: torch.UntypedStorage | None = None
        self._history: weakref.ref[History] | None = None

    @property
    def real(self) -> torch.UntypedStorage | None:
        """The memory, if it exists. Its history owns it."""
        return self.history().real

    @real.setter
    def real(self, memory: torch.UntypedStorage) -> None:
        self.history().real = memory

    def history(self) -> History:
        """The operations that write it; a new empty one if nobody holds it."""
        history = None if self._history is None else self._history()
        if history is None:
            history = History()
            self._history = weakref.ref(history)
        return history


class Region:
    """A strided part of a storage, seen as one dtype. Immutable; ``conj`` and ``neg`` bits do not occur."""

    __slots__ = ("dtype", "offset", "size", "storage", "stride")

    def __init__(
        self,
        storage: Storage,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int = 0,
    ) -> None:
        self.storage = storage
        self.dtype = dtype
        self.size = size
        self.stride = stride
        self.offset = offset

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.size:
            count *= extent
        return count

    @property
    def size_bytes(self) -> int:
        """The bytes of its elements, each counted once."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow each other in memory, the last dimension fastest."""
        expected = 1
        for extent, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            if extent != 1:
                if step != expected:
                    return False
                expected *= extent
        return True

    @property
    def is_whole(self) -> bool:
        """Whether it covers every byte of its storage, in any order of dimensions."""
        if self.offset != 0 or self.size_bytes != self.storage.size_bytes:
            return False
        expected = 1
        for step, extent in sorted(zip(self.stride, self.size, strict=True)):
            if extent != 1:
                if step != expected:
                    return False
                expected *= extent
        return True

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A real tensor: this region of ``storage``."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)

    def meta(self) -> torch.Tensor:
        """A meta tensor with this region's shape; regions of one storage share one meta storage."""
        if self.offset == 0 and self.storage.shadow is None:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        if self.storage.shadow is None:
            flat = torch.empty(self.storage.size_bytes, dtype=torch.uint8, device="meta")
            self.storage.shadow = flat.untyped_storage()
        tensor = torch.empty(0, dtype=self.dtype, device="meta")
        return tensor.set_(self.storage.shadow, self.offset, self.size, self.stride)


class External:
    """A real tensor from outside the recording, and its version when an operation read it."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.clone() if tensor.is_inference() else tensor
        self.version = self.tensor._version

    def get(self, node: Node) -> torch.Tensor:
        """The tensor. Raises :class:`DeferredError` if it was changed in place since."""
        if self.tensor._version != self.version:
            raise DeferredError(
                f"{node.func}: a real tensor of shape {tuple(self.tensor.shape)} that this operation read when it "
                "was recorded has been changed in place since, so the result would not be that of eager "
                "construction. Pass a clone of it, or materialize the module before changing it."
            )
        return self.tensor


class Constant:
    """Values that were known when they were recorded (``torch.tensor([1, 2])``); nobody else holds them."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Node:
    """One recorded operation.

    Attributes:
        seq: its place in the program; operations that are run are run in this order.
        func: the overload (``torch.ops.aten.add_.Tensor``), or a composite of :mod:`.composites`.
        args, kwargs: its arguments; tensors are Region, External or Constant.
        reads: the regions it reads, among its arguments; one that it also writes is only in ``writes``.
        writes: the regions it writes in place, among its arguments.
        outputs: the regions of newly allocated results, ``None`` where a result is not a tensor or aliases one.
        keeps: the histories of the storages it reads, so that what it needs stays known.
        position, after: where its random numbers start and end in their generator's sequence; None: it draws none.
        default_dtype: the default dtype at that time.
        done: whether it has been run for good.
    """

    __slots__ = (
        "__weakref__",
        "after",
        "args",
        "default_dtype",
        "done",
        "func",
        "keeps",
        "kwargs",
        "outputs",
        "position",
        "reads",
        "seq",
        "writes",
    )

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: tuple[Region, ...] = (),
        writes: tuple[Region, ...] = (),
        outputs: tuple[Region | None, ...] = (),
        keeps: tuple[History, ...] = (),
    ) -> None:
        self.seq = next_seq()
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.reads = reads
        self.writes = writes
        self.outputs = outputs
        self.keeps = keeps
        self.position: Position | None = None
        self.after: Position | None = None
        self.default_dtype = torch.get_default_dtype()
        self.done = False

    def __repr__(self) -> str:
        return f"Node({self.seq}, {self.func})"

    def link(self) -> None:
        """Enters it where it belongs: in the histories of what it writes, among the readers of what it reads."""
        for region in self.reads:
            region.storage.readers.append(weakref.ref(self))
        for region in self.targets():
            region.storage.history().append(self)

    def finish(self) -> None:
        """It has been run for good: what came before it in the storages it wrote is history no more."""
        self.done = True
        for region in self.targets():
            history = region.storage.history()
            history[:] = [node for node in history if node.seq > self.seq]
        self.keeps = ()

    def targets(self) -> list[Region]:
        """The regions it writes and makes."""
        return [*self.writes, *(region for region in self.outputs if region is not None)]


def map_tensors(value: Any, kinds: Any, function: Any) -> Any:
    """``value`` with ``function`` applied to each instance of ``kinds`` in it, through lists, tuples, dicts."""
    if isinstance(value, kinds):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([map_tensors(item, kinds, function) for item in value])
    if type(value) is dict:
        return {key: map_tensors(item, kinds, function) for key, item in value.items()}
    return value
