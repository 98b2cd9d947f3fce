"""What a load gives to one stateful object: which tensors are read into which memory, the other
values, and the state that they make up.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchrelay import _torch
from torchrelay.checkpoint._types import CONTAINER, METADATA, TensorEntry
from torchrelay.checkpoint.state._metadata import noted
from torchrelay.checkpoint.state._parts import Part, Path
from torchrelay.checkpoint.state._state import (
    ORDINARY,
    Index,
    TupleItems,
    insert,
    is_nested,
    key_of,
    like,
)
from torchrelay.checkpoint.state._subclasses import SUBCLASS, joined
from torchrelay.checkpoint.state._tensors import is_waiting
from torchrelay.errors import DeferredError

__all__ = ["PartPlan", "member"]


@dataclass(eq=False)
class PartPlan:
    """What a part is given.

    Attributes:
        parameters: of an optimizer, by their numbers in the checkpoint.
        paths: of what it is given, in the order of the checkpoint.
        taken: the names of the tensors that are read, by path.
        values: the other values, by path.
        memory: what tensors are read into that do not go into those of the state.
        waiting: the names of deferred tensors that are read.
    """

    part: Part
    parameters: Mapping[int, torch.Tensor] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    taken: dict[Path, str] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)

    def parameter(self, path: Path) -> torch.Tensor | None:
        """Return the parameter that a leaf belongs to, of an optimizer."""
        number = next((step for step in path[1:] if isinstance(step, int)), None)
        return None if number is None or path[0] == "param_groups" else self.parameters.get(number)

    def tensor(self, name: str) -> torch.Tensor:
        """Return what a tensor is read into."""
        found: torch.Tensor = (
            self.memory[name] if name in self.memory else self.part.leaves[name].value
        )
        return found

    def buffer(self, name: str, key: str, entry: TensorEntry, path: Path) -> torch.Tensor:
        """Return what a tensor of the checkpoint is read into, made if the owner has none."""
        fresh = self.part.leaves[name].value if name in self.part.leaves else None
        dtype: torch.dtype = getattr(torch, entry.dtype.name)
        if isinstance(fresh, torch.Tensor):
            is_other = is_lazy(fresh) or (tuple(fresh.shape), fresh.dtype) != (entry.shape, dtype)
            if is_other:
                self.memory[name] = torch.empty(entry.shape, dtype=dtype, device=fresh.device)
            elif self.part.is_own(name):
                self.memory[name] = _blank(fresh)
        else:
            like = self.parameter(path)
            self.memory[name] = _blank_of(key, entry.shape, dtype, like, ".@" in name)
        return self.tensor(name)

    def renew(self) -> None:
        """Read the owner's state again, because its tensors are materialised now."""
        self.part = self.part.renewed()
        for name in filter(self.part.is_own, self.waiting):
            self.memory[name] = _blank(self.part.leaves[name].value)

    def given(self, *, left_out: Container[str], is_foreign: bool) -> Any:
        """Return the state to give to the owner, without the leaves ``left_out``."""
        tree: dict[Any, Any] = {}
        for path in self.paths:
            is_tensor = path in self.taken
            insert(tree, path, self.tensor(self.taken[path]) if is_tensor else self.values[path])
        return self.part.completed(self._shaped(tree, self.part.state, is_foreign), left_out)

    def _shaped(self, tree: Any, fresh: Any, is_foreign: bool, path: Path = ()) -> Any:
        """Return ``tree`` with the types of containers and tensors that the owner has there."""
        if is_foreign and isinstance(fresh, Mapping) and isinstance(tree, list):
            tree = dict(enumerate(tree))  # DCP stores keys that are integers as indices
        if isinstance(tree, dict):
            shaped = {
                name: self._shaped(tree[name], member(fresh, name), is_foreign, (*path, name))
                for name in tree
                if name not in (METADATA, CONTAINER)
            }
            if SUBCLASS in tree:
                wrapper = fresh if isinstance(fresh, torch.Tensor) else None
                key = f"{self.part.start}{key_of(path)}"
                return joined(key, shaped, wrapper, self.parameter(path))
            kind = tree[CONTAINER].empty() if CONTAINER in tree else None
            made = like(shaped, fresh if kind is None else kind)
            return noted(made, tree[METADATA]) if METADATA in tree else made
        if isinstance(tree, TupleItems) or (
            isinstance(tree, list)
            and any(isinstance(one, torch.Tensor | dict | list) for one in tree)
        ):
            items = [
                self._shaped(item, member(fresh, index), is_foreign, (*path, Index(index)))
                for index, item in enumerate(tree)
            ]
            made = TupleItems(items).finished() if isinstance(tree, TupleItems) else items
            # A tuple that is not nested is stored as one value.
            if type(made) in (tuple, list) and isinstance(fresh, tuple) and is_nested(fresh):
                make = getattr(fresh, "_make", type(fresh))
                return make(made) if len(made) == len(fresh) else tuple(made)
            return made
        return tree


def _blank(tensor: Any) -> torch.Tensor:
    """Return new memory of the kind of ``tensor``; itself, if only its class can make some."""
    kind = _torch.sharding_of(tensor)
    if kind == "dtensor":
        local = _blank(tensor._local_tensor)
        return _torch.dtensor_of(local, tensor, tensor.shape, tensor.stride())
    if kind == "shards":
        return tensor  # type: ignore[no-any-return]
    tensor = tensor.detach()
    if type(tensor) not in ORDINARY:
        tensor = tensor.as_subclass(torch.Tensor)
    return torch.empty_like(tensor)


def _blank_of(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor | None, is_part: bool
) -> torch.Tensor:
    """Return memory for a tensor that the owner does not have yet.

    Args:
        like: the parameter that the tensor belongs to: one of its shape is sharded as it is.
        is_part: whether the tensor is of one rank's part of ``like``.

    Raises:
        DeferredError: the parameter is deferred.
    """
    if like is not None and is_waiting(like):
        raise DeferredError(
            f"{key}: the parameter of the optimizer is deferred; load the module first, then make "
            "and load the optimizer"
        )
    if like is None or not shape or is_lazy(like):
        return torch.empty(shape, dtype=dtype, device="cpu")  # load_state_dict() moves it
    with torch.no_grad():
        if shape == tuple(like.shape) and not is_part:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=like.device)


def member(container: Any, name: Any) -> Any:
    """Return what a container of the owner has under a name, if it has it."""
    if isinstance(container, Mapping):
        return container.get(name)
    if isinstance(container, list | tuple):
        return container[name] if isinstance(name, int) and name < len(container) else None
    if isinstance(container, torch.Tensor) and isinstance(name, str):
        is_block = name.startswith("@")
        return container._local_tensor if is_block else getattr(container, name, None)  # type: ignore[attr-defined]
    return None
