"""The state dict that an optimizer gets from a checkpoint, made without a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from torchrelay.checkpoint._state import SUBCLASS, flatten, insert, key_of, leaf_path
from torchrelay.checkpoint._tensors import is_waiting
from torchrelay.checkpoint._types import Manifest
from torchrelay.errors import DeferredError, MismatchError, UnsupportedError

__all__ = ["fitted", "may_lack"]

# "state" or "param_groups", the number of a parameter or group, a name; or an entry of "state" that
# is not of a parameter.
Entry = tuple[Any, ...]

# Options of groups that schedulers add, and those of named parameters.
_ADDED = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "base_momentum",
    "max_momentum",
    "param_names",
}


def fitted(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], manifest: Manifest, start: str
) -> dict[str, Any]:
    """Return the state dict to load into ``optimizer``: with the entries that the checkpoint has.

    Entries that are in ``state``, the optimizer's own, are reused; others are created, with
    uninitialised tensors sharded as their parameters. Options of a group that the
    checkpoint lacks stay; the state of a parameter that it lacks is left out, as for parameters
    that never had a gradient.

    Args:
        start: what the keys of the optimizer begin with in the checkpoint.

    Raises:
        DeferredError: the state is to be made for a deferred parameter.
        MismatchError: the checkpoint is of an optimizer with other groups or parameters.
        UnsupportedError: the state is to be made of a tensor subclass.
    """
    parameters = _parameters(optimizer, manifest, start)
    groups = [dict(group) for group in state["param_groups"]]
    result: dict[str, Any] = {**state, "state": {}, "param_groups": groups}
    for entry, leaves in _entries(manifest, start).items():
        _check_place(optimizer, entry, parameters, start)
        known, name = _container(state, entry), entry[-1]
        known = {name: known[name]} if name in known else {}
        if not _fits(known, leaves, manifest):
            known = {}
            parameter = parameters.get(entry[1]) if entry[0] == "state" else None
            for key, path in leaves.items():
                insert(known, path, _blank(key, manifest, parameter))
        _container(result, entry)[name] = known[name]
    return result


def _container(state: dict[str, Any], entry: Entry) -> Any:
    section, *place, _ = entry
    here = state[section]
    for step in place:
        here = here[step] if isinstance(here, list) else here.setdefault(step, {})
    return here


def _check_place(
    optimizer: torch.optim.Optimizer, entry: Entry, parameters: Mapping[Any, Any], start: str
) -> None:
    section, place = entry[:2]
    here, what = (
        (range(len(optimizer.param_groups)), "groups of parameters")
        if section == "param_groups"
        else (parameters, "parameters")
    )
    if type(place) is int and place not in here:
        raise MismatchError(
            f"{start}{section}.{place}: the checkpoint has it, and this "
            f"{type(optimizer).__name__} has {len(here)} {what}"
        )


def may_lack(optimizer: torch.optim.Optimizer, key: str, manifest: Manifest, start: str) -> bool:
    """Return whether a complete checkpoint of ``optimizer`` may lack ``key``: an option of a group
    that a scheduler or a newer torch has added, as the checkpoint is of the same kind of optimizer.
    """
    section, _, rest = key.removeprefix(start).partition(".")
    index, _, name = rest.partition(".")
    if section != "param_groups" or not index.isdigit():
        return False
    group = f"{start}param_groups.{index}."
    saved = {
        one.removeprefix(group).partition(".")[0]
        for one in (*manifest.objects, *manifest.tensors)
        if one.startswith(group)
    }
    others = saved - optimizer.param_groups[int(index)].keys() - _ADDED
    return "params" in saved and (name not in optimizer.defaults or not others)


def _parameters(
    optimizer: torch.optim.Optimizer, manifest: Manifest, start: str
) -> dict[int, torch.Tensor]:
    """Return the parameters by their numbers in the checkpoint."""
    found: dict[int, torch.Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        key = f"{start}param_groups.{index}.params"
        numbers = manifest.objects.get(key)
        if numbers is None:  # reported as missing
            continue
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise MismatchError(
                f"{key}: the checkpoint names parameters instead of numbering them; load it into "
                "what torch.distributed.checkpoint.state_dict.get_state_dict() returns"
            )
        if len(numbers) != len(group["params"]):
            raise MismatchError(
                f"{key}: the group has {len(numbers)} parameters in the checkpoint and "
                f"{len(group['params'])} here"
            )
        found.update(zip(numbers, group["params"], strict=True))
    return found


def _entries(manifest: Manifest, start: str) -> dict[Entry, dict[str, tuple[Any, ...]]]:
    """Return the entries of the checkpoint, with the keys of each and their paths from its name."""
    found: dict[Entry, dict[str, tuple[Any, ...]]] = defaultdict(dict)
    for key in dict.fromkeys((*manifest.paths, *manifest.objects, *manifest.tensors)):
        if key.startswith((f"{start}state.", f"{start}param_groups.")):
            section, place, *path = _path(manifest, key, start)
            if str(place).isdigit():
                place = int(place)
            if path:
                found[section, place, path[0]][key] = tuple(path)
            elif section == "state":
                found[section, place][key] = (place,)
    return found


def _path(manifest: Manifest, key: str, start: str) -> tuple[Any, ...]:
    """Return the path of a key, from the optimizer on."""
    path = leaf_path(manifest.paths.get(key, ()))
    for count in range(len(path)):
        if key_of(path[:count]) == start.removesuffix("."):
            return path[count:]
    return tuple(key.removeprefix(start).split("."))


def _fits(known: dict[Any, Any], leaves: Mapping[str, tuple[Any, ...]], manifest: Manifest) -> bool:
    """Return whether an entry has the leaves that the checkpoint has of it."""
    here = {key: isinstance(leaf.value, torch.Tensor) for key, leaf in flatten(known).items()}
    return here == {key_of(path): key in manifest.tensors for key, path in leaves.items()}


def _blank(key: str, manifest: Manifest, parameter: torch.Tensor | None) -> Any:
    """Return what a leaf of the checkpoint is read into; None for values, which replace it."""
    if key.endswith(f".{SUBCLASS}"):
        raise UnsupportedError(
            f"{key}: the checkpoint has a tensor subclass in the state of an optimizer; make the "
            "state before load(), by a step"
        )
    entry = manifest.tensors.get(key)
    if entry is None:
        return None
    if parameter is not None and is_waiting(parameter):
        raise DeferredError(
            f"{key}: the parameter of the optimizer is deferred; load the module first, then make "
            "and load the optimizer"
        )
    dtype: torch.dtype = getattr(torch, entry.dtype.name)
    if parameter is None or not entry.shape:
        return torch.empty(entry.shape, dtype=dtype)  # load_state_dict() moves it to its device
    with torch.no_grad():
        if entry.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return parameter.new_empty(entry.shape, dtype=dtype)
