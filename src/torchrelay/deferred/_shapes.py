"""Shapes of an operation's results, from torch's meta kernels."""

from __future__ import annotations

from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred._graph import flat, map_tensors
from torchrelay.deferred._operators import Operator, describe
from torchrelay.deferred._tensor import FakeTensor
from torchrelay.errors import UnsupportedError

__all__ = ["as_returned", "check_sizes", "fakes_in", "shapes_of", "written_by"]


def shapes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of ``func`` on meta tensors. Read only: results are cached."""
    try:
        operator = describe(func)
        by_kind = operator.slices
        key = (operator.name, torch.get_default_dtype(), _key(args, by_kind), _key(kwargs, by_kind))
        found = _known.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _shapes_of(func, args, kwargs)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = _shapes_of(func, args, kwargs)
    return found


_known: dict[Any, Any] = {}
_MOST_KNOWN = 2000


def _key(value: Any, by_kind: bool) -> Any:
    """Return what the shapes of results depend on, with types: 1, 1.0 and True are equal.

    Args:
        by_kind: of a float, only its type, as for operations that work element by element.
    """
    kind = type(value)
    if isinstance(value, FakeTensor):
        return value._region.layout()
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.stride(), value.device)
    if kind in (tuple, list):
        return (kind, *[_key(item, by_kind) for item in value])
    if kind is dict:
        return tuple(
            (name, _key(item, by_kind)) for name, item in value.items() if name != "generator"
        )
    return kind if by_kind and kind is float else (kind, value)


def _shapes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:

    def shadow(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor):
            return value._region.meta()
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

    meta_kwargs = {key: map_tensors(value, torch.Tensor, shadow) for key, value in kwargs.items()}
    if "generator" in kwargs:
        meta_kwargs["generator"] = None  # nothing is drawn
    if "device" in meta_kwargs or (describe(func).is_factory and describe(func).takes_device):
        meta_kwargs["device"] = torch.device("meta")
    meta_kwargs.pop("pin_memory", None)
    name = describe(func).name
    with _torch.plain_torch():
        if name.startswith(_LAID_OUT_BY_DEVICE):
            return _torch.results_on_device(func, args, meta_kwargs, shadow)
        results = func(*map_tensors(args, torch.Tensor, shadow), **meta_kwargs)
        return (
            map_tensors(results, torch.Tensor, _row_by_row)
            if name in _LAID_OUT_IN_ROWS
            else results
        )


def _row_by_row(result: torch.Tensor) -> torch.Tensor:
    channels_last = torch.channels_last if result.dim() == 4 else torch.channels_last_3d
    if result.dim() in (4, 5) and result.is_contiguous(memory_format=channels_last):
        return result
    return result.contiguous()


# The meta kernels of these keep the strides of their argument; those of the CPU do not. Found by
# comparing the two over torch's database of operators. It matters: random numbers are drawn in the
# order of the strides.
_LAID_OUT_IN_ROWS = {
    "aten::_batch_norm_with_update", "aten::_native_batch_norm_legit", "aten::native_batch_norm",
    "aten::_standard_gamma", "aten::log_sigmoid_forward", "aten::normal.Tensor_Tensor",
    "aten::normal.float_Tensor", "aten::poisson", "aten::rrelu_with_noise",
}  # fmt: skip


# The meta kernels of linear algebra lay results out as CUDA does, unless they know better.
_LAID_OUT_BY_DEVICE = (
    "aten::linalg_",
    "aten::_linalg_",
    "aten::svd",
    "aten::qr",
    "aten::lu",
    "aten::cholesky",
    "aten::_embedding_bag",
)


def check_sizes(func: Any, results: Any, written: list[Any]) -> None:
    """Raise :class:`UnsupportedError` if a result does not fit its destination."""
    for result, target in zip(flat(results), written, strict=False):
        if result is not None and result.shape != target.shape:
            raise UnsupportedError(
                f"{func} resizes its out argument of shape {tuple(target.shape)} to "
                f"{tuple(result.shape)}, which is not recorded. Give it one of the right shape."
            )


def fakes_in(*values: Any) -> list[FakeTensor]:
    """Return the fake tensors in ``values``, through lists, tuples and dicts."""
    found: list[FakeTensor] = []
    for value in values:
        if isinstance(value, FakeTensor):
            found.append(value)
        elif type(value) in (tuple, list):
            found += fakes_in(*value)
        elif type(value) is dict:
            found += fakes_in(*value.values())
    return found


def written_by(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that a call writes, also fake ones, in the order of its arguments."""
    found: list[Any] = []
    for place in operator.written:
        if isinstance(place, str):
            value = kwargs.get(place)
        else:
            value = args[place] if place < len(args) else None
        found += value if isinstance(value, (tuple, list)) else [value]
    return [tensor for tensor in found if tensor is not None]


def as_returned(func: Any, written: list[Any]) -> Any:
    """Return what ``func`` returns if it returns the arguments that it writes."""
    count = len(func._schema.returns)
    if not written or count == 0:
        return None
    return written[0] if count == 1 else tuple(written)
