"""Recipes: the record of a module as a small file, in place of a checkpoint of its initial values.

The file is JSON. It names operations by their overloads in ``aten``, from a fixed list, and holds
seeds, shapes and numbers. Reading one executes only these operations, and only at materialisation.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchrelay import _torch
from torchrelay.deferred._composites import constant, trunc_normal
from torchrelay.deferred._graph import Constant, External, Node, Region, Storage
from torchrelay.deferred._operators import describe
from torchrelay.deferred._positions import Origin, Position
from torchrelay.deferred._traces import Trace
from torchrelay.errors import CorruptionError, DeferredError, UnsupportedError

__all__ = ["dump", "load"]

FORMAT = "torchrelay.recipe"
VERSION = 1

_OURS: dict[str, Any] = {"torchrelay::constant": constant, "torchrelay::trunc_normal": trunc_normal}
_ALLOWED = {
    "_conj_physical", "_linalg_eigh", "_linalg_solve_ex", "_linalg_svd", "_softmax", "acos", "add",
    "addbmm", "addcdiv", "addcdiv_", "addcmul", "addcmul_", "addmm", "addmv", "addr", "all", "amax",
    "amin", "any", "arange", "argsort", "asin", "atan", "atan2", "baddbmm", "bernoulli",
    "bernoulli_", "bitwise_xor", "bmm", "bucketize", "cat", "cauchy_", "ceil", "clamp", "complex",
    "convolution", "cosh", "cumprod", "cumsum", "diag", "diag_embed", "diagonal_copy", "dist",
    "div", "dot", "empty", "empty_like", "empty_strided", "erfinv", "exp2", "expand_copy",
    "exponential_", "eye", "fill_", "flip", "floor", "floor_divide", "fmod", "frac", "full",
    "full_like", "gather", "gelu", "geometric_", "geqrf", "im2col", "index", "index_copy_",
    "index_fill", "index_fill_", "index_put_", "index_select", "kron", "lerp", "lerp_",
    "linalg_cholesky_ex", "linalg_householder_product", "linalg_inv_ex", "linalg_lu_factor_ex",
    "linalg_matrix_exp", "linalg_qr", "linalg_solve_triangular", "linalg_vector_norm", "linspace",
    "log10", "log2", "log_normal_", "logical_xor", "logspace", "max", "mean", "min", "mm",
    "multinomial", "mv", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    "norm", "normal", "normal_", "ones", "ones_like", "outer", "permute_copy", "poisson", "polar",
    "pow", "pow_", "prod", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "random_", "randperm", "remainder", "repeat", "roll", "round", "rsqrt", "rsqrt_", "scatter",
    "scatter_", "scatter_add_", "searchsorted", "select_copy", "sgn", "sgn_", "sigmoid", "sigmoid_",
    "sinh", "slice_copy", "softmax", "softplus", "sort", "squeeze_copy", "stack", "std", "sum",
    "t_copy", "tan", "trace", "transpose_copy", "trapezoid", "tril", "tril_", "triu", "triu_",
    "trunc", "uniform_", "unsqueeze", "unsqueeze_copy", "var", "view_as_real_copy", "view_copy",
    "zero", "zero_", "zeros", "zeros_like",
}  # fmt: skip


def dump(traces: dict[str, Trace]) -> bytes:
    """Return the recipe of named tensors.

    Raises:
        DeferredError: an operation reads a real tensor from outside the record.
        UnsupportedError: a recipe cannot contain one of the operations.
    """
    return json.dumps(_Writer().document(traces), separators=(",", ":")).encode()


def load(data: bytes) -> dict[str, Trace]:
    """Return the traces that :func:`dump` wrote.

    Raises:
        CorruptionError: ``data`` is not a recipe, is damaged, or names an operation that is not
            allowed.
        UnsupportedError: it was written by a later version.
    """
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise CorruptionError(
                f"This file is not a recipe: its format says {document['format']!r}."
            )
        if document["version"] > VERSION:
            raise UnsupportedError(
                f"This recipe has version {document['version']}, and this TorchRelay reads up to "
                f"{VERSION}. Update it."
            )
        return _Reader(document).traces()
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        RecursionError,
    ) as error:
        if isinstance(error, (CorruptionError, UnsupportedError)):
            raise
        raise CorruptionError(f"This recipe is damaged: {type(error).__name__}: {error}") from error


class _Writer:
    def __init__(self) -> None:
        self._storages: dict[Storage, int] = {}
        self._regions: dict[int, int] = {}
        self._nodes: dict[int, int] = {}
        self._origins: dict[int, int] = {}
        self._tables: dict[str, list[Any]] = {
            "storages": [],
            "regions": [],
            "nodes": [],
            "origins": [],
        }
        self._kept: list[Any] = []  # so that no id is used twice

    def document(self, traces: dict[str, Trace]) -> dict[str, Any]:
        nodes = {node.seq: node for trace in traces.values() for node in trace.nodes}
        for seq in sorted(nodes):
            self._node(nodes[seq])
        tensors = {
            name: [self._region(trace.region), [self._nodes[node.seq] for node in trace.nodes]]
            for name, trace in traces.items()
        }
        return {"format": FORMAT, "version": VERSION, **self._tables, "tensors": tensors}

    def _enter(self, table: str, entry: Any) -> int:
        self._tables[table].append(entry)
        return len(self._tables[table]) - 1

    def _storage(self, storage: Storage) -> int:
        if storage not in self._storages:
            self._storages[storage] = self._enter(
                "storages", [storage.size_bytes, str(storage.device)]
            )
        return self._storages[storage]

    def _region(self, region: Region) -> int:
        if id(region) not in self._regions:
            if region.conj or region.neg:
                raise UnsupportedError(
                    "A recipe cannot hold lazy conjugates or negatives. Call resolve_conj() or "
                    "resolve_neg() inside deferred_init, or save the module's values."
                )
            self._kept.append(region)
            entry = [
                self._storage(region.storage),
                _name(region.dtype),
                region.size,
                region.stride,
                region.offset,
            ]
            self._regions[id(region)] = self._enter("regions", entry)
        return self._regions[id(region)]

    def _node(self, node: Node) -> None:
        name = describe(node.func).name
        if not _is_allowed(name):
            raise UnsupportedError(
                f"A recipe cannot hold the operation {name}. Save the module's values instead."
            )
        overload = "" if name in _OURS else node.func._overloadname
        entry = {
            "func": name if name in _OURS else f"{node.func._schema.name}.{overload}",
            "args": self._value(node.args),
            "kwargs": {key: self._value(value) for key, value in node.kwargs.items()},
            "reads": [self._region(region) for region in node.reads],
            "writes": [self._region(region) for region in node.writes],
            "outputs": [
                None if region is None else self._region(region) for region in node.outputs
            ],
            "default_dtype": _name(node.default_dtype),
        }
        if node.position is not None and node.after is not None:
            entry["position"] = [self._origin(node.position.origin), node.position.words]
        self._nodes[node.seq] = self._enter("nodes", entry)
        if node.position is not None and node.after is not None:
            after = node.after
            if after.origin is not node.position.origin and id(after.origin) not in self._origins:
                self._kept.append(after.origin)
                self._origins[id(after.origin)] = self._enter(
                    "origins", {"after": self._nodes[node.seq]}
                )
            entry["after"] = [self._origin(after.origin), after.words]

    def _origin(self, origin: Origin) -> int:
        if id(origin) not in self._origins:
            state = origin.state
            if state is None:
                raise UnsupportedError(
                    "A recipe cannot hold random numbers that come after an operation whose draws "
                    "are not counted and that is not part of it. Materialize the module first, or "
                    "save its values."
                )
            self._kept.append(origin)
            entry: dict[str, Any] = {"device": str(origin.device)}
            seed = int(state.numpy().view(np.int64)[0]) & (1 << 64) - 1
            fresh = origin.device.type == "cpu" and torch.equal(
                torch.Generator().manual_seed(seed).get_state(), state
            )
            entry |= {"seed": seed} if fresh else {"state": _encode(state)}
            self._origins[id(origin)] = self._enter("origins", entry)
        return self._origins[id(origin)]

    def _value(self, value: Any) -> Any:  # noqa: PLR0911
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, (tuple, list)):
            return [self._value(item) for item in value]
        if isinstance(value, Region):
            return {"region": self._region(value)}
        if isinstance(value, Constant):
            tensor = value.tensor.contiguous()
            return {
                "constant": _encode(tensor),
                "dtype": _name(tensor.dtype),
                "size": list(tensor.shape),
            }
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, External):
            raise DeferredError(
                "The initialisation reads a real tensor from outside the record, which a recipe "
                "cannot hold. Make the tensor inside deferred_init, or save the module's values."
            )
        raise UnsupportedError(f"A recipe cannot hold an argument of type {type(value).__name__}.")


class _Reader:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._storages = [
            Storage(_count(size), torch.device(device), deferred=True)
            for size, device in document["storages"]
        ]
        self._regions = [self._region(*entry) for entry in document["regions"]]
        self._origins = [_origin(entry) for entry in document["origins"]]
        self._nodes = [self._node(entry) for entry in document["nodes"]]

    def traces(self) -> dict[str, Trace]:
        return {
            name: Trace(
                self._regions[_count(region)], [self._nodes[_count(index)] for index in nodes]
            )
            for name, (region, nodes) in self._document["tensors"].items()
        }

    def _region(self, storage: int, dtype: str, size: Any, stride: Any, offset: int) -> Region:
        found = self._storages[_count(storage)]
        region = Region(
            found,
            _dtype(dtype),
            tuple(map(_count, size)),
            tuple(map(_count, stride)),
            _count(offset),
        )
        last = offset + sum((n - 1) * s for n, s in zip(region.size, region.stride, strict=True))
        if 0 not in region.size and (last + 1) * region.dtype.itemsize > found.size_bytes:
            raise CorruptionError("This recipe is damaged: a tensor reaches beyond its memory.")
        return region

    def _node(self, entry: dict[str, Any]) -> Node:
        node = Node(
            _function(entry["func"]),
            tuple(self._value(value) for value in entry["args"]),
            {key: self._value(value) for key, value in entry["kwargs"].items()},
            tuple(self._regions[_count(index)] for index in entry["reads"]),
            tuple(self._regions[_count(index)] for index in entry["writes"]),
            tuple(
                None if index is None else self._regions[_count(index)]
                for index in entry["outputs"]
            ),
        )
        node.default_dtype = _dtype(entry["default_dtype"])
        if "position" in entry:
            node.position = self._position(entry["position"])
            node.after = self._position(entry["after"])
            if node.after.origin.state is None and node.after.origin.node is None:
                node.after.origin.node, node.after.origin.before = node, node.position
        return node

    def _position(self, entry: list[int]) -> Position:
        return Position(self._origins[_count(entry[0])], _count(entry[1]))

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if not isinstance(value, dict):
            return value
        decode = _DECODERS.get(next(iter(value)))
        return self._regions[_count(value["region"])] if decode is None else decode(value)


def _constant(value: dict[str, Any]) -> Constant:
    dtype, size = _dtype(value["dtype"]), [_count(extent) for extent in value["size"]]
    if 0 in size:
        return Constant(torch.empty(size, dtype=dtype))
    flat = torch.frombuffer(bytearray(base64.b64decode(value["constant"])), dtype=torch.uint8)
    return Constant(flat.view(dtype).reshape(size))


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda value: float(value["float"]),
    "device": lambda value: torch.device(value["device"]),
    "torch": lambda value: _attribute(value["torch"]),
    "constant": _constant,
}


def _origin(entry: dict[str, Any]) -> Origin:
    if "after" in entry:
        return Origin(torch.device("cpu"), None)
    device = torch.device(entry["device"])
    if "seed" in entry:
        return Origin(device, torch.Generator().manual_seed(_count(entry["seed"])).get_state())
    return Origin(
        device,
        torch.frombuffer(bytearray(base64.b64decode(entry["state"])), dtype=torch.uint8).clone(),
    )


def _is_allowed(name: str) -> bool:
    """Whether a recipe may hold the operation ``aten::add_.Tensor`` or one of ours."""
    if name in _OURS:
        return True
    namespace, _, rest = name.partition("::")
    base = rest.partition(".")[0]
    if namespace != "aten" or rest.endswith(("out", "_out")):
        return False
    return base in _ALLOWED or describe(_overload(name)).slices


def _function(name: str) -> Any:
    if name in _OURS:
        return _OURS[name]
    if not name.startswith("aten::") or not _is_allowed(name.removesuffix(".")):
        raise CorruptionError(
            f"This recipe names {name!r}, which is not an operation that a recipe may hold."
        )
    return _overload(name.removesuffix("."))


def _overload(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    if not base.isidentifier():
        raise CorruptionError(f"This recipe names {name!r}, which is no operation.")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _attribute(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        raise CorruptionError(
            f"This recipe names torch.{name}, which is neither dtype, layout nor memory format."
        )
    return value


def _dtype(name: str) -> torch.dtype:
    value = _attribute(name)
    if not isinstance(value, torch.dtype):
        raise CorruptionError(f"This recipe names the dtype {name!r}, which is none.")
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise CorruptionError(f"This recipe is damaged: {value!r} stands where a count must be.")
    return value


def _encode(tensor: torch.Tensor) -> str:
    with _torch.plain_torch():
        raw = _torch.flat_bytes(tensor.cpu().contiguous())
        return base64.b64encode(raw.numpy().tobytes()).decode()
