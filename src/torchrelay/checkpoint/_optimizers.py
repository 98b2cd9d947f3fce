"""The state dict that an optimizer gets from a checkpoint, made without a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchrelay.checkpoint._state import SUBCLASS, Index, flatten, insert, key_of, leaf_path
from torchrelay.checkpoint._tensors import is_waiting
from torchrelay.checkpoint._types import Manifest
from torchrelay.errors import DeferredError, MismatchError, UnsupportedError

__all__ = ["fitted", "may_lack"]

# "state" or "param_groups", the number of a parameter or group, a name, and what leads on from
# there; or an entry of "state" that is not of a parameter.
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

    Tensors that are in ``state``, the optimizer's own, are reused; others are created,
    uninitialised and sharded as their parameters. Options of a group that the checkpoint lacks
    stay; the state of a parameter that it lacks is left out, as for parameters that never had a
    gradient.

    Args:
        start: what the keys of the optimizer begin with in the checkpoint.

    Raises:
        DeferredError: the state is to be made for a deferred parameter.
        MismatchError: the checkpoint is of an optimizer with other groups or parameters.
        UnsupportedError: the state is to be made of a tensor subclass.
    """
    parameters = _parameters(optimizer, manifest, start)
    paths = _paths(manifest, start)
    own = {start + key: leaf.value for key, leaf in flatten(state).items()}
    groups: list[dict[str, Any]] = [{} for _ in state["param_groups"]]
    result: dict[str, Any] = {**state, "state": {}, "param_groups": groups}
    kinds = {key: key in manifest.tensors for key, path in paths.items() if path[0] == "state"}
    is_alike = kinds == {
        key: isinstance(value, torch.Tensor)
        for key, value in own.items()
        if key.startswith(f"{start}state.")
    }
    if is_alike:
        result["state"] = state["state"]
    for key, path in paths.items():
        _check_place(optimizer, path, parameters, start)
        if not (is_alike and path[0] == "state"):
            value = own.get(key)
            if not (isinstance(value, torch.Tensor) and key in manifest.tensors):
                value = _blank(key, manifest, parameters.get(path[1]) if key in kinds else None)
            insert(result, path, value)
    result["param_groups"] = [
        {**group, **saved} for group, saved in zip(state["param_groups"], groups, strict=True)
    ]
    return result


def _check_place(
    optimizer: torch.optim.Optimizer, path: Entry, parameters: Mapping[Any, Any], start: str
) -> None:
    section, place = path[:2]
    here, what = (
        (range(len(optimizer.param_groups)), "groups of parameters")
        if section == "param_groups"
        else (parameters, "parameters")
    )
    if isinstance(place, int) and place not in here:
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


def _paths(manifest: Manifest, start: str) -> dict[str, Entry]:
    """Return the paths of the keys of the checkpoint, from the optimizer on."""
    found: dict[str, Entry] = {}
    for key in (*manifest.objects, *manifest.tensors):
        if key.startswith((f"{start}state.", f"{start}param_groups.")):
            path = leaf_path(manifest.paths.get(key, ()))
            depths = (
                n for n in range(len(path) - 1) if key_of(path[:n]) == start.removesuffix(".")
            )
            depth = next(depths, None)
            section, place, *rest = (
                key.removeprefix(start).split(".") if depth is None else path[depth:]
            )
            if str(place).isdigit():
                place = int(place) if section == "state" else Index(place)
            if rest or section == "state":
                found[key] = (section, place, *rest)
    return found


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
        return torch.empty(
            entry.shape, dtype=dtype, device="cpu"
        )  # load_state_dict() moves it to its device
    with torch.no_grad():
        if entry.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return parameter.new_empty(entry.shape, dtype=dtype)
