"""The record of deferred initialisation: storages, operations that write them, and their regions.

A node's life::

    torch calls an operation on fake tensors
        │  _dispatch: shapes from meta kernels
        ▼
    _recording makes a Node: func, args (Regions, Externals, Constants), seq, position of its draws
        │  entered in the StorageRecord of each Storage that it writes
        ▼
    materialize_* or a read asks for a Region at some seq
        │  _schedule: the nodes back to memory that still holds a needed state
        ▼
    _replay runs them in program order, with generators at their positions
        │  memory is kept with a History of the Storage
        ▼
    _materialization turns the fake tensor into the real one: its memory has *escaped*

Terms:

region: what a tensor sees of a storage: dtype, size, stride, offset.
history: the record of a storage, with memory that holds one of its states, if any.
version: the ``seq`` of the last operation whose effect is in the memory.
materialization: one call that makes tensors real; has an identity, because it may still read
memory that it handed out itself.
escaped: memory that is a real tensor's now, so that the program may change it.
cached view: the real tensor last made for a region, so that it is not made again.
external: a real tensor that a recorded operation reads.

A fake tensor is a *region* (dtype, size, stride, offset) of a :class:`Storage` without memory.
Views are therefore not operations, but other regions of the same storage. A :class:`Node` is one
operation that allocates or writes storages; its tensor arguments are regions, and ``seq`` is its
place in the program. Only the operations before a place in the program decide the state of a
storage there. What is run earlier or later, or changed from outside, does not matter.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchrelay import _torch
from torchrelay.errors import DeferredError

__all__ = [
    "Constant",
    "External",
    "History",
    "Node",
    "Origin",
    "Position",
    "Region",
    "Storage",
    "StorageRecord",
    "flat",
    "map_tensors",
]

_next_seq = itertools.count(1).__next__


class StorageRecord(list["Node"]):
    """The operations that write one storage, in program order. Operations are never removed.

    Attributes:
        reads_outside: whether one of them, or of those that it depends on, reads an External.
    """

    reads_outside = False


class History:
    """The record of a storage, and memory that holds one of the states in it.

    The memory is a cache: it can be dropped at any time, and any state computed again from the
    record. That ends when it escapes, as the memory of a materialized tensor: the program may write
    to the tensor, so only the materialization that made it still reads it as a state of the record.

    Fake tensors and the operations that read the storage own its history; those that write it do
    not, so that an unreachable storage frees its record and its memory at once.

    Attributes:
        record: the operations that write the storage.
        real: the memory, or None.
        version: the ``seq`` of the last operation whose effect is in ``real``; 0: none.
        escaped: an alias of the tensor as which the memory was handed out, with its version
            counter; or None.
        materialization: the identity of the :class:`.Replay` that handed it out.
    """

    __slots__ = (
        "__weakref__",
        "_view",
        "escaped",
        "materialization",
        "real",
        "record",
        "storage",
        "version",
    )

    def __init__(self, storage: Storage, record: StorageRecord) -> None:
        self.storage = storage
        self.record = record
        self.real: torch.UntypedStorage | None = None
        self.version = 0
        self.escaped: torch.Tensor | None = None
        self.materialization = 0
        self._view: tuple[Region, torch.UntypedStorage, torch.Tensor] | None = None

    def hold(self, memory: torch.UntypedStorage) -> torch.UntypedStorage:
        """Replace the memory by ``memory``, and return it."""
        self.real, self._view = memory, None
        return memory

    def cache_view(self, region: Region, tensor: torch.Tensor) -> None:
        """Replace the memory by that of ``tensor``, which is ``region`` of it."""
        self.real = tensor.untyped_storage()
        self._view = region, self.real, tensor

    def cached_view(self, region: Region) -> torch.Tensor:
        """Return ``region`` of the memory, which must be there; the caller must not reshape it."""
        assert self.real is not None
        view = self._view
        if view is not None and view[0] is region and view[1] is self.real:
            return view[2]
        tensor = region.over(self.real)
        self._view = region, self.real, tensor
        return tensor

    def holds(self, version: int, materialization: int) -> bool:
        """Return whether later operations alone lead from the memory to state ``version``."""
        if self.real is None or self.version > version:
            return False
        return self.escaped is None or (
            self.materialization == materialization and self.version == version
        )

    def is_unshared(self, materialization: int) -> bool:
        """Return whether no earlier materialization than this one has handed the memory out."""
        return self.escaped is None or self.materialization == materialization

    def is_current(self) -> bool:
        """Return whether the memory holds the last state, and was not handed out."""
        last = self.record[-1].seq if self.record else 0
        return self.real is not None and self.version == last and self.escaped is None

    def hand_out(self, tensor: torch.Tensor, materialization: int) -> None:
        """Note that the memory is now that of ``tensor``, which the program may change."""
        self.escaped = tensor.detach()
        self.materialization = materialization
        self._view = None

    def drop(self) -> None:
        """Free the memory, unless it was handed out."""
        if self.escaped is None:
            self.real, self._view, self.version = None, None, 0


class Storage:
    """Memory that a fake tensor would have: how large, where, and which operations write it.

    Attributes:
        size_bytes: what the real storage has, in bytes.
        device: where the real storage will be.
        deferred: whether operations on it are recorded; a plain fake's are not.
    """

    __slots__ = ("_history", "_record", "deferred", "device", "shadow", "size_bytes")

    def __init__(self, size_bytes: int, device: torch.device, deferred: bool) -> None:
        self.size_bytes = size_bytes
        self.device = device
        self.deferred = deferred
        self.shadow: torch.UntypedStorage | None = None
        self._history: weakref.ref[History] | None = None
        self._record: weakref.ref[StorageRecord] | None = None

    def history(self) -> History:
        """Return the operations that write it; a new empty history if nothing holds it."""
        history = None if self._history is None else self._history()
        if history is None:
            record = None if self._record is None else self._record()
            history = History(self, StorageRecord() if record is None else record)
            self._history = weakref.ref(history)
        return history

    def begin_again(self) -> History:
        """Return a history of the same record whose memory nobody else has."""
        history = self.history()
        if history.escaped is not None:
            history = History(self, history.record)
            self._history = weakref.ref(history)
        return history

    def keep_record(self, history: History) -> StorageRecord:
        """Return the record, without its memory; :meth:`history` finds it while it is held."""
        if self._record is None:
            self._record = weakref.ref(history.record)
        return history.record


class Region(NamedTuple):
    """A strided part of a storage, seen as one dtype.

    Attributes:
        conj, neg: whether its elements are the conjugates, the negatives of those in the storage.
    """

    storage: Storage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def size_bytes(self) -> int:
        """The bytes of its elements, each counted once."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow each other in memory, the last dimension fastest."""
        return _is_dense(zip(reversed(self.stride), reversed(self.size), strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether it covers every byte of its storage, in any order of dimensions."""
        covers = self.offset == 0 and self.size_bytes == self.storage.size_bytes
        return covers and self._is_dense

    @property
    def span(self) -> int:
        """The elements of the storage from its first to its last; 0 if it has none."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))

    @property
    def overlaps_itself(self) -> bool:
        """Whether several of its elements may be one in memory."""
        inner = 1
        for step, extent in sorted(zip(self.stride, self.size, strict=True)):
            if extent > 1:
                if step < inner:
                    return True
                inner += (extent - 1) * step
        return False

    def may_overlap(self, other: Region) -> bool:
        """Return whether the bytes from its first to its last element include one of ``other``'s
        range.
        """
        if self.storage is not other.storage:
            return False
        (first, stop), (others_first, others_stop) = (
            (one.offset * one.dtype.itemsize, (one.offset + one.span) * one.dtype.itemsize)
            for one in (self, other)
        )
        return first < others_stop and others_first < stop

    @property
    def is_expanded(self) -> bool:
        return any(step == 0 and n > 1 for n, step in zip(self.size, self.stride, strict=True))

    def partly_overlaps(self, other: Region) -> bool:
        """Return whether torch can tell that the two have a part in common: both are dense."""
        return self != other and self._is_dense and other._is_dense and self.may_overlap(other)

    @property
    def _is_dense(self) -> bool:
        return _is_dense(sorted(zip(self.stride, self.size, strict=True)))

    def layout(self) -> tuple[Any, ...]:
        """Return what results of operations on it depend on, beside the values."""
        storage = self.storage
        place = self.offset, storage.size_bytes, storage.device
        return self.dtype, self.size, self.stride, *place, self.conj, self.neg

    def unexpanded(self) -> Region:
        """Return it with each element once along dimensions that it is expanded to."""
        sizes = zip(self.size, self.stride, strict=True)
        return self._replace(size=tuple(n if step else min(n, 1) for n, step in sizes))

    def all_bytes(self) -> Region:
        """Return its whole storage, as bytes."""
        return Region(self.storage, torch.uint8, (self.storage.size_bytes,), (1,))

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the real tensor that is this region of ``storage``."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return self.with_bits(tensor.set_(storage, self.offset, self.size, self.stride))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the real tensor that is this region of the memory of ``tensor``."""
        with _torch.plain_torch():
            return self.over(tensor.untyped_storage())

    def with_bits(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` with this region's ``conj`` and ``neg`` bits."""
        if self.conj or self.neg:
            _torch.set_bits(tensor, self.conj, self.neg)
        return tensor

    def meta(self, alone: bool = False) -> torch.Tensor:
        """Return a meta tensor like this region; regions of one storage share a meta storage,
        unless it is to be ``alone``.
        """
        if alone or (self.offset == 0 and self.storage.shadow is None):
            plain = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
            return self.with_bits(plain)
        if self.storage.shadow is None:
            flat = torch.empty(self.storage.size_bytes, dtype=torch.uint8, device="meta")
            self.storage.shadow = flat.untyped_storage()
        tensor = torch.empty(0, dtype=self.dtype, device="meta")
        return self.with_bits(tensor.set_(self.storage.shadow, self.offset, self.size, self.stride))


def _is_dense(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Return whether ``dimensions`` (stride and size, the fastest first) leave no gaps."""
    expected = 1
    for stride, extent in dimensions:
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


class External:
    """A real tensor from outside the recording, and its version when an operation read it.

    Args:
        tensor: what is read.
        counted: the tensor that counts the changes, if it is another with the same memory.
    """

    __slots__ = ("_counted", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        self.tensor = tensor.clone() if tensor.is_inference() else tensor
        self._counted = self.tensor if counted is None else counted
        self.version = self._counted._version

    def freeze(self) -> None:
        """Copy what was read, because the program is about to write to the tensor."""
        if self._counted._version == self.version:
            self.tensor = self._counted = self.tensor.detach().clone()
            self.version = self._counted._version

    def get(self, node: Node) -> torch.Tensor:
        """Return the tensor; raise :class:`DeferredError` if it was changed in place since."""
        if self._counted._version != self.version:
            raise DeferredError(
                f"{node.func}: a real tensor of shape {tuple(self.tensor.shape)} that this "
                "operation read when it was recorded has been changed in place since, so the "
                "result would not be that of eager construction. Pass a clone of it, or "
                "materialize the module before changing it."
            )
        return self.tensor


@dataclass(slots=True, eq=False)
class Constant:
    """Values that were known when recorded (``torch.tensor([1, 2])``), in memory of the record."""

    tensor: torch.Tensor


@dataclass(slots=True, eq=False)
class Origin:
    """A generator state that is known (``state``), or will be once ``node`` has drawn from
    ``before`` on.
    """

    device: torch.device
    state: torch.Tensor | None
    before: Position | None = None
    node: Node | None = None

    def settle(self, state: torch.Tensor) -> None:
        """Note that the operation has run, and left the generator in ``state``."""
        self.state = state
        self.before = self.node = None


class Position(NamedTuple):
    """A point in a generator's sequence: ``words`` 32-bit words after ``origin``."""

    origin: Origin
    words: int = 0


@dataclass(slots=True, eq=False)
class Node:
    """One recorded operation.

    Attributes:
        seq: its place in the program; operations that are run are run in this order.
        func: the overload (``torch.ops.aten.add_.Tensor``), or an operation of :mod:`._operators`.
        args, kwargs: its arguments; tensors are Region, External or Constant.
        reads: the regions it reads, among its arguments; one that it also writes is only in
            ``writes``.
        writes: the regions it writes in place, among its arguments.
        outputs: the regions of newly allocated results, ``None`` where a result is not a tensor or
            aliases one.
        keeps: the histories of the storages it depends on, so that what it needs stays known.
        records: after :meth:`finish`, their records instead.
        position, after: where its random numbers start and end in their generator's sequence; None:
            it draws none.
        default_dtype: the default dtype at that time.
        grad: whether gradients were enabled, which some kernels of the CPU ask.
        overwrites: whether nothing of what the storage of ``writes[0]`` held before is left.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    outputs: tuple[Region | None, ...] = ()
    keeps: tuple[History, ...] = ()
    records: tuple[StorageRecord, ...] = ()
    position: Position | None = None
    after: Position | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    grad: bool = field(default_factory=torch.is_grad_enabled)
    overwrites: bool = False
    seq: int = field(default_factory=_next_seq, init=False)

    def __repr__(self) -> str:
        return f"Node({self.seq}, {self.func})"

    def link(self, reads_outside: bool = False) -> None:
        """Enter it in the histories of what it writes.

        Args:
            reads_outside: whether an argument is an External.
        """
        for kept in self.keeps:
            reads_outside = reads_outside or kept.record.reads_outside
        for region in self.targets():
            record = region.storage.history().record
            record.append(self)
            if reads_outside:
                record.reads_outside = True

    def finish(self) -> None:
        """Note that memory that it reads is kept for it no longer: only the records are."""
        if self.keeps:
            self.records = tuple(kept.storage.keep_record(kept) for kept in self.keeps)
            self.keeps = ()

    def keep_again(self) -> None:
        """Keep memory that it reads, as before :meth:`finish`."""
        kept = self.reads if len(self.targets()) == 1 else (*self.reads, *self.writes)
        self.keeps = tuple(region.storage.history() for region in kept)

    def targets(self) -> list[Region]:
        """Return the regions that it writes and makes."""
        return [region for region in (*self.writes, *self.outputs) if region is not None]


def map_tensors(value: Any, kinds: Any, function: Any) -> Any:
    """Return ``value`` with each instance of ``kinds`` in it, through lists, tuples and dicts,
    replaced by what ``function`` returns for it.
    """
    if isinstance(value, kinds):
        return function(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([
            function(item)
            if isinstance(item, kinds)
            else map_tensors(item, kinds, function)
            if type(item) in _CONTAINERS
            else item
            for item in value
        ])  # fmt: skip
    if kind is dict:
        return {key: map_tensors(item, kinds, function) for key, item in value.items()}
    return value


_CONTAINERS = {tuple, list, dict}


def flat(results: Any) -> list[Any]:
    """Return the tensors in ``results`` in order, from nested lists; None for other values."""
    if isinstance(results, (tuple, list)):
        return [item for value in results for item in flat(value)]
    return [results if isinstance(results, torch.Tensor) else None]
