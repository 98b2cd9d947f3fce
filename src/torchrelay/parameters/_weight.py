"""A table's rows as autograd, optimizers and wrappers see them: a parameter, and the gradient of
its rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchrelay import _torch
from torchrelay.errors import ArgumentError, UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from torchrelay.parameters._table import Table

__all__ = ["TableWeight", "sum_by_key"]

# What modules, wrappers and optimizers query of parameters that they do not change.
_ALLOWED = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "is_contiguous",
        "data_ptr",
        "untyped_storage",
        "storage_offset",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_inference",
        "is_pinned",
        "is_shared",
        "_has_compatible_shallow_copy_type",
    ]
)
# Attributes that are tensors, which would have no elements either.
_TENSORS = frozenset(("T", "mT", "H", "mH", "real", "imag"))
_FILLS = frozenset(("copy_", "fill_", "normal_", "uniform_", "zero_", "__setitem__"))
_INSTEAD = (
    "Look rows up with the module, read and write them with table.pull and table.set, and step "
    "them with table.optimizer(); give torch's optimizers the other parameters"
)
_INITIALIZE = (
    "Pass init= when the table is created; or initialise a tensor of shape (num_keys, dim) and "
    "pass it to table.load_state_dict({'weight': tensor}) on every process"
)


class TableWeight(nn.Parameter):
    """Stands for the rows of a table among a model's parameters. It has no elements: shape ``(0,
    dim)``.

    ``grad`` holds the gradients of the rows looked up since it was cleared, summed over lookups and
    backward passes: ``(n, dim)``, dense, in the table's dtype, for the ``keys`` ``(n,)``, ascending
    int64. So clipping, scaling and logging work on it;
    :class:`~torchrelay.parameters.TableOptimizer` applies it.
    """

    anchor: Tensor
    _table: weakref.ref[Table]
    _keys: Tensor | None
    _gradient: Tensor | None
    _pending: dict[int, list[tuple[Tensor, Tensor]]]

    def __new__(cls, table: Table) -> TableWeight:
        empty = torch.empty(0, table.dim, dtype=table.dtype)
        self: TableWeight = torch.Tensor._make_subclass(cls, empty, True)
        self._table = weakref.ref(table)
        self._keys = self._gradient = None
        self._pending = {}
        # Autograd follows lookups to this leaf, and calls the hook when all of a backward pass have
        # been reached.
        self.anchor = torch.empty(0, requires_grad=True)
        self.anchor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            _collector(weakref.ref(self))
        )
        return self

    def __init__(self, table: Table) -> None:
        super().__init__()

    @property
    def table(self) -> Table:
        """The table whose rows these are.

        Raises:
            UnavailableError: the table does not exist any more.
        """
        table = self._table()
        if table is None:
            raise UnavailableError("the table of this weight does not exist any more")
        return table

    # The anchor determines whether lookups are differentiated, because compiled graphs see the
    # anchor and not this parameter.
    @property
    def requires_grad(self) -> bool:
        return self.anchor.requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.anchor.requires_grad = wanted

    def requires_grad_(self, requires_grad: bool = True) -> TableWeight:
        self.requires_grad = requires_grad
        return self

    @property
    def keys(self) -> Tensor | None:
        """The keys of the rows of ``grad``, ascending; ``None`` where there is no gradient."""
        return self._keys

    @property
    def grad(self) -> Tensor | None:
        return self._gradient

    @grad.setter
    def grad(self, values: Tensor | None) -> None:
        if values is None:
            self._keys = self._gradient = None
            self._pending.clear()
        elif self._gradient is None or values.shape != self._gradient.shape:
            raise ArgumentError(
                "the gradient of a table's rows comes from backward(); it can be scaled or "
                "cleared, not set"
            )
        else:
            self._gradient = values

    def stand_in(self) -> Tensor:
        """A tensor like this parameter, without elements or rows."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def keep(self, keys: Tensor, values: Tensor) -> None:
        """Adds to the gradient that the running backward pass ends with; ``keys`` may repeat."""
        self._pending.setdefault(_torch.backward_id(), []).append((keys, values))

    @property
    def is_cleared(self) -> bool:
        """Whether ``zero_grad(set_to_none=False)`` has cleared ``grad``: no row has a gradient.

        A gradient that is zero is kept as -0.0, so cleared ones are those with +0.0 only.
        """
        gradient = self._gradient
        return gradient is None or not (gradient.any() or gradient.signbit().any())

    @torch.no_grad()
    def _collect(self) -> None:
        self.anchor.grad = None
        pending = self._pending.pop(_torch.backward_id(), [])
        if not pending:
            return
        keys, values = sum_by_key(*(torch.cat(parts) for parts in zip(*pending, strict=True)))
        keys, values = self.table.gradients.reduce(keys, values)
        if self._keys is not None and self._gradient is not None and not self.is_cleared:
            values = torch.cat([self._gradient, values.to(self._gradient.device)])
            keys, values = sum_by_key(torch.cat([self._keys, keys.to(self._keys.device)]), values)
        self._keys, self._gradient = keys, values if values.any() else torch.full_like(values, -0.0)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.backward and kwargs is not None and kwargs.get("inputs"):
            kwargs = kwargs | {"inputs": tuple(map(_anchor_of, kwargs["inputs"]))}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        weight = _first_weight([*args, *(kwargs or {}).values()])
        if weight is not None:
            initializer = _torch.running_initializer()
            if initializer is not None:
                raise _refusal(initializer, _INITIALIZE)
            optimizer = _torch.optimizer_taking_parameters()
            if optimizer is not None and not getattr(optimizer, "steps_tables", False):
                raise _refusal(type(optimizer).__name__, _INSTEAD)
            if name == "detach" or (name, attribute) == ("__get__", "data"):
                return weight  # so that what is done with the result is checked here too
            _check_use(weight, name, attribute, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> TableWeight:
        raise UnsupportedError(
            "a table's weight cannot be copied: the processes of a job share its rows"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a table's weight cannot be pickled: save state_dict() of the module"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        table = self._table()
        rows = (
            "closed"
            if table is None
            else f"{table.num_keys} rows of {table.dim} in table {table.name!r}"
        )
        return f"TableWeight({rows}, requires_grad={self.requires_grad})"


def _collector(weight: weakref.ref[TableWeight]) -> Callable[[Tensor], None]:
    def collect(_: Tensor) -> None:
        alive = weight()
        if alive is not None:
            alive._collect()

    return collect


def _check_use(weight: TableWeight, name: str, attribute: str, args: tuple[Any, ...]) -> None:
    """Raise UnsupportedError unless a function, or access to an attribute, leaves rows alone."""
    if name in _FILLS:
        raise _refusal(name, _INITIALIZE)
    if name in ("__get__", "__set__", "__delete__"):
        if name == "__set__" and attribute == "data" and args[1].shape != weight.shape:
            raise _refusal("assignment to data", _INITIALIZE)
        if attribute in _TENSORS:
            raise _refusal(attribute, _INSTEAD)
    elif name not in _ALLOWED:
        raise _refusal(name, _INSTEAD)


def _refusal(name: str, instead: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: a table's rows are not in this parameter, which has no elements. {instead}"
    )


def _anchor_of(tensor: Any) -> Any:
    return tensor.anchor if isinstance(tensor, TableWeight) else tensor


def _first_weight(args: Any) -> TableWeight | None:
    for arg in args:
        if isinstance(arg, TableWeight):
            return arg
        if isinstance(arg, list | tuple) and (found := _first_weight(arg)) is not None:
            return found
    return None


def sum_by_key(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ``keys``, ascending, and the sum of each one's rows of ``values``, ``(n,
    dim)``.
    """
    unique, inverse = torch.unique(keys, return_inverse=True)
    return unique, values.new_zeros(len(unique), values.shape[1]).index_add_(0, inverse, values)
