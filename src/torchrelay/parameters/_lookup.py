"""Lookups in a table, which autograd differentiates: as operators of ``torch.library``, which
``torch.compile`` keeps, and without their dispatch where nothing records or replaces operators.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.errors import UnavailableError, UnsupportedError
from torchrelay.parameters._arrays import check_integers, check_range, sum_rows
from torchrelay.parameters._table import Table

__all__ = ["Lookup", "look_up"]

_numbers = itertools.count()
_lookups: weakref.WeakValueDictionary[int, Lookup] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Lookup:
    """How a module looks rows up; ``number`` identifies it in a compiled graph."""

    table: Table
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    number: int = field(default_factory=lambda: next(_numbers))
    anchor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "anchor", self.table.gradients.anchor)
        _lookups[self.number] = self

    def rows(self, keys: Tensor) -> Tensor:
        """Return the rows of ``keys``, ``(*keys.shape, dim)`` on their device."""
        unique, inverse = _distinct(keys, self.table.num_keys)
        rows = self.distinct_rows(unique).index_select(0, inverse)
        return rows.view(*keys.shape, self.table.dim)

    def distinct_rows(self, unique: Tensor) -> Tensor:
        """Return the rows of distinct keys, ``(m, dim)`` on their device."""
        if self.max_norm is not None:
            self._renormalize(unique, self.max_norm)
        return self.table.pull(unique).to(unique.device)

    def _renormalize(self, keys: Tensor, max_norm: float) -> None:
        """Scale rows in the table down to ``max_norm``, as torch does before each lookup."""
        values = self.table.pull(keys)
        # In float32 at least, as torch.
        norms = values.to(torch.promote_types(values.dtype, torch.float32)).norm(
            self.norm_type, dim=1
        )
        long = norms > max_norm
        if long.any():
            scale = max_norm / (norms[long] + 1e-7)
            self.table.set(keys.cpu()[long], (values[long] * scale.unsqueeze(1)).to(values.dtype))

    def add_gradient(self, unique: Tensor, inverse: Tensor, gradient: Tensor) -> None:
        """Add the gradient of the rows of distinct keys to that of the table.

        Args:
            unique: the keys, ascending, ``(m,)``.
            inverse: indices of the keys that were looked up among them, ``(n,)``.
            gradient: of each distinct row, the sum, ``(m, dim)``.
        """
        gradient = gradient.to(self.table.dtype)
        if self.scale_grad_by_freq:
            gradient = gradient / inverse.bincount().unsqueeze(1)
        if self.padding_idx is not None:
            kept = unique != self.padding_idx
            unique, gradient = unique[kept], gradient[kept]
        self.table.gradients.add(unique, gradient)


# From so many keys on, in a table of at most so many times as many, marking is faster than sorting.
_MARKED_KEYS, _MARKED_SHARE = 2048, 16


def _distinct(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return the distinct keys, ascending, and the index of each key among them, ``(n,)``."""
    check_integers(keys)
    if keys.is_cpu and keys.numel() >= max(_MARKED_KEYS, num_keys // _MARKED_SHARE):
        flat = keys.reshape(-1).to(torch.int64)
        least, most = flat.aminmax()
        if least >= 0 and most < num_keys:  # others are reported below
            is_used = keys.new_zeros(num_keys, dtype=torch.bool).index_fill_(0, flat, True)
            unique = is_used.nonzero().flatten()
            place = flat.new_empty(num_keys)
            place.index_copy_(0, unique, torch.arange(len(unique), device="cpu"))
            return unique, place.index_select(0, flat)
    unique, inverse = torch.unique(keys, return_inverse=True)
    if len(unique) and not (unique[0].item() >= 0 and unique[-1].item() < num_keys):
        check_range(keys, num_keys)
    return unique, inverse.reshape(-1)


def look_up(lookup: Lookup, keys: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return rows, whose gradient goes to the table's weight, and where those of ``keys`` are.

    Returns:
        The distinct rows, ``(m, dim)``, and the index of each key's row, of the shape of ``keys``;
        or the rows of all keys, ``(*keys.shape, dim)``, and None, where something else runs or
        records operators: ``torch.compile``, a profiler, a dispatch mode.
    """
    # is_compiling() comes first: torch.compile does not trace the rest.
    if (
        torch.compiler.is_compiling()
        or _torch.watched()
        or keys.is_meta
        or _torch.dispatches_itself(keys)
    ):
        return _rows(keys, lookup.anchor, lookup.number), None
    unique, inverse = _distinct(keys, lookup.table.num_keys)
    rows: Tensor = _DistinctRows.apply(unique, inverse, lookup.anchor, lookup)  # type: ignore[no-untyped-call]
    return rows, inverse.view(keys.shape)


class _DistinctRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, unique: Tensor, inverse: Tensor, anchor: Tensor, lookup: Lookup
    ) -> Tensor:
        ctx.lookup = lookup
        ctx.save_for_backward(unique, inverse)
        return lookup.distinct_rows(unique)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, None]:
        _refuse_graph()
        if gradient.is_sparse:  # of embedding_bag; to_dense() would sort its rows
            gradient = sum_rows(gradient._indices()[0], gradient._values(), len(gradient))
        ctx.lookup.add_gradient(*ctx.saved_tensors, gradient)
        return None, None, torch.empty(0, device="cpu"), None


def _lookup(number: int) -> Lookup:
    found = _lookups.get(number)
    if found is None:
        raise UnavailableError("the module that looked these rows up does not exist any more")
    return found


@torch.library.custom_op("torchrelay::table_rows", mutates_args=())
def _rows(keys: Tensor, anchor: Tensor, lookup: int) -> Tensor:
    return _lookup(lookup).rows(keys)


@_rows.register_fake
def _(keys: Tensor, anchor: Tensor, lookup: int) -> Tensor:
    table = _lookup(lookup).table
    return keys.new_empty((*keys.shape, table.dim), dtype=table.dtype)


@torch.library.custom_op("torchrelay::table_gradient", mutates_args=())
def _gradient(keys: Tensor, gradient: Tensor, lookup: int) -> Tensor:
    table = _lookup(lookup).table
    unique, inverse = _distinct(keys, table.num_keys)
    rows = sum_rows(inverse, gradient.reshape(-1, table.dim), len(unique))
    _lookup(lookup).add_gradient(unique, inverse, rows)
    return torch.empty(0, device="cpu")


@_gradient.register_fake
def _(keys: Tensor, gradient: Tensor, lookup: int) -> Tensor:
    return torch.empty(0, device="cpu")


def _refuse_graph() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "backward(create_graph=True): the gradient of a table's rows has no graph of its own; "
            "take torch.autograd.grad with respect to other tensors, or call backward() without "
            "create_graph"
        )


def _keep_keys(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    keys, _, number = inputs
    ctx.lookup = _lookup(number)  # the backward pass may outlive the module
    ctx.save_for_backward(keys)


def _backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
    _refuse_graph()
    (keys,) = ctx.saved_tensors
    return None, _gradient(keys, gradient, ctx.lookup.number), None


_rows.register_autograd(_backward, setup_context=_keep_keys)
# Else the compiler runs equal calls once, and drops those whose empty results are added.
_torch.make_ordered(_gradient)
