"""Placement and eviction of the groups of models in an arena. Touches no memory.

Models stay until their bytes are needed. Space is then taken from the contiguous run of unpinned
groups whose loss costs least: lowest priority first, then least recently used, then fewest bytes. A
model that lost some of its groups keeps the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchrelay.errors import CapacityError
from torchrelay.switching.device._contract import ALIGNMENT_BYTES, align

__all__ = ["Arena", "ArenaBlock", "Placement"]


@dataclass(frozen=True)
class ArenaBlock:
    """A run of bytes: free if `model` is empty, else one group of a model."""

    offset_bytes: int
    size_bytes: int
    model: str = ""
    group: int = 0

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


class Placement(NamedTuple):
    """Offsets of a model's groups, which of them hold no data yet, and what was evicted for
    them.
    """

    offsets: tuple[int, ...]
    missing: tuple[int, ...]
    evicted: tuple[tuple[str, int], ...] = ()


@dataclass
class _Tenant:
    """The state of one model in the arena."""

    blocks: dict[int, ArenaBlock] = field(default_factory=dict)  # by group
    offsets: tuple[int, ...] = ()  # of the blocks, if there is one for each group
    ready: set[int] = field(default_factory=set)
    pins: int = 0
    is_kept: bool = False  # by one of the pins
    priority: int = 0
    last_used: int = 0


class Arena:
    """Allocates `size_bytes` to groups of models, in granules. Not thread-safe: one thread owns
    it.
    """

    def __init__(self, size_bytes: int, granule_bytes: int = ALIGNMENT_BYTES) -> None:
        self.size_bytes = size_bytes // granule_bytes * granule_bytes
        self.granule_bytes = granule_bytes
        self.dropped: list[tuple[str, int]] = []  # groups that lost their bytes, for the caller
        self._tenants: dict[str, _Tenant] = {}
        self._clock = 0

    def blocks(self) -> list[ArenaBlock]:
        """Return all blocks, free ones included, by offset."""
        return self._tiled(
            block for tenant in self._tenants.values() for block in tenant.blocks.values()
        )

    def is_resident(self, model: str, groups: int) -> bool:
        """Return whether all `groups` groups of `model` hold their data."""
        tenant = self._tenants.get(model)
        return tenant is not None and len(tenant.ready) == groups

    def is_pinned(self, model: str) -> bool:
        tenant = self._tenants.get(model)
        return tenant is not None and tenant.pins > 0

    def reserve(self, model: str, sizes: Sequence[int], *, priority: int = 0) -> Placement | None:
        """Place every group of `model`, evicting others where needed, and pin the model.

        Each call is matched by a :meth:`release`. Returns None, with nothing changed, if pinned
        models leave no run of bytes large enough: try again after a release.

        Raises:
            CapacityError: the model is larger than the arena.
        """
        tenant, evicted = self._tenants.get(model) or _Tenant(), list[ArenaBlock]()
        if len(tenant.blocks) < len(sizes):
            sizes = [align(size_bytes, self.granule_bytes) for size_bytes in sizes]
            if sum(sizes) > self.size_bytes:
                raise CapacityError(
                    f"model {model!r} takes {sum(sizes)} bytes, the arena has {self.size_bytes}; "
                    "start the server with a larger arena"
                )
            blocks = self.blocks()
            placed = self._place(model, sizes, blocks)
            if placed is None and tenant.pins == 0:
                # What stays may lie so that the rest finds no run. One free run is enough for any
                # order of groups.
                pinned = (one for one in blocks if one.model and self._tenants[one.model].pins)
                placed = self._place(model, sizes, self._tiled(pinned))
            if placed is None:
                return None
            kept = set(placed)
            evicted = [block for block in blocks if block.model and block not in kept]
            for block in evicted:
                self._drop(block.model, block.group)
            tenant.blocks = {block.group: block for block in placed if block.model == model}
            tenant.offsets = tuple(tenant.blocks[one].offset_bytes for one in range(len(sizes)))
            self._tenants[model] = tenant
        tenant.pins += 1
        tenant.priority = priority
        self._touch(tenant)
        missing: tuple[int, ...] = ()
        if len(tenant.ready) < len(sizes):
            missing = tuple(one for one in range(len(sizes)) if one not in tenant.ready)
        return Placement(tenant.offsets, missing, tuple((one.model, one.group) for one in evicted))

    def mark_ready(self, model: str, group: int) -> None:
        """Record that the group's bytes hold its data."""
        self._tenants[model].ready.add(group)

    def release(self, model: str) -> None:
        """Undo one pin. A model that is unpinned with groups that were never filled loses those."""
        tenant = self._tenants[model]
        tenant.pins -= 1
        self._touch(tenant)
        if tenant.pins == 0:
            for group in tenant.blocks.keys() - tenant.ready:
                self._drop(model, group)

    def is_kept(self, model: str) -> bool:
        tenant = self._tenants.get(model)
        return tenant is not None and tenant.is_kept

    def keep(self, model: str, size_bytes: int) -> bool:
        """Give `model`, which is one group, a place where it stays pinned until :meth:`unkeep`,
        beside others that stay, so that what is left is one run of bytes.

        Returns False, with nothing changed, if a pinned model is in the way: try again after a
        release.
        """
        size_bytes = align(size_bytes, self.granule_bytes)
        kept = (
            block
            for tenant in self._tenants.values()
            for block in tenant.blocks.values()
            if tenant.is_kept
        )
        start = next(
            one.offset_bytes
            for one in self._tiled(kept)
            if not one.model and one.size_bytes >= size_bytes
        )
        place = ArenaBlock(start, size_bytes, model)
        hit = [
            one
            for one in self.blocks()
            if one.model == model
            or (one.model and one.offset_bytes < place.end_bytes and one.end_bytes > start)
        ]
        if any(self._tenants[one.model].pins for one in hit):
            return False
        if hit != [place]:
            for one in hit:
                self._drop(one.model, one.group)
            self._tenants[model] = _Tenant({0: place}, (start,))
        tenant = self._tenants[model]
        tenant.pins, tenant.is_kept = 1, True
        self._touch(tenant)
        return True

    def unkeep(self) -> None:
        """Let no model stay. Those that are to are kept again, side by side."""
        for name in [name for name, tenant in self._tenants.items() if tenant.is_kept]:
            self._tenants[name].is_kept = False
            self.release(name)

    def evict(self, model: str) -> None:
        """Free every group of `model`, which is not pinned, if it has any."""
        tenant = self._tenants.pop(model, None)
        if tenant is not None:
            self.dropped += [(model, group) for group in tenant.blocks]

    def _touch(self, tenant: _Tenant) -> None:
        self._clock += 1
        tenant.last_used = self._clock

    def _drop(self, model: str, group: int) -> None:
        tenant = self._tenants[model]
        del tenant.blocks[group]
        tenant.ready.discard(group)
        self.dropped.append((model, group))
        if not tenant.blocks and not tenant.pins:
            del self._tenants[model]

    def _tiled(self, blocks: Iterable[ArenaBlock]) -> list[ArenaBlock]:
        """Return `blocks` by offset, with a free one for each gap between them."""
        tiled: list[ArenaBlock] = []
        start = 0
        used = sorted((one for one in blocks if one.size_bytes), key=lambda one: one.offset_bytes)
        for block in [*used, ArenaBlock(self.size_bytes, 0)]:
            if block.offset_bytes > start:
                tiled.append(ArenaBlock(start, block.offset_bytes - start))
            if block.size_bytes:
                tiled.append(block)
            start = block.end_bytes
        return tiled

    def _place(
        self, model: str, sizes: Sequence[int], blocks: list[ArenaBlock]
    ) -> list[ArenaBlock] | None:
        """Return `blocks` with those groups of `model` that they lack, empty groups included."""
        kept = {block.group for block in blocks if block.model == model}
        empty = [ArenaBlock(0, 0, model, group) for group, size in enumerate(sizes) if not size]
        # Large groups first: small ones fit what is left.
        lacking = {group for group, size in enumerate(sizes) if size} - kept
        for group in sorted(lacking, key=lambda one: -sizes[one]):
            window = self._cheapest_window(blocks, model, sizes[group])
            if window is None:
                return None
            start, end = window
            new = ArenaBlock(blocks[start].offset_bytes, sizes[group], model, group)
            blocks = self._tiled(
                block for block in [*blocks[:start], new, *blocks[end:]] if block.model
            )
        return [*blocks, *empty]

    def _cheapest_window(
        self, blocks: list[ArenaBlock], model: str, size_bytes: int
    ) -> tuple[int, int] | None:
        """Return the run of blocks [start, end) of at least `size_bytes` whose eviction costs
        least.
        """
        found: list[tuple[int, ...]] = []  # priority, last use, bytes lost, bytes, start, end
        for start in range(len(blocks)):
            total = lost = 0
            worst = (-(1 << 62), 0)
            for end, block in enumerate(blocks[start:], start + 1):
                if block.model:
                    tenant = self._tenants.get(block.model)
                    if tenant is None or block.model == model or tenant.pins:
                        break
                    worst = max(worst, (tenant.priority, tenant.last_used))
                    lost += block.size_bytes
                total += block.size_bytes
                if total >= size_bytes:
                    found.append((*worst, lost, total, start, end))
                    break
        return min(found)[4:] if found else None  # type: ignore[return-value]
