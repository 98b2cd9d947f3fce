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
from torchrelay.errors import ArgumentError, UnavailableError, UnsupportedError
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
        return self.rows_of(keys, *_distinct(keys))

    def rows_of(self, keys: Tensor, unique: Tensor, inverse: Tensor) -> Tensor:
        """Return the rows of ``keys``. Each distinct key is pulled once."""
        if self.max_norm is not None:
            self._renormalize(unique, self.max_norm)
        rows = self.table.pull(unique).to(keys.device)
        return rows.index_select(0, inverse).reshape(*keys.shape, self.table.dim)

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
        """Add a gradient of the rows of ``unique[inverse]``, ``(n, dim)``, to that of the table.

        Args:
            unique: distinct keys, ascending, ``(m,)``.
            inverse: indices into ``unique``, ``(n,)``.
        """
        gradient = gradient.reshape(-1, self.table.dim).to(self.table.dtype)
        if self.scale_grad_by_freq:
            gradient = gradient / inverse.bincount()[inverse].unsqueeze(1)
        rows = gradient.new_zeros(len(unique), self.table.dim).index_add_(0, inverse, gradient)
        if self.padding_idx is not None:
            kept = unique != self.padding_idx
            unique, rows = unique[kept], rows[kept]
        self.table.gradients.add(unique, rows)


def _distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct keys, ascending, and the index of each key among them, ``(n,)``."""
    if keys.is_floating_point() or keys.dtype is torch.bool:
        raise ArgumentError(f"keys are {keys.dtype}; they must be integers")
    unique, inverse = torch.unique(keys, return_inverse=True)
    return unique, inverse.reshape(-1)


def look_up(lookup: Lookup, keys: Tensor) -> Tensor:
    """Return the rows of ``keys``, whose gradient goes to the table's weight."""
    # is_compiling() comes first: torch.compile does not trace the rest.
    if (
        torch.compiler.is_compiling()
        or _torch.watched()
        or keys.is_meta
        or _torch.dispatches_itself(keys)
    ):
        rows: Tensor = _rows(keys, lookup.anchor, lookup.number)
    else:
        rows = _EagerRows.apply(keys, lookup.anchor, lookup)  # type: ignore[no-untyped-call]
    return rows


class _EagerRows(torch.autograd.Function):
    """The same as the operator. The backward pass reuses the distinct keys of the forward pass."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, anchor: Tensor, lookup: Lookup) -> Tensor:
        unique, inverse = _distinct(keys)
        ctx.lookup = lookup
        ctx.save_for_backward(unique, inverse)
        return lookup.rows_of(keys, unique, inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        _refuse_graph()
        ctx.lookup.add_gradient(*ctx.saved_tensors, gradient)
        return None, torch.empty(0), None


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
    _lookup(lookup).add_gradient(*_distinct(keys), gradient)
    return torch.empty(0)


@_gradient.register_fake
def _(keys: Tensor, gradient: Tensor, lookup: int) -> Tensor:
    return torch.empty(0)


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
