"""Tensors that are wrappers around others, as quantised ones are, stored by their parts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.checkpoint._types import MAX_DEPTH
from torchrelay.checkpoint.format._kinds import imported_class
from torchrelay.checkpoint.format._values import decode, encode
from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError, describe

__all__ = ["SUBCLASS", "Subclass", "block_of", "joined", "parts_of"]

SUBCLASS = "$subclass"  # after the key of a tensor that is stored by its parts: its class
_DTENSOR = "torch.distributed.tensor.DTensor"
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Subclass:
    """The class of a tensor that is stored by its parts, and what it needs beside them."""

    name: str
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def encoded(self, key: str) -> dict[str, Any]:
        """Return it as JSON.

        A context that a checkpoint cannot hold is described, which is enough to compare it.

        Raises:
            ArgumentError: the context cannot be described.
        """
        found = {"class": self.name, "shape": [*self.shape], "stride": [*self.stride]}
        try:
            return {**found, "context": encode(f"{key}.context", self.context)}
        except ArgumentError:
            return {**found, "described": _described(f"{key}.context", self.context)}

    def check(self, location: str, key: str, saved: Any) -> None:
        """Compare it with the description in a checkpoint.

        Raises:
            MismatchError: they differ.
        """
        here = self.encoded(key)
        if not isinstance(saved, dict) or saved != {name: here.get(name) for name in saved}:
            raise MismatchError(
                f"{location}: {key.removesuffix(f'.{SUBCLASS}')!r} is of another tensor class in "
                "the checkpoint than here, or has other parameters or another layout: "
                f"{saved} and {here}"
            )


def _described(key: str, value: Any, depth: int = 0) -> Any:
    """Return JSON that is equal for equal values of a context."""
    if depth > MAX_DEPTH:
        raise ArgumentError(f"{key[:80]}...: the value is nested more than {MAX_DEPTH} levels deep")
    kind = type(value)
    if isinstance(value, Mapping):
        items = [[repr(name), item] for name, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [[field.name, getattr(value, field.name)] for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple | set | frozenset):
        items = [["", item] for item in value]
    elif callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return f"{value.__module__}.{value.__qualname__}"
    elif kind in _PLAIN or not hasattr(value, "__dict__"):
        return encode(key, value)  # or raises
    else:
        try:
            return encode(key, value)
        except ArgumentError:
            items = [*map(list, vars(value).items())]
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "items": [[name, _described(f"{key}.{name}", item, depth + 1)] for name, item in items],
    }


def parts_of(key: str, tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return what a wrapper is made of by name, with its :class:`Subclass`; None for others.

    Of a DTensor over wrappers, that is this rank's one, named by its place in the whole.
    """
    sharding = _torch.sharding_of(tensor)
    if sharding == "dtensor":
        local = getattr(tensor, "_local_tensor", tensor)
        if _torch.parts_of(local) is None:
            return None
        context = _layout_of(tensor)
        found: dict[str, Any] = {
            SUBCLASS: Subclass(_DTENSOR, context, tuple(tensor.shape), tensor.stride())
        }
        name = block_of(key, tensor)
        return found if name is None else {**found, name: local}
    try:
        parts = _torch.parts_of(tensor) if sharding == "plain" and not tensor.is_nested else None
    except Exception as error:
        raise ArgumentError(
            f"{key}: __tensor_flatten__() of {type(tensor).__name__} raised {describe(error)}"
        ) from error
    if parts is None:
        return None
    names, context = parts
    kind = type(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    described = Subclass(name, context, tuple(tensor.shape), tensor.stride())
    return {SUBCLASS: described, **{name: getattr(tensor, name) for name in names}}


def _layout_of(tensor: Any) -> str:
    return f"mesh {tuple(tensor.device_mesh.shape)} {tuple(tensor.placements)}"


def block_of(key: str, tensor: Any) -> str | None:
    """Return the name of this rank's part of a DTensor, its offsets; None if it has none.

    Raises:
        UnsupportedError: it is in several pieces.
    """
    if tensor.device_mesh.get_coordinate() is None:
        return None
    blocks = _torch.local_blocks(tensor.shape, tensor.device_mesh, tensor.placements)
    if len(blocks) > 1:
        raise UnsupportedError(
            f"{key}: this rank's part of the wrapper is in {len(blocks)} pieces of the whole "
            f"({_layout_of(tensor)}), which a checkpoint cannot store by its parts"
        )
    return next(
        (f"@{','.join(map(str, box.offsets))}" for box, _ in blocks if all(box.sizes)), None
    )


def joined(
    key: str, parts: Mapping[str, Any], fresh: torch.Tensor | None, parameter: Any
) -> torch.Tensor:
    """Return the tensor that ``parts`` make up, as the checkpoint has them.

    Args:
        key: of the tensor in the checkpoint.
        parts: tensors by name, and the description under :data:`SUBCLASS`.
        fresh: a tensor of the same class and context, if there is one.
        parameter: of an optimizer, whose state the tensor is.

    Raises:
        MismatchError: the class is not imported here, or the tensor has another layout.
        UnsupportedError: the checkpoint does not have all that the class needs.
    """
    saved = parts[SUBCLASS]
    kind: Any
    tensors = {name: part for name, part in parts.items() if name != SUBCLASS}
    name = saved["class"] if isinstance(saved, dict) else ""
    if name == _DTENSOR:
        return _distributed(key, saved, tensors, fresh if fresh is not None else parameter)
    if fresh is not None:
        found = _torch.parts_of(fresh)
        context = None if found is None else found[1]
        kind, shape, stride = type(fresh), fresh.shape, fresh.stride()
    elif "context" in saved and "shape" in saved:
        context = decode(key, saved["context"])
        kind, shape, stride = _class(key, name), torch.Size(saved["shape"]), saved["stride"]
    else:
        raise UnsupportedError(
            f"{key}: the checkpoint does not have all that a {name} is made of; make the state "
            "before load(), for an optimizer by a step or by get_state_dict() of "
            "torch.distributed.checkpoint.state_dict"
        )
    made: torch.Tensor = kind.__tensor_unflatten__(tensors, context, shape, tuple(stride))
    return made


def _class(key: str, name: str) -> type[torch.Tensor]:
    """Return the class of a wrapper in an imported module.

    Raises:
        MismatchError: there is none.
    """
    module = name.rpartition(".")[0]
    while "." in module and module not in sys.modules:
        module = module.rpartition(".")[0]
    found = imported_class(module, name.removeprefix(f"{module}."))
    if found and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__"):
        return found
    raise MismatchError(
        f"{key}: the tensor is a {name}, a class that is not imported here; import it before load()"
    )


def _distributed(key: str, saved: Any, tensors: Mapping[str, Any], like: Any) -> torch.Tensor:
    if _torch.sharding_of(like) != "dtensor" or saved["context"] != _layout_of(like):
        here = _layout_of(like) if _torch.sharding_of(like) == "dtensor" else "no DTensor"
        raise MismatchError(
            f"{key}: a DTensor of {saved['context']} over wrappers in the checkpoint, and {here} "
            "here: what is quantised by shard is loaded in the layout in which it was saved"
        )
    (local,) = tensors.values()
    made: torch.Tensor = _torch.dtensor_of(local, like, saved["shape"], saved["stride"])
    return made
