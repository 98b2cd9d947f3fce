"""Execution of recorded operations, and where their results are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, count
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

_next_materialization = count(1).__next__


class Replay:
    """Execution of the record, for one materialisation or for the values that one program reads.

    Args:
        pretend: whether the CPU replaces devices that this machine lacks.

    Attributes:
        materialization: identifies this object in the histories whose memory it hands out.
        generators: private generators for the random numbers.
    """

    def __init__(self, pretend: bool = False) -> None:
        self._pretend = pretend
        self.materialization = _next_materialization()
        self.generators = Generators(self._run_for_draw)
        self._kept: dict[Storage, int] = {}  # bytes of those with memory, used last at the end
        self._kept_bytes = 0

    def final(self, region: Region, history: History) -> torch.Tensor:
        """Return ``region`` in its last state, for good: its memory can be handed out."""
        storage = region.storage
        if history.escaped is None:
            schedule = Schedule([(storage, END)], materialization=self.materialization)
            for node in _Run(self, schedule, keep=True).nodes():
                node.finish()  # now, so that intermediate results are freed
            for node in chain.from_iterable(schedule.records):
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
            keep: what is computed for them stays, as for :meth:`read`.
        """
        history = region.storage.history()
        if before == END and history.escaped is not None and history.real is not None:
            return region.over(history.real)
        schedule = Schedule([(region.storage, before)], materialization=self.materialization)
        run = _Run(self, schedule, keep)
        with _torch.plain_torch():
            for _ in run.nodes():
                pass
            values = run.result(region)
        if keep:
            self._note_kept(run.made)
        return values

    def empty(self, storage: Storage) -> torch.UntypedStorage:
        """Return uninitialized memory for ``storage``."""
        where = self.place(storage.device)
        return torch.empty(storage.size_bytes, dtype=torch.uint8, device=where).untyped_storage()

    def place(self, device: torch.device) -> torch.device:
        """Return the device for what was recorded for ``device``.

        Raises:
            UnavailableError: it is not on this machine, and the CPU does not replace it.
        """
        if device.type == "cpu" or _torch.device_available(device):
            return device
        if not self._pretend:
            raise UnavailableError(
                f"The tensors were recorded on {device}, which this machine does not have. "
                "Materialize on a machine that has it, or give materialize_module(..., "
                "device='cpu')."
            )
        return torch.device("cpu")

    def _run_for_draw(self, node: Node) -> None:
        if describe(node.func).fills and not node.reads:
            node = _without_target(node)
        # This may be in the middle of another run, whose memory is not touched.
        schedule = Schedule(nodes=[node], cached=False)
        # What was recorded for an absent device is drawn on the CPU.
        replay = Replay(pretend=True)
        replay.generators = self.generators
        with _torch.plain_torch():
            for _ in _Run(replay, schedule, keep=False).nodes():
                pass


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
        keep: results stay with their storages. If not, they are dropped after their last use.

    Attributes:
        made: the storages that got memory.
    """

    def __init__(self, replay: Replay, schedule: Schedule, keep: bool) -> None:
        self._replay = replay
        self._schedule = schedule
        self._keep = keep
        # The storages, those that are needed longest first: memory is freed as early as possible.
        self._ends = sorted(schedule.last_uses, key=schedule.last_uses.__getitem__, reverse=True)
        self.made: set[Storage] = set()

    def nodes(self) -> Iterator[Node]:
        """Run every operation, and yield it."""
        schedule = self._schedule
        for node in schedule.nodes:
            self._run(node)
            yield node
            while self._ends and schedule.last_uses[self._ends[-1]] <= node.seq:
                self._release(self._ends.pop())

    def result(self, region: Region) -> torch.Tensor:
        """Return ``region`` in the state that the run has reached, after which it is over."""
        tensor = region.over(self._memory(region.storage))
        for storage in self._ends:
            self._release(storage)
        return tensor

    def _memory(self, storage: Storage) -> torch.UntypedStorage:
        """Return the memory in which the run computes ``storage``."""
        history = self._schedule.history(storage)
        if history.real is not None:
            return history.real
        self.made.add(storage)
        return history.hold(self._replay.empty(storage))

    def _release(self, storage: Storage) -> None:
        """Free memory of ``storage``, which no later operation needs."""
        history = self._schedule.histories.pop(storage)
        if not self._keep and storage in self.made:
            history.drop()

    def _run(self, node: Node) -> None:
        # First, because finding the generator's state may run other operations.
        generator = None if node.position is None else self._replay.generators.at(node.position)
        for region in node.writes:
            self._memory(region.storage)
        written = [self._schedule.history(region.storage) for region in node.writes]
        try:
            result = self._call(node, generator)
            for history in written:
                history.version = node.seq
            values = flat(result) if node.outputs else ()
            for output, value in zip(node.outputs, values, strict=True):
                if output is not None and value is not None:
                    self._bind(node, output, value)
        except BaseException:
            for history in written:
                history.drop()
            raise

    def _call(self, node: Node, generator: torch.Generator | None) -> Any:
        """Call the operation of ``node``; draw from ``generator``."""

        def real(value: Region | External | Constant) -> torch.Tensor:
            if type(value) is Region:
                self._memory(value.storage)
                return self._schedule.history(value.storage).cached_view(value)
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

    def _bind(self, node: Node, region: Region, value: torch.Tensor) -> None:
        """Make the new tensor ``value`` the memory of ``region``'s storage, if that is wanted."""
        storage = region.storage
        asked = storage in self._schedule.last_uses
        history = self._schedule.history(storage) if asked else storage.history()
        there = history.real is not None and history.version >= node.seq
        if there or not (asked or self._keep):
            return
        if not asked and value.shape != region.size:
            return  # workspace of a kernel, of which only its own backward pass knows the size
        history.cache_view(region, _laid_out(node, region, value))
        history.version = node.seq
        self.made.add(storage)


def _laid_out(node: Node, region: Region, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with the strides, and in memory of the size, that were recorded."""
    if (value.shape, value.dtype) != (region.size, region.dtype):
        raise UnsupportedError(
            f"{node.func} was recorded with a result of shape {region.size} and {region.dtype}, by "
            f"torch's meta kernel, but returned {tuple(value.shape)} and {value.dtype}. Call it "
            "outside deferred_init."
        )
    same = (value.stride(), value.storage_offset()) == (region.stride, region.offset)
    if same and value.untyped_storage().nbytes() == region.storage.size_bytes:
        return value
    laid_out = torch.empty_strided(
        region.size, region.stride, dtype=value.dtype, device=value.device
    )
    return laid_out.copy_(value)
