"""The ``_metadata`` of a module's state dict: the versions of its modules, by which their classes
convert older states.

A checkpoint has it under ``$metadata``, as a dictionary by the names of modules; a state that is
read back has it as torch does. Modules of version 1 are left out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["noted", "restored", "stored"]

_DEFAULT = {"version": 1}
_OF_A_LOAD = "assign_to_params_buffers"  # left there by load_state_dict(assign=True)


def stored(state: Any) -> dict[str, Any] | None:
    """Return what a checkpoint holds of the metadata of a state dict; None if it has none."""
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    found = {}
    for name, local in metadata.items():
        if local != _DEFAULT and isinstance(local, Mapping):
            kept = {key: value for key, value in local.items() if key != _OF_A_LOAD}
            if kept != _DEFAULT:
                found[name] = kept
    return found


def restored(saved: Mapping[str, Any], names: Iterable[Any]) -> OrderedDict[str, Any]:
    """Return the metadata of a state dict with these ``names``, from what a checkpoint holds."""
    found: OrderedDict[str, Any] = OrderedDict({"": dict(_DEFAULT)})
    for name in names:
        module = str(name).rpartition(".")[0]
        while module not in found:
            found[module] = dict(_DEFAULT)
            module = module.rpartition(".")[0]
    found.update((name, dict(local)) for name, local in saved.items())
    return found


def noted(items: dict[Any, Any], saved: Mapping[str, Any]) -> Any:
    """Return a state dict with the metadata that a checkpoint has for it."""
    found: Any = OrderedDict(items) if type(items) is dict else items
    found._metadata = restored(saved, found)
    return found
