"""The stateful objects of a state: what they have now, and what they are given by a load.

An object is given its state by its own ``load_state_dict``, as after ``torch.load``. Where all the
code on that way is torch's, the tensors of its state dict are filled in place before: torch then
copies them to themselves, which costs nothing. Code of others may use the old values beside the
new ones, or refuse the new ones, so what goes through it is read into memory of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.checkpoint._state import (
    ORDINARY,
    Index,
    Leaf,
    flatten,
    insert,
    is_nested,
    is_stateful,
    key_of,
    state_dict_of,
)
from torchrelay.checkpoint._subclasses import SUBCLASS, joined
from torchrelay.checkpoint._tensors import is_waiting
from torchrelay.checkpoint._types import TensorEntry
from torchrelay.deferred import is_deferred
from torchrelay.errors import ArgumentError, DeferredError

__all__ = ["ModulePart", "OptimizerPart", "Part", "parts_of_state"]

Path = tuple[Any, ...]
_TRUSTED = ("torch.", "torchrelay.parameters.")  # modules whose loading may be filled in place
_EXTRA = "_extra_state"  # ends the name of a module's own value, which may have any form


def _is_trusted(*functions: Any) -> bool:
    return all(str(getattr(one, "__module__", None)).startswith(_TRUSTED) for one in functions)


class Part:
    """A stateful object of the state; without an owner, the rest of it.

    Attributes:
        start: what its keys begin with in the checkpoint.
        state, leaves: what it has now.
        paths: of what it is given, in the order of the checkpoint.
        taken: the names of the tensors that are read, by path.
        values: the other values, by path.
        memory: what tensors are read into that do not go into those of the state.
        waiting: the names of deferred tensors that are read.
    """

    def __init__(self, start: str, owner: Any = None, state: Any = None) -> None:
        self.owner = owner
        self.start = start
        self.own_code = () if owner is None else self._own_code()
        self.state = state
        if owner is not None:
            self.state = state_dict_of(start.removesuffix("."), owner, self._state_now)
        self.leaves: dict[str, Leaf] = {} if owner is None else flatten(self.state)
        self.paths: list[Path] = []
        self.taken: dict[Path, str] = {}
        self.values: dict[Path, Any] = {}
        self.memory: dict[str, torch.Tensor] = {}
        self.waiting: list[str] = []

    @property
    def label(self) -> str:
        return f"{type(self.owner).__name__} {self.start.removesuffix('.')!r}"

    def _own_code(self) -> tuple[str, ...]:
        """Return the beginnings of the names that go through code of the owner's own."""
        functions = (self.owner.state_dict, self.owner.load_state_dict)
        return () if _is_trusted(*functions) else ("",)

    def _state_now(self) -> Any:
        return self.owner.state_dict()

    def is_own(self, name: str) -> bool:
        """Return whether a name goes through code of the owner's own."""
        return name.startswith(self.own_code)

    def is_free(self, name: str) -> bool:
        """Return whether only the owner can say which form the value of a name may have."""
        return True

    def path(self, path: Path) -> Path:
        """Return the path of a leaf as the owner wants it."""
        return path

    def parameter(self, path: Path) -> torch.Tensor | None:
        """Return the parameter that a leaf belongs to, of an optimizer."""
        return None

    def tensor(self, name: str) -> torch.Tensor:
        """Return what a tensor is read into."""
        found: torch.Tensor = self.memory[name] if name in self.memory else self.leaves[name].value
        return found

    def buffer(self, name: str, key: str, entry: TensorEntry, path: Path) -> torch.Tensor:
        """Return what a tensor of the checkpoint is read into, made if the owner has none."""
        fresh = self.leaves[name].value if name in self.leaves else None
        dtype: torch.dtype = getattr(torch, entry.dtype.name)
        if isinstance(fresh, torch.Tensor):
            if (tuple(fresh.shape), fresh.dtype) != (entry.shape, dtype):
                self.memory[name] = torch.empty(entry.shape, dtype=dtype, device=fresh.device)
            elif self.is_own(name):
                self.memory[name] = _blank(fresh)
        else:
            like = self.parameter(path)
            self.memory[name] = _blank_of(key, entry.shape, dtype, like, ".@" in name)
        return self.tensor(name)

    def renew(self) -> None:
        """Read the owner's state again, because its tensors are materialised now."""
        self.state = self._state_now()
        self.leaves = flatten(self.state)
        for name in filter(self.is_own, self.waiting):
            self.memory[name] = _blank(self.leaves[name].value)

    def given(self, *, strict: bool, lacking: set[str], is_foreign: bool) -> Any:
        """Return the state to give to the owner. ``lacking`` are the leaves that the checkpoint
        lacks.
        """
        tree: dict[Any, Any] = {}
        for path in self.paths:
            is_tensor = path in self.taken
            insert(tree, path, self.tensor(self.taken[path]) if is_tensor else self.values[path])
        return self._completed(self._shaped(tree, self.state, is_foreign), strict, lacking)

    def _completed(self, given: Any, strict: bool, lacking: set[str]) -> Any:
        """Add what the owner has and the checkpoint lacks."""
        for name, value in self.state.items():
            given.setdefault(name, value)
        return given

    def _shaped(self, tree: Any, fresh: Any, is_foreign: bool, path: Path = ()) -> Any:
        """Return ``tree`` with the types of containers and tensors that the owner has there."""
        if is_foreign and isinstance(fresh, Mapping) and isinstance(tree, list):
            tree = dict(enumerate(tree))  # DCP stores keys that are integers as indices
        if isinstance(tree, dict):
            shaped = {
                name: self._shaped(tree[name], _member(fresh, name), is_foreign, (*path, name))
                for name in tree
            }
            if SUBCLASS in tree:
                wrapper = fresh if isinstance(fresh, torch.Tensor) else None
                key = f"{self.start}{key_of(path)}"
                return joined(key, shaped, wrapper, self.parameter(path))
            return _like(shaped, fresh)
        if isinstance(tree, list) and any(isinstance(one, torch.Tensor | dict) for one in tree):
            items = [
                self._shaped(item, _member(fresh, index), is_foreign, (*path, Index(index)))
                for index, item in enumerate(tree)
            ]
            if isinstance(fresh, tuple) and is_nested(fresh):  # else it is stored as one value
                made = getattr(fresh, "_make", type(fresh))
                return made(items) if len(items) == len(fresh) else tuple(items)
            return items
        return tree

    def hand_over(self, given: Any, *, strict: bool) -> Any:
        """Call the owner's ``load_state_dict``; return what it returns."""
        return self.owner.load_state_dict(given)


class ModulePart(Part):
    """A module."""

    def _own_code(self) -> tuple[str, ...]:
        if super()._own_code():
            return ("",)
        return tuple(
            f"{name}." if name else ""
            for name, module in self.owner.named_modules(remove_duplicate=False)
            if not _is_trusted(
                module._load_from_state_dict,
                module._save_to_state_dict,
                *module._load_state_dict_pre_hooks.values(),
                *module._state_dict_hooks.values(),
            )
        )

    def _state_now(self) -> Any:
        if is_deferred(self.owner) and _takes(self.owner.state_dict, "keep_vars"):
            return self.owner.state_dict(keep_vars=True)
        with torch.no_grad():
            return self.owner.state_dict()

    @property
    def is_plain(self) -> bool:
        """Return whether torch's loading would only copy the filled tensors to themselves, for
        which it takes a time that grows with the square of the number of modules.
        """
        base = torch.nn.Module
        return not self.own_code and not any(
            module._load_state_dict_pre_hooks
            or module._load_state_dict_post_hooks
            or module._state_dict_hooks
            or module._state_dict_pre_hooks
            or type(module).get_extra_state is not base.get_extra_state
            or type(module)._save_to_state_dict is not base._save_to_state_dict
            or not module._load_from_state_dict.__module__.startswith("torch.nn.modules.")
            for module in self.owner.modules()
        )

    def is_free(self, name: str) -> bool:
        return self.is_own(name) or name.rpartition(".")[2] == _EXTRA

    def _completed(self, given: Any, strict: bool, lacking: set[str]) -> Any:
        state = copy.copy(self.state)  # with the versions of its modules
        for name in [*state]:
            # What is lacking with ``strict`` was initialised, or is another name of a tied tensor.
            is_judged_by_owner = self.is_free(name) and not _is_empty(state[name])
            if name in given or is_judged_by_owner or (not strict and name in lacking):
                del state[name]
        state.update(given)
        return state

    def hand_over(self, given: Any, *, strict: bool) -> Any:
        load = self.owner.load_state_dict
        return load(given) if strict or not _takes(load, "strict") else load(given, strict=False)


class OptimizerPart(Part):
    """An optimizer, whose state and groups are numbered."""

    def __init__(self, start: str, owner: Any) -> None:
        super().__init__(start, owner)
        self.parameters: dict[int, torch.Tensor] = {}  # by their numbers in the checkpoint

    def _own_code(self) -> tuple[str, ...]:
        owner = self.owner
        hooks = (
            *owner._optimizer_load_state_dict_pre_hooks.values(),
            *owner._optimizer_state_dict_post_hooks.values(),
        )
        return super()._own_code() if _is_trusted(owner.__setstate__, *hooks) else ("",)

    def path(self, path: Path) -> Path:
        section, *rest = path
        if len(rest) == 1 and section in ("state", "param_groups") and isinstance(rest[0], str):
            rest = rest[0].split(".")  # the checkpoint has keys only
        if rest and str(rest[0]).isdigit() and section in ("state", "param_groups"):
            rest[0] = int(rest[0]) if section == "state" else Index(rest[0])
        return (section, *rest)

    def parameter(self, path: Path) -> torch.Tensor | None:
        number = next((step for step in path[1:] if isinstance(step, int)), None)
        return None if number is None or path[0] == "param_groups" else self.parameters.get(number)

    def _completed(self, given: Any, strict: bool, lacking: set[str]) -> Any:
        saved = given.get("param_groups", [])
        groups = [
            {**group, **(saved[index] if index < len(saved) else {})}
            for index, group in enumerate(self.state["param_groups"])
        ]
        given = {**given, "state": given.get("state", {}), "param_groups": groups}
        return super()._completed(given, strict, lacking)


def parts_of_state(state: Any, prefix: str) -> list[Part]:
    """Return the stateful objects at any depth of a state, and the rest of it.

    Raises:
        ArgumentError: it is no state.
    """
    if is_stateful(state):
        return [_part(prefix, state)]
    if not isinstance(state, MutableMapping):
        raise ArgumentError(
            f"a state is a dictionary, a module or has state_dict(); got {type(state).__name__}"
        )
    parts, rest = [], Part(prefix, state=state)
    for key, leaf in flatten(state).items():
        if is_stateful(leaf.value):
            parts.append(_part(f"{prefix}{key_of(leaf.path)}.", leaf.value))
        else:
            rest.leaves[key] = leaf
    return [*parts, rest]


def _part(start: str, owner: Any) -> Part:
    if isinstance(owner, torch.nn.Module):
        return ModulePart(start, owner)
    if isinstance(owner, torch.optim.Optimizer):
        made = OptimizerPart(start, owner)
        sections = made.state.get("state"), made.state.get("param_groups")
        if isinstance(sections[0], dict) and isinstance(sections[1], list):
            return made
    return Part(start, owner)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a keyword argument."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


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
    if like is None or not shape:
        return torch.empty(shape, dtype=dtype, device="cpu")  # load_state_dict() moves it
    with torch.no_grad():
        if shape == tuple(like.shape) and not is_part:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=like.device)


def _member(container: Any, name: Any) -> Any:
    """Return what a container of the owner has under a name, if it has it."""
    if isinstance(container, Mapping):
        return container.get(name)
    if isinstance(container, list | tuple):
        return container[name] if isinstance(name, int) and name < len(container) else None
    if isinstance(container, torch.Tensor) and isinstance(name, str):
        is_block = name.startswith("@")
        return container._local_tensor if is_block else getattr(container, name, None)  # type: ignore[attr-defined]
    return None


def _like(items: dict[Any, Any], fresh: Any) -> Any:
    """Return a dictionary of the type that the owner has."""
    if not isinstance(fresh, MutableMapping) or type(fresh) is dict:
        return items
    made = copy.copy(fresh)
    made.clear()
    made.update(items)
    return made


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and not value
