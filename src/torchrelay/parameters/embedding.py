"""Drop-in relatives of :class:`torch.nn.Embedding` and :class:`torch.nn.EmbeddingBag` whose rows live in a table.

The forward pass pulls the rows that the batch names, each once; the backward pass pushes their gradients, which
the table's optimizer applies where the rows are. The modules have no parameters: neither a torch optimizer nor
DDP has anything to do for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError
from torchrelay.parameters.contract import KeyInit, UpdateRule
from torchrelay.parameters.optim import adagrad
from torchrelay.parameters.table import Table

__all__ = ["Embedding", "EmbeddingBag"]


class _PulledRows(torch.autograd.Function):
    """Rows of a table as a leaf: their gradient is pushed instead of returned."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, table: Table, keys: Tensor, padding_idx: int | None) -> Tensor:
        ctx.table, ctx.keys, ctx.padding_idx = table, keys, padding_idx
        return table.pull(keys).to(keys.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        table: Table = ctx.table
        keys = ctx.keys
        if ctx.padding_idx is not None:  # weight decay and momentum would move it without a gradient
            kept = keys != ctx.padding_idx
            keys, gradient = keys[kept], gradient[kept]
        table.push(keys, gradient.to("cpu", table.dtype), wait=False)
        return None, None, None, None


@dataclass(frozen=True)
class _Lookup:
    """How rows are looked up, in torch's words."""

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool


@dataclass(frozen=True)
class _Source:
    """Where the rows are: in ``table``, or in a new one."""

    table: Table | None
    optimizer: UpdateRule | None
    init: KeyInit | None
    dtype: torch.dtype
    name: str

    def open(self, num_embeddings: int, embedding_dim: int) -> Table:
        return self.table or Table.create(
            num_embeddings,
            embedding_dim,
            dtype=self.dtype,
            optimizer=self.optimizer or adagrad(),
            init=self.init or KeyInit("normal", 0.0, 1.0),
            name=self.name,
        )


class _TableModule(nn.Module):
    """What :class:`Embedding` and :class:`EmbeddingBag` share: the table, and rows for a batch."""

    def __init__(self, num_embeddings: int, embedding_dim: int, lookup: _Lookup, source: _Source) -> None:
        super().__init__()
        padding_idx = lookup.padding_idx
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(f"padding_idx = {padding_idx}: there are {num_embeddings} rows")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm = lookup.max_norm
        self.norm_type = lookup.norm_type
        self.scale_grad_by_freq = lookup.scale_grad_by_freq
        self.trainable = True
        self.owns_table = source.table is None
        self.table = source.open(num_embeddings, embedding_dim)
        if self.owns_table and self.padding_idx is not None:
            self._zero_row(self.padding_idx)
        if (self.table.num_keys, self.table.dim) != (num_embeddings, embedding_dim):
            raise ArgumentError(
                f"the table holds {self.table.num_keys} vectors of {self.table.dim}, not {num_embeddings} of {embedding_dim}"
            )
        if self.table.rule.kind == "add":
            raise ArgumentError(
                "the table adds what is pushed, so gradients would lead uphill; create it with an optimizer, "
                "e.g. optimizer=torchrelay.parameters.optim.adagrad(0.1)"
            )
        # Autograd follows a function only if an input wants a gradient.
        self._anchor = torch.empty(0, requires_grad=True)

    def close(self) -> None:
        """Leaves the table, if this module made it; collective."""
        if self.owns_table:
            self.table.close()

    def _zero_row(self, key: int) -> None:
        if self.table.worker_index == 0:
            self.table.set(torch.tensor([key]), torch.zeros(1, self.table.dim, dtype=self.table.dtype))
        self.table.worker.barrier()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _rows(self, keys: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """The distinct rows of ``keys``, each key's row among them, and the padding's row if it is there."""
        if keys.is_floating_point() or keys.dtype is torch.bool:
            raise ArgumentError(f"keys are {keys.dtype}; they must be integers")
        unique, index = torch.unique(keys, return_inverse=True)
        if self.max_norm is not None:
            self._renormalise(unique)
        if self.trainable and torch.is_grad_enabled():
            rows = _PulledRows.apply(self._anchor, self.table, unique, self.padding_idx)  # type: ignore[no-untyped-call]
        else:
            rows = self.table.pull(unique).to(keys.device)
        padding = None
        if self.padding_idx is not None:
            at = int(torch.searchsorted(unique, self.padding_idx))
            padding = at if at < len(unique) and int(unique[at]) == self.padding_idx else None
        return rows, index, padding

    def _renormalise(self, keys: Tensor) -> None:
        """Scales rows in the table down to ``max_norm``, as torch does before each lookup."""
        assert self.max_norm is not None
        values = self.table.pull(keys)
        norms = values.float().norm(self.norm_type, dim=1)
        long = norms > self.max_norm
        if long.any():
            scale = self.max_norm / (norms[long] + 1e-7)
            self.table.set(keys.cpu()[long], (values[long] * scale.unsqueeze(1)).to(values.dtype))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "rows"] = self.table.state_dict()["rows"]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "rows"
        if key not in state_dict:
            missing_keys.append(key)
            return
        try:
            self.table.load_state_dict({"rows": state_dict[key]})
        except MismatchError as error:
            error_msgs.append(f"{key}: {error}")

    def extra_repr(self) -> str:
        parts = [f"{self.num_embeddings}, {self.embedding_dim}", f"optimizer={self.table.rule.kind}"]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.max_norm is not None:
            parts.append(f"max_norm={self.max_norm}")
        return ", ".join(parts)


class Embedding(_TableModule):
    """As :class:`torch.nn.Embedding`, over a table; arguments that are not listed are torch's.

    Args:
        table: an existing table to look up in; default: a new one.
        optimizer: of the new table, see :mod:`torchrelay.parameters.optim`; default: Adagrad.
        init: of the new table; default: standard normal, as torch's.
        name: tells the tables of one job apart.

    Raises:
        ArgumentError: the table has another shape, or adds pushes instead of optimizing.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        *,
        table: Table | None = None,
        optimizer: UpdateRule | None = None,
        init: KeyInit | None = None,
        dtype: torch.dtype = torch.float32,
        name: str = "embedding",
    ) -> None:
        lookup = _Lookup(padding_idx, max_norm, norm_type, scale_grad_by_freq)
        source = _Source(table, optimizer, init, dtype, name)
        super().__init__(num_embeddings, embedding_dim, lookup, source)

    def forward(self, keys: Tensor) -> Tensor:
        """``(*keys.shape, embedding_dim)`` in the table's dtype, on the device of ``keys`` (integers)."""
        rows, index, padding = self._rows(keys)
        return functional.embedding(index, rows, padding, scale_grad_by_freq=self.scale_grad_by_freq)


class EmbeddingBag(_TableModule):
    """As :class:`torch.nn.EmbeddingBag`, over a table; further arguments as of :class:`Embedding`.

    Args:
        mode: ``sum``, ``mean`` or ``max``.
        include_last_offset: ``offsets`` ends with the number of keys, as in CSR.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        table: Table | None = None,
        optimizer: UpdateRule | None = None,
        init: KeyInit | None = None,
        dtype: torch.dtype = torch.float32,
        name: str = "embedding_bag",
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ArgumentError(f"mode = {mode!r}: it must be 'sum', 'mean' or 'max'")
        if mode == "max" and scale_grad_by_freq:
            raise UnsupportedError("torch does not scale gradients by frequency in mode 'max'")
        lookup = _Lookup(padding_idx, max_norm, norm_type, scale_grad_by_freq)
        source = _Source(table, optimizer, init, dtype, name)
        super().__init__(num_embeddings, embedding_dim, lookup, source)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, keys: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """``(bags, embedding_dim)``: each bag's rows, reduced by ``mode``.

        Args:
            keys: integers, ``(bags, n)``, or ``(n,)`` with ``offsets`` ``(bags,)`` saying where bags begin.
            per_sample_weights: of the shape of ``keys``, for mode ``sum``; receives a gradient.
        """
        rows, index, padding = self._rows(keys)
        return functional.embedding_bag(
            index,
            rows,
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
