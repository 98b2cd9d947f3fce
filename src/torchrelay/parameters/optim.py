"""How the store applies gradients that are pushed to it: torch's optimizers, with torch's arguments.

The owner of a row applies the update, so the optimizer's state stands beside the row, moves with it, and is
saved with it; no process holds it for all keys. A row that gets no gradient costs nothing and does not change.
"""

from __future__ import annotations

from torchrelay.errors import ArgumentError
from torchrelay.parameters.contract import UpdateRule

__all__ = ["adagrad", "adam", "add", "rowwise_adagrad", "sgd"]


def add() -> UpdateRule:
    """``value += pushed``: what is pushed is an update, not a gradient."""
    return UpdateRule("add")


def sgd(lr: float, weight_decay: float = 0.0) -> UpdateRule:
    """As :class:`torch.optim.SGD` without momentum. No state."""
    return UpdateRule("sgd", lr=_positive(lr), weight_decay=weight_decay)


def adagrad(
    lr: float = 1e-2, weight_decay: float = 0.0, initial_accumulator_value: float = 0.0, eps: float = 1e-10
) -> UpdateRule:
    """As :class:`torch.optim.Adagrad` without decay of the rate. State: one accumulator an element."""
    return UpdateRule(
        "adagrad",
        lr=_positive(lr),
        eps=eps,
        weight_decay=weight_decay,
        initial_accumulator=initial_accumulator_value,
    )


def rowwise_adagrad(
    lr: float = 1e-2, weight_decay: float = 0.0, initial_accumulator_value: float = 0.0, eps: float = 1e-10
) -> UpdateRule:
    """Adagrad with one accumulator a row, of the mean squared gradient (Duchi et al. 2011, sec. 1.1; as in DLRM).

    State: one element a row, which halves the memory of a table against :func:`adagrad`.
    """
    return UpdateRule(
        "rowwise_adagrad",
        lr=_positive(lr),
        eps=eps,
        weight_decay=weight_decay,
        initial_accumulator=initial_accumulator_value,
    )


def adam(lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> UpdateRule:
    """As :class:`torch.optim.SparseAdam`, but with steps counted per row. State: two elements an element, and a step."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ArgumentError(f"adam: betas = {betas}: each must be from 0 to less than 1")
    return UpdateRule("adam", lr=_positive(lr), eps=eps, beta1=betas[0], beta2=betas[1])


def _positive(lr: float) -> float:
    if not lr >= 0:
        raise ArgumentError(f"lr = {lr}: a learning rate is at least 0")
    return lr
