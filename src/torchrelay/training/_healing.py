"""The state of a job, moved to members that lack it, from all those that have it.

A state is a tree of dicts and lists with tensors and plain values, as ``state_dict`` returns it.
Tensors are sent in pieces, which the members that have them share, and received straight into the
tensors of the receiver where it has one of the same name, dtype and shape. Structure and plain
values are JSON; nothing is unpickled. All members then compare checksums of all tensors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from torchrelay import _native
from torchrelay._random import random_state, restore_random
from torchrelay.errors import ArgumentError, CorruptionError, UnsupportedError
from torchrelay.training._comm_hooks import local_tensor
from torchrelay.training._replica import broadcast
from torchrelay.training._samples import ElasticLoader

__all__ = ["RandomStates", "Stateful", "about", "check", "heal", "refuse_ddp"]

_logger = logging.getLogger("torchrelay.training")
_PIECE_BYTES = 4 << 20
_LOG_EVERY_S = 2.0


class Stateful(Protocol):
    """What has a state that heals: modules, optimizers, schedulers, data loaders."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class RandomStates:
    """Those of generators on the CPU. They differ between members: a new one gets those of the
    first that is whole.
    """

    def state_dict(self) -> dict[str, Any]:
        return random_state(with_cuda=False)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore_random(state)


def about(states: Mapping[str, Stateful]) -> dict[str, str]:
    """Return what must be equal on all members, described for messages."""
    layout = [
        f"{name}.{key} {_fields(value)}"
        for name, one in sorted(states.items())
        if isinstance(one, nn.Module)
        for key, value in one.state_dict().items()
        if isinstance(value, Tensor)
    ]
    digest = hashlib.blake2b("\n".join(layout).encode(), digest_size=6).hexdigest()
    others = {name: one for name, one in states.items() if not isinstance(one, nn.Module)}
    names = [
        f"{name}: {one.about if isinstance(one, ElasticLoader) else type(one).__name__}"
        for name, one in others.items()
    ]
    return {
        "the model": f"{len(layout)} tensors ({digest})",
        "the list of its other states": "; ".join(sorted(names)) or "empty",
    }


def refuse_ddp(name: str, model: object) -> None:
    """Raise :class:`ArgumentError` if ``model`` sums gradients in an order of its own."""
    if isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            f"Elastic: {name} is a DistributedDataParallel, which sums gradients in an order that "
            "depends on the steps of its process: pass the module that it wraps, without DDP, and "
            "call step.reduce(module) after the backward pass"
        )


def check(states: Mapping[str, Stateful]) -> None:
    """Raise :class:`ArgumentError` or :class:`UnsupportedError` if something in ``states`` could
    not be sent to a member.
    """
    for name, one in states.items():
        refuse_ddp(name, one)
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise ArgumentError(f"Elastic: {name} is a {type(one).__name__} without state_dict")
    _described(*_leaves(states))


def heal(
    group: Any,
    is_whole: Sequence[bool],
    shared: Mapping[str, Stateful],
    local: Mapping[str, Stateful],
) -> int:
    """Give the members that are not whole the states of those that are. Collective; blocks.

    Returns the bytes that this member has received.

    Args:
        shared: states that are equal on all members that are whole, but for the buffers of modules:
            those of the first are sent to all others.
        local: states that are not: those of the first member that is whole are sent.

    Raises:
        CorruptionError: this member has other bits than the first one that was whole.
        ArgumentError: a state contains what is no tensor and no plain value.
    """
    rank, first = group.rank(), [*is_whole].index(True)
    whole = [source for source, has_state in enumerate(is_whole) if has_state]
    new = [target for target, has_state in enumerate(is_whole) if not has_state]
    buffers = {
        f"[{name!r}][{key!r}]"
        for name, one in shared.items()
        if isinstance(one, nn.Module)
        for key, _ in one.named_buffers()
    }
    size_bytes = 0
    for states, sources, from_first in ((shared, whole, buffers), (local, [first], set[str]())):
        tree, own = _leaves(states)
        text = _described(tree, own) if rank == first else b""
        spec, leaves = json.loads(broadcast(group, text, first))
        values, tensors = [], None
        if rank in sources or not is_whole[rank]:
            like = {part: value for value in own.values() if (part := _part_of(value))}
            values = [_restored(leaf, own.get(leaf["name"]), like) for leaf in leaves]
            moved = [
                (_memory(value), ([first], [*{*range(group.size())} - {first}]))
                if leaf["name"] in from_first
                else (_memory(value), (sources, new))
                for leaf, value in zip(leaves, values, strict=True)
                if isinstance(value, (Tensor, np.ndarray))
            ]
            tensors = [tensor for tensor, _ in moved]
            size_bytes += _exchange(group, moved)
        _compare(group, first, tensors)
        if not is_whole[rank]:
            healed = pytree.tree_unflatten(values, pytree.treespec_loads(spec))
            for name, one in states.items():
                one.load_state_dict(healed[name])
    return size_bytes


def _leaves(states: Mapping[str, Stateful]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree of all states, and its leaves by name."""
    tree = {name: one.state_dict() for name, one in states.items()}
    return tree, {
        pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(tree)[0]
    }


def _memory(value: Any) -> Tensor:
    """Return a tensor, this rank's part of one, or the memory of an array as one."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return local_tensor(value.detach())


def _part_of(value: Any) -> str:
    """Return which part of which shape this rank has of a DTensor, empty if it has all of it."""
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return ""
    return f"{value.placements} of {[*value.shape]} on {[*mesh.shape]} {mesh.mesh_dim_names}"


def _fields(value: Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return what is equal where the same bytes are an equal value."""
    memory = _memory(value)
    return {
        "dtype": str(memory.dtype).removeprefix("torch."),
        "shape": [*memory.shape],
        "part_of": _part_of(value),
        "is_array": isinstance(value, np.ndarray),
    }


def _described(tree: Any, leaves: Mapping[str, Any]) -> bytes:
    descriptions = []
    for name, leaf in leaves.items():
        one: dict[str, Any] = {"name": name}
        if isinstance(leaf, (Tensor, np.ndarray)):
            tensor = _memory(leaf)
            if tensor.is_meta or tensor.layout != torch.strided:
                raise ArgumentError(
                    f"Elastic: state{name} has no memory of its own ({tensor.device}, "
                    f"{tensor.layout}): make a dense tensor of it on a device"
                )
            one |= {"device": tensor.device.type, **_fields(leaf)}
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            one["value"] = leaf
        elif isinstance(leaf, torch.dtype):
            one["name_in_torch"] = str(leaf).removeprefix("torch.")
        elif isinstance(leaf, Counter):  # of MultiStepLR
            one["counts"] = [*leaf.items()]
        else:
            raise ArgumentError(
                f"Elastic: state{name} is a {type(leaf).__name__}, which cannot be sent to a new "
                "member; use tensors, numbers, strings, lists and dicts"
            )
        descriptions.append(one)
    try:
        spec = pytree.treespec_dumps(pytree.tree_structure(tree))
    except NotImplementedError as error:
        raise ArgumentError(f"Elastic: a state cannot be sent to a new member: {error}") from error
    return json.dumps([spec, descriptions]).encode()


def _restored(leaf: dict[str, Any], own: Any, like: Mapping[str, Any]) -> Any:
    """Return a value, or what its bytes are received into: ``own``, if it is like it.

    Args:
        like: a DTensor of this rank for each kind of part that it has.
    """
    if "name_in_torch" in leaf:
        return getattr(torch, leaf["name_in_torch"])
    if "counts" in leaf:
        return Counter(dict(leaf["counts"]))
    if "dtype" not in leaf:
        return leaf["value"]
    if isinstance(own, (Tensor, np.ndarray)) and leaf | _fields(own) == leaf:
        return own
    dtype, part = getattr(torch, leaf["dtype"]), leaf["part_of"]
    if part in like:
        return torch.empty_like(like[part], dtype=dtype)
    if part:
        raise UnsupportedError(
            f"Elastic: state{leaf['name']} is the part {part}, and nothing here is: shard the "
            "model of a new replica as that of the others"
        )
    tensor = torch.empty(leaf["shape"], dtype=dtype, device=leaf["device"])
    return tensor.numpy() if leaf["is_array"] else tensor


def _exchange(
    group: Any, moved: Iterable[tuple[Tensor, tuple[Sequence[int], Sequence[int]]]]
) -> int:
    """Move each tensor from its sources, which share the work, to its targets."""
    rank, works, copies, piece, size_bytes = group.rank(), [], [], 0, 0
    for tensor, (sources, targets) in moved:
        memory = tensor.contiguous()
        if rank in targets:
            copies.append((tensor, memory))
        data = memory.view(-1).view(torch.uint8)
        for part in torch.split(data, _PIECE_BYTES) if data.numel() else ():
            source = sources[piece % len(sources)]
            piece += 1
            if rank == source:
                works += [group.send([part], target, 0) for target in targets]
            elif rank in targets:
                works.append(group.recv([part], source, 0))
                size_bytes += part.numel()
    logged_s = time.monotonic()
    for done, work in enumerate(works, 1):
        work.wait()
        if time.monotonic() - logged_s > _LOG_EVERY_S:
            logged_s = time.monotonic()
            _logger.info("rank %d has moved %.0f%% of the state", rank, 100 * done / len(works))
    for tensor, memory in copies:
        if memory.data_ptr() != tensor.data_ptr():
            tensor.copy_(memory)
    return size_bytes


def _compare(group: Any, first: int, tensors: Sequence[Tensor] | None) -> None:
    """Compare the checksums of all members; all of them return, or raise, after the same call.

    Args:
        tensors: None, if this member has none to compare.
    """
    checksum = 0
    for tensor in tensors or ():
        data = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        checksum = _native.crc32c(data.numpy(), checksum)
    mine = torch.tensor([checksum])
    every = [torch.zeros_like(mine) for _ in range(group.size())]
    group.allgather([every], [mine]).wait()
    if tensors is not None and not torch.equal(mine, every[first]):
        raise CorruptionError(
            f"Elastic: after healing, this member ({group.rank()}) has checksum {checksum:08x}, "
            f"member {first} has {int(every[first]):08x}; states that differ between members "
            "belong in local"
        )
