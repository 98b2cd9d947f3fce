"""How a table applies gradients: torch's optimizers, with torch's arguments.

The owner of a row applies the update, so the optimizer's state is stored beside the row, moves with
it, and is saved with it; no process holds it for all keys. A row that gets no gradient costs
nothing and does not change.
"""

from __future__ import annotations

from typing import Any

from torchrelay._names import names_options, no_attribute
from torchrelay.parameters._contract import UpdateRule

__all__ = ["adagrad", "adam", "add", "rowwise_adagrad", "sgd"]


def add() -> UpdateRule:
    """``value += pushed``: what is pushed is an update, not a gradient."""
    return UpdateRule("add")


@names_options()
def sgd(lr: float, weight_decay: float = 0.0) -> UpdateRule:
    """As :class:`torch.optim.SGD` without momentum. No state."""
    return UpdateRule("sgd", lr=lr, weight_decay=weight_decay)


@names_options()
def adagrad(
    lr: float = 1e-2,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> UpdateRule:
    """As :class:`torch.optim.Adagrad` without decay of the rate. State: one accumulator per
    element.
    """
    return _adagrad("adagrad", lr, weight_decay, initial_accumulator_value, eps)


@names_options()
def rowwise_adagrad(
    lr: float = 1e-2,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> UpdateRule:
    """Adagrad with one accumulator per row, of the mean squared gradient (Duchi et al. 2011, sec.
    1.1; as in DLRM).

    State: one element per row, which halves the memory of a table against :func:`adagrad`.
    """
    return _adagrad("rowwise_adagrad", lr, weight_decay, initial_accumulator_value, eps)


@names_options()
def adam(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> UpdateRule:
    """As :class:`torch.optim.SparseAdam`. State: two elements per element, and a step.

    :meth:`Table.optimizer` counts the table's steps, as SparseAdam does; where gradients are pushed
    or applied in the backward pass, each row counts its own.
    """
    return UpdateRule("adam", lr=lr, eps=eps, beta1=betas[0], beta2=betas[1])


def _adagrad(kind: str, lr: float, weight_decay: float, initial: float, eps: float) -> UpdateRule:
    return UpdateRule(kind, lr=lr, eps=eps, weight_decay=weight_decay, initial_accumulator=initial)


def __getattr__(name: str) -> Any:
    raise no_attribute(f"module {__name__!r}", name, __all__)


def __dir__() -> list[str]:
    return __all__
