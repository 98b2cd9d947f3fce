"""The optimizer of tables, as a training loop owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch

from torchrelay.errors import ArgumentError
from torchrelay.parameters._contract import check_number
from torchrelay.parameters._weight import TableWeight

__all__ = ["TableOptimizer"]


class TableOptimizer(torch.optim.Optimizer):
    """Applies the gradients that backward passes have left at the weights of tables; see
    :meth:`Table.optimizer`.

    Each weight has a parameter group of its own. Its ``lr`` can be changed, by a scheduler for
    example; what else the optimizer does was decided when the table was made.

    Args:
        weights: of the tables, e.g. those among ``model.parameters()``.
        lr: learning rate; default: that of each table's own optimizer.

    Raises:
        ArgumentError: something else than a table's weight was given, the learning rate is not a
            finite number from 0 up, or a table applies gradients in the backward pass.
    """

    steps_tables = True

    def __init__(self, weights: Iterable[TableWeight], lr: float | None = None) -> None:
        groups = [_group(weight, lr) for weight in weights]
        super().__init__(groups, {})
        for group in groups:
            group["params"][0].gradients.keep_for(self)
            self.state[group["params"][0]]["step"] = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if any(not isinstance(weight, TableWeight) for weight in _listed(param_group["params"])):
            raise ArgumentError(
                "a TableOptimizer steps tables only: give torch's optimizers the other parameters, "
                "e.g. [p for p in model.parameters() if not isinstance(p, "
                "torchrelay.parameters.TableWeight)]"
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients, once to each row; collective over the table's processes.

        When it returns, every process sees the new rows.

        Raises:
            ArgumentError: a gradient is NaN or infinite, a learning rate is not a finite number
                from 0 up, or a table has a newer optimizer; no table was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [(group, weight) for group in self.param_groups for weight in group["params"]]
        for group, weight in ready:
            weight.gradients.check(self)
            check_number(f"table {weight.gradients.name!r}: learning rate lr", group["lr"])
        for group, weight in ready:
            if weight.gradients.values is not None:
                self.state[weight]["step"] += 1
                if not weight.gradients.is_cleared:
                    weight.gradients.step(float(group["lr"]), self.state[weight]["step"])
        return loss


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _group(weight: Any, lr: float | None) -> dict[str, Any]:
    if not isinstance(weight, TableWeight):
        return {"params": [weight]}  # add_param_group refuses it
    rate = weight.gradients.rule.lr if lr is None else lr
    check_number(f"table {weight.gradients.name!r}: learning rate lr", rate)
    return {"params": [weight], "lr": rate}
