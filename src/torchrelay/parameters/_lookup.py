"""Lookups in a table as operators of ``torch.library``, which autograd differentiates and
``torch.compile`` keeps.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
        """Return the rows of ``keys``, ``(*keys.shape, dim)`` on their device.

        Each distinct key is pulled once.
        """
        if keys.is_floating_point() or keys.dtype is torch.bool:
            raise ArgumentError(f"keys are {keys.dtype}; they must be integers")
        unique, inverse = torch.unique(keys, return_inverse=True)
        if self.max_norm is not None:
            self._renormalize(unique, self.max_norm)
        rows = self.table.pull(unique).to(keys.device)
        return rows.index_select(0, inverse.reshape(-1)).reshape(*keys.shape, self.table.dim)

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

    def add_gradient(self, keys: Tensor, gradient: Tensor) -> None:
        """Add a gradient of rows of ``keys``, ``(*keys.shape, dim)``, to that of the table."""
        keys, gradient = keys.reshape(-1), gradient.reshape(-1, self.table.dim).to(self.table.dtype)
        if self.padding_idx is not None:
            kept = keys != self.padding_idx
            keys, gradient = keys[kept], gradient[kept]
        if self.scale_grad_by_freq:
            _, inverse, counts = torch.unique(keys, return_inverse=True, return_counts=True)
            gradient = gradient / counts[inverse].unsqueeze(1)
        self.table.gradients.add(keys, gradient)


def look_up(lookup: Lookup, keys: Tensor) -> Tensor:
    """Return the rows of ``keys``, whose gradient goes to the table's weight."""
    rows: Tensor = _rows(keys, lookup.anchor, lookup.number)
    return rows


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
    _lookup(lookup).add_gradient(keys, gradient)
    return torch.empty(0)


@_gradient.register_fake
def _(keys: Tensor, gradient: Tensor, lookup: int) -> Tensor:
    return torch.empty(0)


def _keep_keys(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    keys, _, number = inputs
    ctx.lookup = _lookup(number)  # the backward pass may outlive the module
    ctx.save_for_backward(keys)


def _backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "backward(create_graph=True): the gradient of a table's rows has no graph of its own; "
            "take torch.autograd.grad with respect to other tensors, or call backward() without "
            "create_graph"
        )
    (keys,) = ctx.saved_tensors
    return None, _gradient(keys, gradient, ctx.lookup.number), None


_rows.register_autograd(_backward, setup_context=_keep_keys)
