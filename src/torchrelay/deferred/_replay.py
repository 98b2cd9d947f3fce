"""Execution of recorded operations, and where their results are stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred._generators import Generators
from torchrelay.deferred._graph import (
    Constant,
    External,
    History,
    Node,
    Region,
    Storage,
    flat,
    map_tensors,
)
from torchrelay.deferred._operators import describe
from torchrelay.deferred._schedule import END, Schedule
from torchrelay.errors import UnavailableError, UnsupportedError

__all__ = ["Replay"]

# Memory that may stay behind what a program has read while it was recorded.
KEPT_BYTES = 256 << 20
_LEAST_BYTES = 512  # what a small tensor costs

_next_materialization = itertools.count(1).__next__


class Replay:
    """Execution of the record, for one materialisation or for the values that one program reads.

    Args:
        device: replaces devices that this machine lacks.

    Attributes:
        materialization: identifies this object in the histories whose memory it hands out.
        generators: private generators for the random numbers.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._instead = device
        self.materialization = _next_materialization()
        self.generators = Generators(self._run_for_draw)
        self._kept: dict[Storage, int] = {}  # bytes of those with memory, used last at the end
        self._kept_bytes = 0

    def final(self, region: Region) -> torch.Tensor:
        """Return ``region`` in its last state, for good: its memory can be handed out."""
        storage = region.storage
        history = storage.history()
        if history.escaped is None:
            schedule = Schedule([(storage, END)], materialization=self.materialization)
            _Run(self, schedule, keep=True).all()
            for node in schedule.nodes:
                node.finish()
        if history.real is None:  # nothing was ever written
            history.hold(self.empty(storage))
        return history.cached_view(region)

    def read(self, region: Region) -> torch.Tensor:
        """Return the values of ``region`` now, for a program that is being recorded. Read only.

        What was computed for them stays for the next read, up to a limit, until :meth:`forget`.
        """
        history = region.storage.history()
        if history.is_current():
            self._note_kept([region.storage])
            return history.cached_view(region)
        return self.values(region, keep=True)

    @property
    def has_read(self) -> bool:
        """Whether memory is left from what the program has read."""
        return bool(self._kept)

    def keep(self, node: Node, history: History, region: Region, result: torch.Tensor) -> None:
        """Note that ``node``, whose one effect is ``region``, a new storage, has been run as soon
        as it was recorded, with ``result``.
        """
        history.cache_view(region, _laid_out(node, region, result))
        history.version = node.seq
        self._note_kept([region.storage])

    def _note_kept(self, storages: Iterable[Storage]) -> None:
        """Note that ``storages`` keep memory, which was just used and can be computed again."""
        for storage in storages:
            self._kept_bytes -= self._kept.pop(storage, 0)
            self._kept[storage] = max(storage.size_bytes, _LEAST_BYTES)
            self._kept_bytes += self._kept[storage]
        if self._kept_bytes > KEPT_BYTES:
            self.forget(KEPT_BYTES // 2)

    def forget(self, limit_bytes: int = 0) -> None:
        """Free what :meth:`read` has left, what was used longest ago first, until no more than
        ``limit_bytes`` are left.
        """
        for storage in [one for one in self._kept if one.history().real is None]:
            self._kept_bytes -= self._kept.pop(storage)
        while self._kept_bytes > limit_bytes:
            storage = next(iter(self._kept))
            storage.history().drop()
            self._kept_bytes -= self._kept.pop(storage)

    def values(self, region: Region, before: int = END, *, keep: bool = False) -> torch.Tensor:
        """Return the values of ``region`` before place ``before`` in the program. Read only.

        Args:
            keep: what is computed for them stays, as for :meth:`read`; if not, all is done in
                scratch memory.
        """
        history = region.storage.history()
        if before == END and history.escaped is not None and history.real is not None:
            return region.over(history.real)
        schedule = Schedule([(region.storage, before)], materialization=self.materialization)
        run = _Run(self, schedule, keep)
        with _torch.plain_torch():
            run.all()
            if keep:
                self._note_kept(run.kept)
            return region.over(run.memory(region.storage))

    def empty(self, storage: Storage) -> torch.UntypedStorage:
        """Return uninitialized memory for ``storage``."""
        where = self.place(storage.device)
        return torch.empty(storage.size_bytes, dtype=torch.uint8, device=where).untyped_storage()

    def place(self, device: torch.device) -> torch.device:
        """Return the device for what was recorded for ``device``.

        Raises:
            UnavailableError: it is not on this machine, and no other was given.
        """
        if device.type == "cpu" or _torch.device_available(device):
            return device
        if self._instead is None:
            raise UnavailableError(
                f"The tensors were recorded on {device}, which this machine does not have. "
                "Materialize on a machine that has it, or give materialize_module(..., "
                "device='cpu')."
            )
        return self._instead

    def _run_for_draw(self, node: Node) -> None:
        if describe(node.func).fills and not node.reads:
            node = _without_target(node)
        schedule = Schedule(nodes=[node], materialization=self.materialization)
        with _torch.plain_torch():
            _Run(self, schedule, keep=False).all()


_ARGUMENTS = (Region, External, Constant)


def _without_target(node: Node) -> Node:
    """Return the same draw into memory of its own, which the generator does not depend on."""
    [old] = node.writes
    extent = 1 + sum((n - 1) * step for n, step in zip(old.size, old.stride, strict=True))
    storage = Storage(max(0, extent) * old.dtype.itemsize, old.storage.device, deferred=True)
    new = Region(storage, old.dtype, old.size, old.stride)
    args = map_tensors(node.args, Region, lambda region: new if region is old else region)
    return replace(node, args=args, writes=(new,))


class _Run:
    """One walk through a schedule.

    Args:
        keep: results stay with their storages. If not, all is done in scratch memory, and memory
            that exists is left alone.

    Attributes:
        kept: the storages that keep their memory.
    """

    def __init__(self, replay: Replay, schedule: Schedule, keep: bool) -> None:
        self._replay = replay
        self._schedule = schedule
        self._keep = keep
        self._scratch: dict[Storage, torch.UntypedStorage] = {}
        self._versions: dict[Storage, int] = {}  # of scratch memory
        # The storages, those that are needed longest first: memory is freed as early as possible.
        self._ends = sorted(schedule.last_uses, key=schedule.last_uses.__getitem__, reverse=True)
        self.kept: set[Storage] = set()

    def all(self) -> None:
        """Run every operation."""
        schedule = self._schedule
        for node in schedule.nodes:
            self._run(node)
            while self._ends and schedule.last_uses[self._ends[-1]] <= node.seq:
                self._release(self._ends.pop())
        for storage in list(self._scratch):
            self._settle(storage)

    def memory(self, storage: Storage) -> torch.UntypedStorage:
        """Return the memory of ``storage`` in the state that the run has reached, to be read."""
        found = self._scratch.get(storage)
        if found is None and storage not in self._schedule.recompute:
            found = storage.history().real
        return self._writable(storage) if found is None else found

    def _real(self, region: Region) -> torch.Tensor:
        storage = region.storage
        if storage not in self._scratch and storage not in self._schedule.recompute:
            history = storage.history()
            if history.real is not None:
                return history.cached_view(region)
        return region.over(self.memory(storage))

    def _writable(self, storage: Storage) -> torch.UntypedStorage:
        found = self._scratch.get(storage)
        if found is not None:
            return found
        history = storage.history()
        recompute = storage in self._schedule.recompute
        if self._keep and not recompute:
            if history.real is None:
                return history.hold(self._replay.empty(storage))
            return history.real
        fresh = recompute or history.real is None
        self._scratch[storage] = self._replay.empty(storage) if fresh else history.real.clone()  # type: ignore
        return self._scratch[storage]

    def _release(self, storage: Storage) -> None:
        """Free scratch memory of ``storage``, which no later operation needs."""
        self._settle(storage)
        self._scratch.pop(storage, None)
        del self._schedule.histories[storage]

    def _settle(self, storage: Storage) -> None:
        """Make scratch memory the storage's own, if it holds a later state."""
        history = storage.history()
        if self._keep and storage in self._scratch and history.escaped is None:
            version = self._versions.get(storage, 0)
            if version >= history.version:
                history.hold(self._scratch.pop(storage))
                history.version = version
                self._schedule.recompute.discard(storage)

    def _run(self, node: Node) -> None:
        # First, because finding the generator's state may run other operations.
        generator = None if node.position is None else self._replay.generators.at(node.position)
        for region in node.writes:
            self._writable(region.storage)

        try:
            self._note(node, self._call(node, generator))
        except BaseException:
            self._spoil(node)
            raise

    def _call(self, node: Node, generator: torch.Generator | None) -> Any:
        """Call the operation of ``node``; draw from ``generator``."""

        def real(value: Region | External | Constant) -> torch.Tensor:
            if type(value) is Region:
                return self._real(value)
            return value.tensor.clone() if type(value) is Constant else value.get(node)  # type: ignore[union-attr]

        args, kwargs = map_tensors((node.args, node.kwargs), _ARGUMENTS, real)
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = self._replay.place(kwargs["device"])
        with _torch.recorded_modes(node.default_dtype, node.grad):
            if generator is None:
                return node.func(*args, **kwargs)
            return self._draw(node, args, kwargs, generator)

    def _draw(self, node: Node, args: Any, kwargs: Any, generator: torch.Generator) -> Any:
        assert node.after is not None
        func = describe(node.func).with_generator
        if func is not None:
            result = func(*args, **{**kwargs, "generator": generator})
        else:
            with _torch.default_generator_as(generator):
                result = node.func(*args, **kwargs)
        self._replay.generators.drawn(generator.device, node.after)
        return result

    def _note(self, node: Node, result: Any) -> None:
        """Enter the results of ``node``, which was just run."""
        for region in node.writes:
            self._reached(region.storage, node.seq)
        if node.outputs:
            for output, value in zip(node.outputs, flat(result), strict=True):
                if output is not None and value is not None:
                    self._bind(node, output, value)

    def _reached(self, storage: Storage, version: int) -> None:
        if storage in self._scratch:
            self._versions[storage] = version
        else:
            storage.history().version = version
            self.kept.add(storage)

    def _bind(self, node: Node, region: Region, value: torch.Tensor) -> None:
        """Make the new tensor ``value`` the memory of ``region``'s storage, if that is wanted."""
        storage, version = region.storage, node.seq
        history = storage.history()
        asked = storage in self._schedule.last_uses
        recompute = storage in self._schedule.recompute
        there = history.real is not None and history.version >= version and not recompute
        if there or not (asked or self._keep):
            return
        if not asked and value.shape != region.size:
            return  # workspace of a kernel, of which only its own backward pass knows the size
        laid_out = _laid_out(node, region, value)
        if self._keep and not recompute:
            history.cache_view(region, laid_out)
        else:
            self._scratch[storage] = laid_out.untyped_storage()
        self._reached(storage, version)

    def _spoil(self, node: Node) -> None:
        """Drop the memory that ``node`` was writing when it failed."""
        for region in node.writes:
            if self._scratch.pop(region.storage, None) is None and self._keep:
                region.storage.history().drop()


def _laid_out(node: Node, region: Region, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with the strides, and in memory of the size, that were recorded."""
    if (value.shape, value.dtype) != (region.size, region.dtype):
        raise UnsupportedError(
            f"{node.func} was recorded with a result of shape {region.size} and {region.dtype}, as "
            f"torch's meta kernel said, and gives {tuple(value.shape)} and {value.dtype}. Call it "
            "outside deferred_init."
        )
    same = (value.stride(), value.storage_offset()) == (region.stride, region.offset)
    if same and value.untyped_storage().nbytes() == region.storage.size_bytes:
        return value
    laid_out = torch.empty_strided(
        region.size, region.stride, dtype=value.dtype, device=value.device
    )
    return laid_out.copy_(value)
