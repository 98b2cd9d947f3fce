"""A table's rows as wrappers and optimizers see them, a parameter without elements; and the
optimizer that steps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn

from torchrelay import _torch
from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.parameters._contract import check_options
from torchrelay.parameters._gradients import Gradients

__all__ = ["TableOptimizer", "TableWeight"]

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
    "them with table.optimizer(); give torch's optimizers the other parameters. For torch.export, "
    "put the module's to_torch() in its place"
)
_INITIALIZE = (
    "Pass init= when the table is created; or initialise a tensor of shape (num_keys, dim) and "
    "pass it to table.load_state_dict({'weight': tensor}) on every process"
)


class TableWeight(nn.Parameter):
    """Stands for the rows of a table among a model's parameters. It has no elements: shape ``(0,
    dim)``. Its dtype is that of looked-up rows, which ``model.half()`` changes, unlike the rows'.

    ``grad`` holds the gradients of the rows looked up since it was cleared, summed over lookups and
    backward passes, and averaged over processes (or summed, with ``reduction="sum"``): ``(n,
    dim)``, dense, in the table's dtype, for the ``keys`` ``(n,)``, ascending int64. So clipping,
    scaling and logging work on it; :class:`~torchrelay.parameters.TableOptimizer` applies it. With
    several processes, the first access to the keys or the elements is collective: it gathers them.
    """

    gradients: Gradients

    def __new__(cls, gradients: Gradients, dim: int, dtype: torch.dtype) -> TableWeight:
        with _torch.plain_torch():
            self: TableWeight = torch.Tensor._make_subclass(
                cls, torch.empty(0, dim, dtype=dtype, device="cpu"), True
            )
        self.gradients = gradients
        return self

    def __init__(self, gradients: Gradients, dim: int, dtype: torch.dtype) -> None:
        super().__init__()

    # The anchor determines whether lookups are differentiated, because compiled graphs see the
    # anchor and not this parameter.
    @property
    def requires_grad(self) -> bool:
        return self.gradients.anchor.requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.gradients.anchor.requires_grad = wanted

    def requires_grad_(self, requires_grad: bool = True) -> TableWeight:
        self.requires_grad = requires_grad
        return self

    @property
    def keys(self) -> Tensor | None:
        """The keys of the rows of ``grad``, ascending; ``None`` where there is no gradient."""
        return self.gradients.keys

    @property
    def grad(self) -> Tensor | None:
        return self.gradients.values

    @grad.setter
    def grad(self, values: Tensor | None) -> None:
        self.gradients.replace(values)

    def stand_in(self) -> Tensor:
        """Return a tensor like this parameter, without elements or rows."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        return f"TableWeight({self.gradients.described}, requires_grad={self.requires_grad})"


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


def _first_weight(args: Any) -> TableWeight | None:
    for arg in args:
        if isinstance(arg, TableWeight):
            return arg
        if isinstance(arg, list | tuple) and (found := _first_weight(arg)) is not None:
            return found
    return None


class TableOptimizer(torch.optim.Optimizer):
    """Applies the gradients that backward passes have left at the weights of tables; see
    :meth:`Table.optimizer`.

    Each weight has a parameter group of its own. Its ``lr`` can be changed, by a scheduler for
    example. What else the optimizer does was decided when the table was made: a group may name such
    an option, as ``weight_decay``, only with the table's own value.

    Args:
        weights: of the tables, e.g. those among ``model.parameters()``; or groups of them.
        lr: learning rate; default: that of each table's own optimizer.

    Raises:
        ArgumentError: something else than a table's weight was given, the learning rate is
            not finite or negative, an option differs from the table's own, or a table applies
            gradients in the backward pass.
    """

    steps_tables = True

    def __init__(
        self, weights: Iterable[TableWeight] | Iterable[dict[str, Any]], lr: float | None = None
    ) -> None:
        super().__init__(weights, {"lr": lr})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state and groups of :meth:`load_state_dict`. Raises as the class."""
        for group in state["param_groups"]:
            for weight in group["params"]:
                check_options(weight.gradients.name, weight.gradients.rule, group)
                steps = state["state"].get(weight, {}).get("step")
                if not isinstance(steps, int) or steps < 0:
                    raise ArgumentError(
                        f"table {weight.gradients.name!r}: the state dict has no number of steps "
                        "for it, so it is not that of a TableOptimizer over as many tables; "
                        "nothing was loaded"
                    )
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step the tables of ``param_group["params"]`` too, at its ``lr``. Raises as the class."""
        params = param_group["params"]
        weights: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        if not all(isinstance(weight, TableWeight) for weight in weights):
            raise ArgumentError(
                "a TableOptimizer steps tables only: give torch's optimizers the other parameters, "
                "e.g. [p for p in model.parameters() if not isinstance(p, "
                "torchrelay.parameters.TableWeight)]"
            )
        lr = param_group.get("lr", self.defaults["lr"])
        rates = [weight.gradients.rule.lr if lr is None else lr for weight in weights]
        for weight, rate in zip(weights, rates, strict=True):
            check_options(weight.gradients.name, weight.gradients.rule, param_group | {"lr": rate})
        for weight in weights:
            weight.gradients.keep_for(self)
        for weight, rate in zip(weights, rates, strict=True):
            super().add_param_group(param_group | {"params": [weight], "lr": rate})
            self.state[weight]["step"] = 0

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients, once to each row; collective over the table's processes.

        When it returns, every process sees the new rows.

        Raises:
            ArgumentError: a gradient is NaN or infinite, a learning rate is not finite or
                negative, an option differs from the table's own, or a table has a newer optimizer;
                no table was changed.
            MismatchError: another process cannot step, or steps at another rate.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [(group, weight) for group in self.param_groups for weight in group["params"]]
        for group, weight in ready:
            lr, problem = math.nan, None
            try:
                check_options(weight.gradients.name, weight.gradients.rule, group)
                lr = float(group["lr"])
            except ArgumentError as error:
                problem = error
            weight.gradients.begin_step(self, lr, problem)
        for group, weight in ready:
            if weight.gradients.values is not None:
                self.state[weight]["step"] += 1
                if not weight.gradients.is_cleared:
                    weight.gradients.step(float(group["lr"]), self.state[weight]["step"])
        return loss
