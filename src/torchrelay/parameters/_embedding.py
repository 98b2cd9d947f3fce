"""Counterparts of :class:`torch.nn.Embedding` and :class:`torch.nn.EmbeddingBag` over a table.

The forward pass pulls each row of the batch once. The backward pass stores their gradient in the
parameter ``weight``, which represents the table's rows, until :meth:`Table.optimizer` steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from typing_extensions import Self, Unpack

from torchrelay import _torch
from torchrelay._names import names_options
from torchrelay.deferred import is_deferred, materialize_tensor
from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError
from torchrelay.parameters import _checkpoint
from torchrelay.parameters._arrays import describe
from torchrelay.parameters._contract import KeyInit
from torchrelay.parameters._lookup import Lookup, look_up
from torchrelay.parameters._table import Table, TableOptions
from torchrelay.parameters._weight import TableWeight
from torchrelay.parameters.optim import adagrad

__all__ = ["Embedding", "EmbeddingBag"]


class _TableModule(nn.Module):
    """Common base: the table, its weight, and the rows of a batch.

    Attributes:
        counterpart: the class of torch with the same arguments.
    """

    counterpart: ClassVar[Any]
    weight: TableWeight
    # Whether state_dict() holds this process's share of the rows, for DCP, instead of all rows.
    sharded_state_dict = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        rows: Tensor | None,
        device: Any,
        dtype: torch.dtype | None,
        table: Table | None,
        new: TableOptions,
    ) -> None:
        """Use ``table``, or create one with the options ``new``; set all rows to ``rows``."""
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(f"padding_idx = {padding_idx}: there are {num_embeddings} rows")
        if device is not None and torch.device(device).type != "cpu":
            raise ArgumentError(
                f"device = {device}: a table's rows are in host memory; leave device out: "
                "looked-up rows come to the device of the keys"
            )
        shape = num_embeddings, embedding_dim
        if rows is not None and tuple(rows.shape) != shape:
            raise ArgumentError(f"the given rows are {tuple(rows.shape)}, not {shape}")
        if rows is not None and is_deferred(rows):
            rows = materialize_tensor(rows)
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.owns_table = table is None
        options: dict[str, Any] = {"dtype": dtype, **new}
        options = {name: value for name, value in options.items() if value is not None}
        if table is None:
            defaults: dict[str, Any] = {
                "optimizer": adagrad(),
                "init": KeyInit() if rows is not None else KeyInit("normal", 0.0, 1.0),
                "dtype": torch.get_default_dtype() if rows is None else rows.dtype,
            }
            table = Table.create(*shape, **(defaults | options))
        else:
            _check_table(table, shape, options)
        self.table = table
        self.num_embeddings, self.embedding_dim = table.num_keys, table.dim
        if max_norm is not None and table.workers > 1 and table.gradients.apply == "backward":
            self.close()
            raise UnsupportedError(
                "max_norm with apply_gradients='backward' on several processes: a row that one "
                "scales down loses what others push to it meanwhile; leave apply_gradients out "
                "and step table.optimizer(), or leave max_norm out"
            )
        self.register_parameter("weight", table.weight)
        self._lookup = Lookup(table, self.padding_idx, max_norm, norm_type, scale_grad_by_freq)
        with _torch.plain_torch():  # a table has memory, also inside deferred_init
            if rows is not None:
                table.load_state_dict({"weight": rows})
            elif self.owns_table:
                self._zero_padding()
                table.sync()

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, *args: Any, **options: Any) -> Self:
        """Create a module over a table with the rows ``embeddings``.

        Args:
            embeddings: of shape ``(num_embeddings, embedding_dim)``, equal on every process.
            *args: as for torch's ``from_pretrained``; ``freeze`` is the first, True by default.
            **options: the same by name, and further arguments of the class.
        """
        signature = inspect.signature(cls.counterpart.from_pretrained)
        torchs = {name: options.pop(name) for name in signature.parameters if name in options}
        given = signature.bind(embeddings, *args, **torchs).arguments
        rows, freeze = given.pop("embeddings"), given.pop("freeze", True)
        make: Any = cls
        module: Self = make(*rows.shape, _weight=rows, **given, **options)
        module.weight.requires_grad_(not freeze)
        return module

    def to_torch(self) -> Any:
        """Return a module of torch's class with a copy of the rows, in the weight's dtype.

        A module over a table can load its state dict.
        """
        rows = self.table.pull(np.arange(self.num_embeddings))
        arguments = {name: getattr(self, name) for name in self.counterpart.__constants__}
        module = self.counterpart(**arguments, _weight=rows.to(self.table.lookup_dtype))
        module.weight.requires_grad_(self.weight.requires_grad)
        return module

    @property
    def rows(self) -> TableWeight:
        """The weight, under the name of the rows in state dicts, which DCP looks up."""
        return self.weight

    def close(self) -> None:
        """Leave the table if this module created it. Collective."""
        if self.owns_table:
            self.table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.owns_table:
            self.table.__exit__(kind, error, trace)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all rows anew by the table's ``init``, from torch's generator. Collective."""
        start, end = _checkpoint.key_range(
            self.num_embeddings, self.table.worker_index, self.table.workers
        )
        # The processes' generators may have the same seed, and must not draw the same rows.
        seed = (
            int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            + self.table.worker_index
        )
        init = self.table._open_worker.server.init
        fill = {"uniform": nn.init.uniform_, "normal": nn.init.normal_}.get(init.kind)
        with _torch.plain_torch():
            shape, dtype = (end - start, self.embedding_dim), self.table.dtype
            rows = torch.full(shape, init.a, dtype=dtype, device="cpu")
            if fill:
                fill(rows, init.a, init.b, torch.Generator(rows.device).manual_seed(seed))
        self.table.sync()  # earlier pushes are not applied to the new rows
        self.table.set(np.arange(start, end), rows)
        self.table.sync()
        self._zero_padding()
        self.table.sync()

    def _zero_padding(self) -> None:
        if self.padding_idx is not None and self.table.worker_index == 0:
            self.table.set(self.padding_idx, [0] * self.table.dim)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters, except to wrappers that ask for a module's own ones.

        DistributedDataParallel and ``fully_shard`` thus skip the weight, which the table
        synchronises.
        """
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        model = _torch.model_of_ddp_being_made()
        if model is not None and all(isinstance(p, TableWeight) for p in model.parameters()):
            raise UnsupportedError(
                "DistributedDataParallel has nothing to do: all parameters of the model are "
                "tables, which sum the gradients of all processes themselves; use the model as it "
                "is"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Let the weight have the device and dtype that the model was moved to; rows stay."""

        def apply(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, TableWeight):
                return fn(tensor)
            applied = fn(tensor.stand_in())
            if applied.is_meta:
                raise UnsupportedError(
                    f"{type(self).__name__} over a table cannot go to the device meta: its rows "
                    "stay in host memory; put to_torch() in the module's place"
                )
            return applied

        moved = super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        self.table.lookup_dtype = self.weight.dtype
        return moved

    def _look_up(self, keys: Any) -> tuple[Tensor, Tensor | None]:
        """Return rows, and where those of ``keys`` are among them; see :func:`look_up`."""
        is_traced = torch.jit.is_tracing() or isinstance(keys, fx.Proxy)  # type: ignore[no-untyped-call]
        if is_traced or torch.compiler.is_exporting():
            raise self._no_export()
        if not torch.compiler.is_compiling():  # which cannot replace a weight either
            if not isinstance(keys, Tensor) or keys.layout is not torch.strided:
                raise ArgumentError(
                    "keys must be a dense tensor, e.g. torch.tensor([1, 2]), not a "
                    f"{describe(keys)}"
                )
            if not isinstance(self._parameters.get("weight"), TableWeight):
                raise UnsupportedError(
                    "a wrapper has replaced the weight of a table, whose gradients would be lost; "
                    "exclude this module from it, e.g. FullyShardedDataParallel(..., "
                    "ignored_modules=[embedding])"
                )
            if _torch.transforms_active():
                raise UnsupportedError(
                    "torch.func does not differentiate lookups in a table; use backward()"
                )
        return look_up(self._lookup, keys)

    def _no_export(self) -> UnsupportedError:
        return UnsupportedError(
            f"an exported or traced program would have none of the rows of {type(self).__name__}, "
            "which the processes of a job share: put to_torch() in the module's place, which has "
            "them in a torch module of its own"
        )

    def __prepare_scriptable__(self) -> Any:
        raise self._no_export()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "rows"] = (
            self.table.state_dict()["rows"] if self.sharded_state_dict else self.table.rows()
        )

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
        ours = {key[len(prefix) :] for key in state_dict if key.startswith(prefix)}
        if strict:
            unexpected_keys.extend(prefix + name for name in ours - {"rows", "weight"})
        name = next((name for name in ("rows", "weight") if name in ours), None)
        if name is None:
            missing_keys.append(prefix + "rows")
            return
        try:
            self.table.load_state_dict({name: state_dict[prefix + name]})
        except MismatchError as error:
            error_msgs.append(f"{prefix}{name}: {error}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"{type(self).__name__} over a table cannot be copied or pickled: the processes of a "
            "job share its rows. Save the model's state_dict(); for a copy, an average (EMA) or "
            "inference elsewhere, put to_torch() in the module's place: it has the rows in a torch "
            "module of its own"
        )

    def extra_repr(self) -> str:
        parts = [f"{self.num_embeddings}, {self.embedding_dim}, optimizer={self.table.rule.kind}"]
        options = {"padding_idx": self.padding_idx, "max_norm": self.max_norm}
        parts += [f"{name}={value}" for name, value in options.items() if value is not None]
        return ", ".join(parts)


def _check_table(table: Table, shape: tuple[int, int], options: dict[str, Any]) -> None:
    if (table.num_keys, table.dim) != shape:
        raise ArgumentError(
            f"the table holds {table.num_keys} vectors of {table.dim}, not {shape[0]} of {shape[1]}"
        )
    given = [name for name, value in options.items() if value != getattr(table, name, None)]
    if given:
        raise ArgumentError(
            f"{', '.join(given)}: only for a new table; the one that was given has its own"
        )


class Embedding(_TableModule):
    """A :class:`torch.nn.Embedding` over a table. Arguments not listed are torch's.

    Args:
        sparse: has no effect: gradients are always those of the rows that were looked up.
        device: must be the CPU, which holds the rows.
        table: an existing table; default: a new one, which all processes create.
        **new: options of the new table, as for :meth:`Table.create`: ``optimizer`` (default:
            Adagrad), ``init`` (default: standard normal, as torch's), ``name``,
            ``apply_gradients``, ``reduction`` and ``process_group``.

    Raises:
        ArgumentError: the table has another shape, or adds pushes instead of optimizing.
    """

    counterpart = nn.Embedding

    @names_options(*TableOptions.__annotations__)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        table: Table | None = None,
        **new: Unpack[TableOptions],
    ) -> None:
        torchs = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight
        super().__init__(num_embeddings, embedding_dim, *torchs, device, dtype, table, new)
        if _freeze:
            self.weight.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``(*input.shape, embedding_dim)`` on the device of ``input``, integer keys, in
        the dtype of ``weight``.
        """
        rows, index = self._look_up(input)
        if index is not None:
            rows = rows.index_select(0, index.flatten()).view(*input.shape, self.embedding_dim)
        return rows.to(self.table.lookup_dtype)


class EmbeddingBag(_TableModule):
    """A :class:`torch.nn.EmbeddingBag` over a table. Further arguments as for :class:`Embedding`.

    Args:
        mode: ``sum``, ``mean`` or ``max``.
        include_last_offset: ``offsets`` ends with the number of keys, as in CSR.
    """

    counterpart = nn.EmbeddingBag

    @names_options(*TableOptions.__annotations__)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        table: Table | None = None,
        **new: Unpack[TableOptions],
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ArgumentError(f"mode = {mode!r}: it must be 'sum', 'mean' or 'max'")
        if mode == "max" and scale_grad_by_freq:
            raise UnsupportedError("torch does not scale gradients by frequency in mode 'max'")
        torchs = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight
        super().__init__(num_embeddings, embedding_dim, *torchs, device, dtype, table, new)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return ``(bags, embedding_dim)``: the rows of each bag, reduced by ``mode``.

        Args:
            input: integer keys, ``(bags, n)``, or ``(n,)`` with ``offsets``.
            offsets: ``(bags,)``, the start of each bag.
            per_sample_weights: of the shape of ``input``, for mode ``sum``; receives a gradient.
        """
        rows, index = self._look_up(input)
        # For a dense gradient, torch sorts the index.
        sparse = index is not None and self.mode != "max" and self.padding_idx is None
        if index is None:
            rows = rows.reshape(-1, self.embedding_dim)
            index = torch.arange(len(rows), device=input.device).view(input.shape)
        padding = None
        if self.padding_idx is not None:
            # Padding has no place in a bag: all of it becomes one row to skip.
            padding = len(rows)
            index = torch.where(input == self.padding_idx, padding, index)
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        bags = functional.embedding_bag(
            index,
            rows,
            None if offsets is None else offsets.to(index.dtype),
            mode=self.mode,
            sparse=sparse,
            per_sample_weights=(
                None if per_sample_weights is None else per_sample_weights.to(rows.dtype)
            ),
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
        return bags.to(self.table.lookup_dtype)
