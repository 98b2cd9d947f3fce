"""Placement and eviction of the groups of models in an arena. Touches no memory.

Models stay until their bytes are needed. Space is then taken from the contiguous run of unpinned
groups whose loss costs least: lowest priority first, then least recently used, then fewest bytes. A
model that lost some of its groups keeps the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchrelay.errors import ArgumentError, CapacityError
from torchrelay.switching._contract import align

__all__ = ["Arena", "Block", "Placement"]


@dataclass(frozen=True)
class Block:
    """A run of bytes: free if `model` is empty, else one group of a model."""

    offset_bytes: int
    size_bytes: int
    model: str = ""
    group: int = 0

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True)
class Placement:
    """Offsets of a model's groups, which of them hold no data yet, and what was evicted for
    them.
    """

    offsets: tuple[int, ...]
    missing: tuple[int, ...]
    evicted: tuple[tuple[str, int], ...] = ()


@dataclass
class _Tenant:
    """The state of one model in the arena."""

    offsets: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    pins: int = 0
    priority: int = 0
    last_used: int = 0


class Arena:
    """Allocates `size_bytes` to groups of models. Not thread-safe: one thread owns it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // align(1) * align(1)
        self._blocks = [Block(0, self.size_bytes)]
        self._tenants: dict[str, _Tenant] = {}
        self._clock = 0

    def blocks(self) -> tuple[Block, ...]:
        """Return all blocks, free ones included, by offset."""
        return tuple(self._blocks)

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
        sizes = [align(size_bytes) for size_bytes in sizes]
        if sum(sizes) > self.size_bytes:
            raise CapacityError(
                f"model {model!r} takes {sum(sizes)} bytes, the arena has {self.size_bytes}; "
                "start the server with a larger arena"
            )
        tenant = self._tenants.get(model, _Tenant())
        attempt = self._place(model, sizes, tenant.offsets, self._blocks)
        if attempt is None and tenant.pins == 0:
            # What stays may lie so that the rest finds no run. One free run is enough for any order
            # of groups.
            attempt = self._place(model, sizes, {}, self._unpinned_freed())
        if attempt is None:
            return None
        blocks, offsets = attempt
        evicted: list[tuple[str, int]] = []
        if blocks is not self._blocks:  # some groups were not in place
            kept = {(block.model, block.group) for block in blocks}
            evicted = [
                (block.model, block.group)
                for block in self._blocks
                if block.model and (block.model, block.group) not in kept
            ]
        self._blocks = blocks
        for other, group in evicted:
            self._drop(other, group)
        tenant.ready = {
            group for group in tenant.ready if tenant.offsets.get(group) == offsets[group]
        }
        tenant.offsets = dict(enumerate(offsets))
        tenant.pins += 1
        tenant.priority = priority
        self._touch(tenant)
        self._tenants[model] = tenant
        missing = tuple(group for group in range(len(sizes)) if group not in tenant.ready)
        return Placement(tuple(offsets), missing, tuple(evicted))

    def mark_ready(self, model: str, group: int) -> None:
        """Record that the group's bytes hold its data."""
        self._tenants[model].ready.add(group)

    def release(self, model: str) -> None:
        """Undo one pin. A model that is unpinned with groups that were never filled loses those.

        Raises:
            ArgumentError: the model is not pinned.
        """
        tenant = self._tenants.get(model)
        if tenant is None or tenant.pins == 0:
            raise ArgumentError(f"model {model!r} is not pinned")
        tenant.pins -= 1
        self._touch(tenant)
        if tenant.pins == 0:
            for group in set(tenant.offsets) - tenant.ready:
                self._free(model, group)

    def evict(self, model: str) -> None:
        """Free every group of `model`, if it has any.

        Raises:
            ArgumentError: the model is pinned.
        """
        if self.is_pinned(model):
            raise ArgumentError(f"model {model!r} is in use and cannot be evicted")
        for group in list(self._tenants.get(model, _Tenant()).offsets):
            self._free(model, group)
        self._tenants.pop(model, None)

    def _touch(self, tenant: _Tenant) -> None:
        self._clock += 1
        tenant.last_used = self._clock

    def _drop(self, model: str, group: int) -> None:
        tenant = self._tenants[model]
        del tenant.offsets[group]
        tenant.ready.discard(group)
        if not tenant.offsets and not tenant.pins:
            del self._tenants[model]

    def _free(self, model: str, group: int) -> None:
        self._blocks = _merged(
            Block(block.offset_bytes, block.size_bytes)
            if (block.model, block.group) == (model, group)
            else block
            for block in self._blocks
        )
        self._drop(model, group)

    def _unpinned_freed(self) -> list[Block]:
        return _merged(
            block
            if block.model and self._tenants[block.model].pins
            else Block(block.offset_bytes, block.size_bytes)
            for block in self._blocks
        )

    def _place(
        self, model: str, sizes: Sequence[int], kept: dict[int, int], blocks: list[Block]
    ) -> tuple[list[Block], list[int]] | None:
        """Return `blocks` with the groups of `model` that are not `kept`, and all its groups'
        offsets.
        """
        offsets = dict(kept)
        # Large groups first: small ones fit what is left.
        for group in sorted(set(range(len(sizes))) - set(kept), key=lambda one: -sizes[one]):
            if sizes[group] == 0:
                offsets[group] = 0
                continue
            window = self._cheapest_window(blocks, model, sizes[group])
            if window is None:
                return None
            start, end = window
            first, last = blocks[start], blocks[end - 1]
            new = Block(first.offset_bytes, sizes[group], model, group)
            rest = Block(new.end_bytes, last.end_bytes - new.end_bytes)
            blocks = _merged(
                [*blocks[:start], new, *([rest] if rest.size_bytes else []), *blocks[end:]]
            )
            offsets[group] = new.offset_bytes
        return blocks, [offsets[group] for group in range(len(sizes))]

    def _cheapest_window(
        self, blocks: list[Block], model: str, size_bytes: int
    ) -> tuple[int, int] | None:
        """Return the run of blocks [start, end) of at least `size_bytes` whose eviction costs
        least.
        """
        best: tuple[int, int] | None = None
        best_cost: tuple[int, int, int, int] | None = None
        for start in range(len(blocks)):
            total = lost = 0
            worst = (-(1 << 62), 0)
            for end in range(start, len(blocks)):
                block = blocks[end]
                if block.model:
                    if block.model == model or self._tenants[block.model].pins:
                        break
                    tenant = self._tenants[block.model]
                    worst = max(worst, (tenant.priority, tenant.last_used))
                    lost += block.size_bytes
                total += block.size_bytes
                if total >= size_bytes:
                    cost = (*worst, lost, total)
                    if best_cost is None or cost < best_cost:
                        best, best_cost = (start, end + 1), cost
                    break
        return best


def _merged(blocks: Sequence[Block] | Iterator[Block]) -> list[Block]:
    """Return `blocks` with neighbouring free ones joined."""
    merged: list[Block] = []
    for block in blocks:
        if merged and not block.model and not merged[-1].model:
            merged[-1] = Block(merged[-1].offset_bytes, merged[-1].size_bytes + block.size_bytes)
        else:
            merged.append(block)
    return merged
