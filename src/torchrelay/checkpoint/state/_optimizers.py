"""What is particular to the state of optimizers: its parts belong to numbered parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchrelay.checkpoint._types import Manifest
from torchrelay.checkpoint.state._parts import OptimizerPart
from torchrelay.checkpoint.state._state import ORDINARY, flatten, relative_path
from torchrelay.checkpoint.state._tensors import address_of
from torchrelay.errors import MismatchError

__all__ = ["check_state", "known_sections", "may_lack", "numbered", "owned_memory"]

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
# Optimizers of torch whose state has other shapes than the parameters.
_OTHER_SHAPES = ("LBFGS", "Adafactor", "Muon")


def known_sections(part: OptimizerPart) -> set[str]:
    """Return the sections of a state dict that the optimizer can use: any, if it has code of its
    own.
    """
    return _Any() if part.own_code else {"state", "param_groups", *part.state}


class _Any(set[Any]):
    def __contains__(self, item: object) -> bool:
        return True


def numbered(part: OptimizerPart, manifest: Manifest) -> dict[int, torch.Tensor]:
    """Return the parameters by their numbers in the checkpoint.

    Raises:
        MismatchError: the groups have other parameters there.
    """
    found: dict[int, torch.Tensor] = {}
    for index, group in enumerate(part.owner.param_groups):
        key = f"{part.start}param_groups.{index}.params"
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
        names = manifest.objects.get(f"{part.start}param_groups.{index}.param_names")
        here = group.get("param_names")
        if isinstance(names, list) and here and names != here and {*names} & {*here}:
            place = next(
                n for n, pair in enumerate(zip(names, here, strict=False)) if len({*pair}) > 1
            )
            raise MismatchError(
                f"{key}: parameter {place} is {names[place]!r} in the checkpoint and "
                f"{here[place]!r} here; make the optimizer with the parameters in the same order"
            )
        found.update(zip(numbers, group["params"], strict=True))
    return found


def check_state(
    part: OptimizerPart,
    parameters: Mapping[int, torch.Tensor],
    manifest: Manifest,
    keys: Sequence[str],
    location: str,
) -> None:
    """Compare the state in the checkpoint with the parameters here.

    Raises:
        MismatchError: it has more groups or parameters, or is of parameters of other shapes.
    """
    shapes: dict[Any, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for key in keys:
        path = part.path(relative_path(manifest.paths.get(key, ()), key, part.start))
        section, place = (*path, None)[:2]
        if section == "param_groups":
            here: Any = range(len(part.owner.param_groups))
        elif section == "state":
            here = parameters
        else:
            continue
        if isinstance(place, int) and place not in here:
            what = "parameters" if section == "state" else "groups of parameters"
            raise MismatchError(
                f"{key}: the checkpoint has it, and this {type(part.owner).__name__} has "
                f"{len(here)} {what}"
            )
        shape = _saved_shape(manifest, key, path)
        if section == "state" and isinstance(place, int) and shape and not is_lazy(here[place]):
            shapes[path[2:]][place] = shape
    kind = type(part.owner)
    is_like = kind.__module__.startswith("torch.optim") and kind.__name__ not in _OTHER_SHAPES
    for name, saved in shapes.items():
        own = {place: tuple(parameters[place].shape) for place in saved}
        if saved != own and (is_like or Counter(saved.values()) == Counter(own.values())):
            place = next(place for place in saved if saved[place] != own[place])
            raise MismatchError(
                f"{location}: {part.start}state.{place}.{'.'.join(map(str, name))} has shape "
                f"{list(saved[place])} in the checkpoint, and parameter {place} here "
                f"{list(own[place])}; make the optimizer with the parameters of the saved one, in "
                "the same order"
            )


def _saved_shape(manifest: Manifest, key: str, path: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor of a parameter's state; () for what has none."""
    entry = manifest.tensors.get(key)
    return entry.shape if entry is not None and len(path) == 3 else ()


def may_lack(part: OptimizerPart, key: str, manifest: Manifest) -> bool:
    """Return whether a complete checkpoint of an optimizer may lack ``key``: an option of a group
    that a scheduler or a newer torch has added, as the checkpoint is of the same kind of optimizer.
    """
    section, _, rest = key.removeprefix(part.start).partition(".")
    index, _, name = rest.partition(".")
    if section != "param_groups" or not index.isdigit():
        return False
    group = f"{part.start}param_groups.{index}."
    saved = {
        one.removeprefix(group).partition(".")[0]
        for one in (*manifest.objects, *manifest.tensors)
        if one.startswith(group)
    }
    others = saved - part.owner.param_groups[int(index)].keys() - _ADDED
    return "params" in saved and (name not in part.owner.defaults or not others)


def owned_memory(
    state: Any, blocks: Sequence[torch.Tensor]
) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Return what only the steps of optimizers change: their parameters and what they keep of each.

    By address and size, all tensors there, also of the ``blocks`` of the state: each has a version
    that an in-place change of it raises. Only of optimizers that are in the state, or attributes of
    what is, and whose steps call torch's hooks; and only what is contiguous in host memory, because
    graphs of CUDA are replayed without a hook.
    """
    found: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for leaf in flatten({"": state}).values():
        for one in (leaf.value, *getattr(leaf.value, "__dict__", {}).values()):
            if not isinstance(one, torch.optim.Optimizer) or not hasattr(type(one).step, "hooked"):
                continue
            kept = [each.values() for each in one.state.values() if isinstance(each, Mapping)]
            groups = [group["params"] for group in one.param_groups]
            for tensor in chain(*groups, *kept):
                # A change of a DTensor raises its own version, but not that of its local tensor.
                local = getattr(tensor, "_local_tensor", tensor)
                if type(local) in ORDINARY and _is_watchable(local):
                    found[address_of(local), local.nbytes] += [tensor, local]
    for block in blocks if found else ():
        if (place := (address_of(block), block.nbytes)) in found:
            found[place].append(block)
    return {place: tensors for place, tensors in found.items() if all(place)}


def _is_watchable(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and not tensor.is_inference()
