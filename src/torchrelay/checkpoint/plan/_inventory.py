"""What each rank contributes to a save, whether the ranks agree on it, and who writes what.

A chunk that several ranks hold (its *holders*) is written by one of them. Every holder has the same
list of chunks that the same holders share, so each deals the list out for itself and all come to
the same result: nothing is gathered, and the work is linear in the rank's own chunks.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple, TypeVar

import torch

from torchrelay.checkpoint._tasks import no_collection
from torchrelay.checkpoint._types import StatePath
from torchrelay.checkpoint.engine._group import Group
from torchrelay.checkpoint.format._values import encode
from torchrelay.checkpoint.plan._plan import Description, Plan, PlannedChunk, StateLayout, deal
from torchrelay.checkpoint.state._state import ORDINARY, Index, Leaf, flatten
from torchrelay.checkpoint.state._subclasses import Subclass
from torchrelay.checkpoint.state._tensors import TensorLayout, check_memory, memory_of, tensor_state
from torchrelay.errors import MismatchError

__all__ = ["Inventory", "Planner", "encoded"]

T = TypeVar("T")


class Inventory(NamedTuple):
    """A rank's part of a state: the layouts of its tensors, the blocks of all tensors one after
    another, and the description of the state.
    """

    layouts: Mapping[str, TensorLayout]
    blocks: Sequence[torch.Tensor]
    description: Description


class _Known(NamedTuple):
    """The state that was saved last; one of the same layout has the same layout object."""

    signature: Any
    layouts: Mapping[str, TensorLayout]
    blank: Mapping[str, str]  # owners of tensors of which nothing is here
    layout: StateLayout


class _Planned(NamedTuple):
    """What this rank wrote last, and what it was planned for."""

    layout: StateLayout
    ranks: tuple[int, ...]
    rank: int
    plan: Plan


class Planner:
    """Finds what a rank's state consists of, and what the rank writes of it. A state of the same
    layout as the last one is not planned again; threads that save at once use either's.
    """

    def __init__(self) -> None:
        self._known = _Known(None, {}, {}, StateLayout({}, {}))
        self._planned: _Planned | None = None

    def begin(
        self,
        state: Any,
        begin: Callable[[], T],
        ranks: Group,
        before: Callable[[], None] = lambda: None,
    ) -> tuple[T, Inventory, list[Description]]:
        """Call ``begin`` on the coordinator, once the ranks agree on the state.

        An error on one rank is raised on all. ``before`` is called first, in the same round of
        messages.

        Returns:
            what ``begin`` returned, such as the id of the save, this rank's inventory and, in the
            group's order, the descriptions of all ranks; one description if it is equal on all.

        Raises:
            MismatchError: two ranks have different values, dtypes, shapes or layouts under one key.
            ArgumentError, DeferredError, UnsupportedError: a value or tensor that cannot be stored.
            TorchRelayError: as ``begin``.
        """
        found: list[Inventory] = []

        def take() -> bytes:
            before()
            found.append(self._take_inventory(state))
            return found[0].description.fingerprint() if ranks.size > 1 else b""

        begun = ranks.conclude(take, lambda prints: begin() if len({*prints}) == 1 else None)
        (mine,) = found
        if begun is not None:
            return begun, mine, [mine.description]
        descriptions = ranks.together(lambda: mine.description)
        seen: dict[str, tuple[int, Any]] = {}
        for rank, description in zip(ranks.ranks, descriptions, strict=True):
            tensors = description.layout.tensors
            comparable = {key: what[:3] for key, what in tensors.items()}  # all but the mesh
            for key, what in [*comparable.items(), *description.objects.items()]:
                other, known = seen.setdefault(key, (rank, what))
                if known != what:
                    raise MismatchError(
                        f"{key}: rank {other} has {_shown(known)}, rank {rank} has {_shown(what)}; "
                        "values that differ need keys that differ, such as one with the rank in it"
                    )
        return ranks.coordinate(begin), mine, descriptions

    @no_collection()
    def _take_inventory(self, state: Any) -> Inventory:
        """Return the tensors and values of a state.

        Raises:
            ArgumentError: a value that a checkpoint cannot hold.
            DeferredError: a tensor without values.
            UnsupportedError: a tensor that it cannot hold.
        """
        known = self._known
        leaves = flatten(state, expand=True)
        tensors = {
            key: leaf.value for key, leaf in leaves.items() if isinstance(leaf.value, torch.Tensor)
        }
        objects = {
            key: encoded(key, leaf)
            for key, leaf in leaves.items()
            if key not in tensors and not leaf.is_empty
        }
        paths = _stored_paths(leaves)
        signature, blocks, addresses = _blocks_of(tensors)
        layouts, blank, layout = known[1:]
        if signature != known.signature:
            layouts = {key: tensor_state(key, tensor).layout for key, tensor in tensors.items()}
            blank = {
                key: ""
                for key, found in layouts.items()
                if not any(block.size_bytes for block in found.blocks)
            }
        owners = {**_ties(layouts, blocks, addresses), **blank}
        if layouts is not known.layouts or (paths, owners) != (layout.paths, layout.owners):
            described = {key: found.described for key, found in layouts.items()}
            layout = StateLayout(described, paths, owners)
            self._known = _Known(signature, layouts, blank, layout)
        return Inventory(layouts, blocks, Description(layout, objects))

    @no_collection()
    def plan(self, mine: Inventory, descriptions: Sequence[Description], ranks: Group) -> Plan:
        """Return what this rank writes; for a state of the same layout as the last one, the same
        object.
        """
        layout, planned = mine.description.layout, self._planned
        place, are_equal = (ranks.ranks, ranks.rank), len(descriptions) == 1
        if are_equal and planned and planned.layout is layout and planned[1:3] == place:
            return planned.plan
        sizes = (len(found.blocks) for found in mine.layouts.values())
        firsts = dict(zip(mine.layouts, accumulate(sizes, initial=0), strict=False))
        layouts = [description.layout for description in descriptions]
        held: list[tuple[PlannedChunk, tuple[int, ...]]] = []
        for keys in _tied_everywhere(layout, layouts):
            dtype, described, blocks = mine.layouts[keys[0]]
            for index, (box, replicas, size_bytes) in enumerate(blocks, firsts[keys[0]]):
                if size_bytes:
                    chunk = PlannedChunk(keys, dtype, described.shape, box, size_bytes, index)
                    held.append((chunk, _holders(keys[0], replicas, layouts, ranks)))
        plan = Plan.of(deal(held, ranks.global_rank), layouts if ranks.is_coordinator else ())
        self._planned = _Planned(layout, *place, plan) if are_equal else None
        return plan


def _blocks_of(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[Any, Sequence[torch.Tensor], Sequence[int]]:
    """Return a value that is equal for tensors of the same layouts, and the tensors' blocks with
    their addresses, 0 for empty ones.
    """
    values = [*tensors.values()]
    is_ordinary = {*map(type, values)} <= {*ORDINARY} and not any(v.is_nested for v in values)
    if is_ordinary and {v.layout for v in values} <= {torch.strided}:
        addresses = [*map(torch.Tensor.data_ptr, values)]
        if not all(addresses):
            for key, value in tensors.items():
                check_memory(key, value)
        return ([*tensors], [v.dtype for v in values], [v.shape for v in values]), values, addresses
    layouts: dict[str, TensorLayout] = {}
    blocks: list[torch.Tensor] = []
    for key, value in tensors.items():
        layouts[key], found = tensor_state(key, value)
        for block in found:
            check_memory(key, block)
        blocks += found
    addresses = [block.data_ptr() if block.numel() else 0 for block in blocks]
    return [*layouts.items()], blocks, addresses


def _stored_paths(leaves: Mapping[str, Leaf]) -> dict[str, StatePath]:
    paths = {key: leaf.path for key, leaf in leaves.items()}
    if {*map(type, chain.from_iterable(paths.values()))} <= {str}:
        return paths
    return {key: tuple(_path_item(key, item) for item in path) for key, path in paths.items()}


def encoded(key: str, leaf: Leaf) -> Any:
    """Return the value of a leaf as JSON."""
    value = leaf.value
    return value.encoded(key) if isinstance(value, Subclass) else encode(key, value)


def _path_item(key: str, item: Any) -> str | int | tuple[Any]:
    if isinstance(item, Index):
        return item.stored()
    return item if type(item) is str else (encode(f"{key}: a key", item),)


def _ties(
    layouts: Mapping[str, TensorLayout], blocks: Sequence[torch.Tensor], addresses: Sequence[int]
) -> dict[str, str]:
    """Return, for each tensor that is the same in memory as earlier ones, the key of the first."""
    live = [*filter(None, addresses)]
    if len({*live}) == len(live):
        return {}
    shared = Counter(live)
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    left = iter(zip(blocks, addresses, strict=True))
    for key, layout in layouts.items():
        mine = [*islice(left, len(layout.blocks))]
        if mine and shared[mine[0][1]] > 1:
            memory = tuple(memory_of(block) for block, _ in mine)
            owner = first.setdefault((layout, memory), key) if all(memory) else key
            if owner != key:
                tied[key] = owner
    return tied


def _shown(what: Any) -> str:
    if isinstance(what, tuple):
        dtype, shape, layout = what
        return f"a {dtype} tensor of shape {list(shape)} ({layout})"
    text = json.dumps(what)
    return text if len(text) < 80 else f"{text[:77]}..."


def _tied_everywhere(mine: StateLayout, layouts: Sequence[StateLayout]) -> list[tuple[str, ...]]:
    """Return this rank's keys in groups; those of a group are one tensor on every rank.

    Their order is the same on all ranks.
    """
    together: dict[Any, list[str]] = defaultdict(list)
    if len(layouts) == 1:
        for key in mine.tensors:
            together[mine.owners.get(key) or key].append(key)
    else:
        for key in {key: None for layout in layouts for key in layout.tensors}:
            if key in mine.tensors:
                owned = tuple(layout.owner(key) for layout in layouts)
                together[owned, None if any(owned) else key].append(key)
    return [*map(tuple, together.values())]


def _holders(
    key: str, replicas: tuple[int, ...] | None, layouts: Sequence[StateLayout], ranks: Group
) -> tuple[int, ...]:
    """Return the ranks of the group that have the same block, ascending."""
    if replicas == () or ranks.size == 1:
        return (ranks.global_rank,)
    each = layouts if len(layouts) > 1 else [layouts[0]] * ranks.size
    having = {
        rank: layout.tensors[key]
        for rank, layout in zip(ranks.ranks, each, strict=True)
        if key in layout.tensors
    }
    if replicas is None:
        return tuple(sorted(having))
    # Meshes of other ranks hold the same blocks in the same places.
    meshes = {described.mesh for described in having.values()}
    found = {mesh[position] for mesh in meshes for position in replicas}
    return tuple(sorted(found & having.keys()))
