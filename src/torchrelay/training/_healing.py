"""The state of a job, moved to members that lack it, from all those that have it.

A state is a tree of dicts and lists with tensors and plain values, as ``state_dict`` returns it.
Tensors are sent in pieces, which the members that have them share, and received straight into the
tensors of the receiver where it has one of the same name, dtype and shape. Structure and plain
values are JSON; nothing is unpickled. All members then compare checksums of all tensors.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from torchrelay import _native
from torchrelay.errors import ArgumentError, CorruptionError, UnsupportedError

__all__ = ["RandomStates", "Stateful", "check", "heal", "layout_of", "refuse_ddp"]

_logger = logging.getLogger("torchrelay.training")
_PIECE_BYTES = 4 << 20
_LOG_EVERY_S = 2.0


class Stateful(Protocol):
    """What has a state that heals: modules, optimizers, schedulers, data loaders."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class RandomStates:
    """The states of the random generators of torch on the CPU, Python and NumPy, as texts. They
    differ between members: a new one gets those of the first that is whole.
    """

    def state_dict(self) -> dict[str, str]:
        name, keys, *rest = np.random.get_state(legacy=True)
        return {
            "torch": torch.get_rng_state().numpy().tobytes().hex(),
            "python": json.dumps(random.getstate()),
            "numpy": json.dumps([name, np.asarray(keys).tolist(), *rest]),
        }

    def load_state_dict(self, state: dict[str, str]) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
        version, words, gauss = json.loads(state["python"])
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(json.loads(state["numpy"]))


def layout_of(states: Mapping[str, Stateful]) -> list[str]:
    """Return name, dtype and shape of each tensor of the modules among ``states``."""
    return [
        f"{name}.{key} {str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
        for name, one in sorted(states.items())
        if isinstance(one, nn.Module)
        for key, value in one.state_dict().items()
        if isinstance(value, Tensor)
    ]


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
        shared: states that are equal on all members that are whole.
        local: states that are not: those of the first member that is whole are sent.

    Raises:
        CorruptionError: this member has other bits than the first one that was whole.
        ArgumentError: a state contains what is no tensor and no plain value.
    """
    rank, first = group.rank(), [*is_whole].index(True)
    whole = [source for source, has_state in enumerate(is_whole) if has_state]
    size_bytes = 0
    for states, sources in ((shared, whole), (local, [first])):
        tree, own = _leaves(states)
        text = _described(tree, own) if rank == first else b""
        spec, leaves = json.loads(_broadcast(group, text, first))
        values, tensors = [], None
        if rank in sources or not is_whole[rank]:
            values = [_restored(leaf, own.get(leaf["name"])) for leaf in leaves]
            tensors = [
                _memory(value) for value in values if isinstance(value, (Tensor, np.ndarray))
            ]
            size_bytes += _exchange(group, sources, is_whole, tensors)
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
    """Return a tensor, or the memory of an array as one."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value.detach()


def _described(tree: Any, leaves: Mapping[str, Any]) -> bytes:
    descriptions = []
    for name, leaf in leaves.items():
        one: dict[str, Any] = {"name": name}
        if isinstance(leaf, (Tensor, np.ndarray)):
            tensor = _memory(leaf)
            if hasattr(tensor, "to_local"):
                raise UnsupportedError(
                    f"Elastic: state{name} is a {type(tensor).__name__}: replicas of several "
                    "processes (FSDP, tensor parallelism) are not supported"
                )
            if tensor.is_meta or tensor.layout != torch.strided:
                raise ArgumentError(
                    f"Elastic: state{name} has no memory of its own ({tensor.device}, "
                    f"{tensor.layout}): make a dense tensor of it on a device"
                )
            one |= {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": [*tensor.shape],
                "device": tensor.device.type,
                "is_array": isinstance(leaf, np.ndarray),
            }
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            one["value"] = leaf
        elif isinstance(leaf, torch.dtype):
            one["name_in_torch"] = str(leaf).removeprefix("torch.")
        else:
            raise ArgumentError(
                f"Elastic: state{name} is a {type(leaf).__name__}, which cannot be sent to a new "
                "member; use tensors, numbers, strings, lists and dicts"
            )
        descriptions.append(one)
    spec = pytree.treespec_dumps(pytree.tree_structure(tree))
    return json.dumps([spec, descriptions]).encode()


def _restored(leaf: dict[str, Any], own: Any) -> Any:
    """Return a value, or what its bytes are received into: ``own``, if it is like it."""
    if "name_in_torch" in leaf:
        return getattr(torch, leaf["name_in_torch"])
    if "dtype" not in leaf:
        return leaf["value"]
    dtype = getattr(torch, leaf["dtype"])
    if isinstance(own, (Tensor, np.ndarray)) and isinstance(own, np.ndarray) == leaf["is_array"]:
        here = _memory(own)
        if here.dtype == dtype and [*here.shape] == leaf["shape"]:
            return own
    tensor = torch.empty(leaf["shape"], dtype=dtype, device=leaf["device"])
    return tensor.numpy() if leaf["is_array"] else tensor


def _broadcast(group: Any, data: bytes, root: int) -> bytes:
    size = torch.tensor([len(data)])
    group.broadcast([size], root).wait()
    text = torch.zeros(int(size), dtype=torch.uint8)
    if data:
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    group.broadcast([text], root).wait()
    return text.numpy().tobytes()


def _exchange(
    group: Any, sources: Sequence[int], is_whole: Sequence[bool], tensors: Sequence[Tensor]
) -> int:
    rank, works, copies, piece, size_bytes = group.rank(), [], [], 0, 0
    for tensor in tensors:
        memory = tensor.contiguous()
        copies.append((tensor, memory))
        data = memory.view(-1).view(torch.uint8)
        for part in torch.split(data, _PIECE_BYTES) if data.numel() else ():
            source = sources[piece % len(sources)]
            piece += 1
            if rank == source:
                targets = (target for target, whole in enumerate(is_whole) if not whole)
                works += [group.send([part], target, 0) for target in targets]
            elif not is_whole[rank]:
                works.append(group.recv([part], source, 0))
                size_bytes += part.numel()
    logged_s = time.monotonic()
    for done, work in enumerate(works, 1):
        work.wait()
        if time.monotonic() - logged_s > _LOG_EVERY_S:
            logged_s = time.monotonic()
            _logger.info("rank %d has moved %.0f%% of the state", rank, 100 * done / len(works))
    for tensor, memory in copies:
        if memory.data_ptr() != tensor.data_ptr() and not is_whole[rank]:
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
