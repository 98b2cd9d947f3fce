"""The stateful objects of a state: what they have now, and what they are given by a load.

An object is given its state by its own ``load_state_dict``, as after ``torch.load``. Where all the
code on that way is torch's, the tensors of its state dict are filled in place before: torch then
copies them to themselves, which costs nothing. Code of others may use the old values beside the
new ones, or refuse the new ones, so what goes through it is read into memory of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from torchrelay.checkpoint.state._metadata import noted, restored
from torchrelay.checkpoint.state._state import (
    Index,
    Leaf,
    flatten,
    is_stateful,
    key_of,
    state_dict_of,
)
from torchrelay.deferred import is_deferred
from torchrelay.errors import ArgumentError

__all__ = ["ModulePart", "OptimizerPart", "Part", "is_empty", "parts_of_state"]

Path = tuple[Any, ...]
_TRUSTED = ("torch.", "torchrelay.parameters.")  # modules whose loading may be filled in place
# But those that take other shapes and names than their own: observers, old weight norms, lazy ones.
_CONVERTING = ("torch.ao.", "torch.nn.utils.", "torch.nn.modules.lazy")
_EXTRA = "_extra_state"  # ends the name of a module's own value, which may have any form


def _is_trusted(*functions: Any) -> bool:
    names = [str(getattr(one, "__module__", None)) for one in functions]
    return all(name.startswith(_TRUSTED) and not name.startswith(_CONVERTING) for name in names)


class Part:
    """A stateful object of the state; without an owner, the rest of it. Never changed.

    Attributes:
        start: what its keys begin with in the checkpoint.
        own_code: the beginnings of the names that go through code of the owner's own.
        state, leaves: what it has now.
    """

    def __init__(
        self,
        start: str,
        owner: Any = None,
        state: Any = None,
        leaves: Mapping[str, Leaf] = MappingProxyType({}),
    ) -> None:
        self.owner, self.start = owner, start
        if owner is None:
            self.own_code: tuple[str, ...] = ()
            self.state, self.leaves = state, leaves
        else:
            self.own_code = self._own_code()
            self.state = state_dict_of(start.removesuffix("."), owner, self._state_now)
            self.leaves = flatten(self.state)

    def renewed(self) -> Part:
        """Return the part anew, because tensors of the owner are materialised now."""
        return type(self)(self.start, self.owner)

    @property
    def label(self) -> str:
        return f"{type(self.owner).__name__} {self.start.removesuffix('.')!r}"

    def _own_code(self) -> tuple[str, ...]:
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

    def completed(self, given: Any, left_out: Container[str]) -> Any:
        """Add what the owner has and the checkpoint lacks, but for the names ``left_out``."""
        for name, value in self.state.items():
            given.setdefault(name, value)
        return given

    def hand_over(self, given: Any, *, strict: bool) -> Any:
        """Call the owner's ``load_state_dict``; return what it returns."""
        return self.owner.load_state_dict(given)


class ModulePart(Part):
    """A module.

    Attributes:
        metadata: the versions of its modules in the checkpoint; None if it does not have them.
    """

    metadata: Mapping[str, Any] | None = None

    def saved_with(self, metadata: Mapping[str, Any] | None, names: Sequence[str]) -> ModulePart:
        """Return the part for a checkpoint with these versions of its modules and these ``names``:
        modules of another version now convert what they are given.
        """
        if metadata is None:
            return self
        made, saved = copy.copy(self), restored(metadata, names)
        made.metadata = metadata
        made.own_code += tuple(
            f"{name}." if name else ""
            for name, local in getattr(self.state, "_metadata", {}).items()
            if saved.get(name, local) != local
        )
        return made

    def renewed(self) -> Part:
        made = ModulePart(self.start, self.owner)
        made.metadata, made.own_code = self.metadata, self.own_code
        return made

    @cached_property
    def may_accept(self) -> bool:
        """Return whether a hook of others may accept that keys are missing or unexpected."""
        return not all(
            _is_trusted(hook)
            for module in self.owner.modules()
            for hook in module._load_state_dict_post_hooks.values()
        )

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

    def completed(self, given: Any, left_out: Container[str]) -> Any:
        state = copy.copy(self.state)  # with the versions of its modules
        for name in [*state]:
            is_judged_by_owner = self.is_free(name) and not is_empty(state[name])
            if name in given or is_judged_by_owner or name in left_out:
                del state[name]
        state.update(given)
        return state if self.metadata is None else noted(state, self.metadata)

    def hand_over(self, given: Any, *, strict: bool) -> Any:
        load = self.owner.load_state_dict
        return load(given) if strict or not _takes(load, "strict") else load(given, strict=False)


class OptimizerPart(Part):
    """An optimizer, whose state and groups are numbered."""

    def _own_code(self) -> tuple[str, ...]:
        owner = self.owner
        hooks: list[Any] = []
        for name in ("_optimizer_load_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"):
            hooks += getattr(owner, name, {}).values()  # accelerate's, which wraps one, has none
        return super()._own_code() if _is_trusted(owner.__setstate__, *hooks) else ("",)

    def path(self, path: Path) -> Path:
        section, *rest = path
        if len(rest) == 1 and section in ("state", "param_groups") and isinstance(rest[0], str):
            rest = rest[0].split(".")  # the checkpoint has keys only
        if rest and str(rest[0]).isdigit() and section in ("state", "param_groups"):
            rest[0] = int(rest[0]) if section == "state" else Index(rest[0])
        return (section, *rest)

    def completed(self, given: Any, left_out: Container[str]) -> Any:
        saved = given.get("param_groups", [])
        groups = [
            {**group, **(saved[index] if index < len(saved) else {})}
            for index, group in enumerate(self.state["param_groups"])
        ]
        given = {**given, "state": given.get("state", {}), "param_groups": groups}
        return super().completed(given, left_out)


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
    parts: list[Part] = []
    leaves: dict[str, Leaf] = {}
    for key, leaf in flatten(state).items():
        if is_stateful(leaf.value):
            parts.append(_part(f"{prefix}{key_of(leaf.path)}.", leaf.value))
        else:
            leaves[key] = leaf
    return [*parts, Part(prefix, state=state, leaves=leaves)]


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


def is_empty(value: Any) -> bool:
    """Return whether a value is a container without items."""
    return isinstance(value, Mapping | list | tuple) and not value
