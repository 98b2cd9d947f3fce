"""Vocabulary of the parameter manager.

A *node* is a group of processes of one host that share one slab of values. Keys are int64; each key
has a row of ``length`` elements of the table's dtype. Under an :class:`UpdateRule` other than
``add``, a row also has optimizer state, which moves with it, and :meth:`Worker.push` takes
gradients.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torchrelay import _native
from torchrelay.errors import ArgumentError

__all__ = ["KeyInit", "UpdateRule"]


@dataclass(frozen=True)
class UpdateRule:
    """How the owner of a key applies pushed values.

    Args:
        kind: ``add`` (value += pushed), or an optimizer as in torch.optim, applied to the pushed
            gradient: ``sgd``, ``adagrad``, ``rowwise_adagrad`` (one accumulator per row: the mean
            of the squared gradient), ``adam`` (steps counted per row).
        lr: learning rate; ``server.set_learning_rate`` changes it.
        weight_decay: added to the gradient as ``weight_decay * value``.
        initial_accumulator: initial value of Adagrad's accumulators.

    Raises:
        ArgumentError: there is no such kind, or a number is negative or not finite, or a beta is
            not below 1.
    """

    kind: str = "add"
    lr: float = 1.0
    eps: float = 1e-10
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        _check_kind("rule", self.kind, _native.RuleKind)
        for name in ("lr", "eps", "beta1", "beta2", "weight_decay", "initial_accumulator"):
            limit = 1 if name.startswith("beta") else math.inf
            check_number(f"{self.kind}: {name}", getattr(self, name), limit)


@dataclass(frozen=True)
class KeyInit:
    """The initial value of a key: a function of ``seed`` and the key, so equal on all nodes.

    ``constant``: ``a``; ``uniform``: from [a, b); ``normal``: mean ``a``, standard deviation ``b``.

    Raises:
        ArgumentError: there is no such kind.
    """

    kind: str = "zeros"
    a: float = 0.0
    b: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_kind("init", self.kind, _native.InitKind)


def check_number(name: str, value: float, limit: float = math.inf) -> None:
    """Raise ArgumentError unless ``value`` is from 0 to less than ``limit``."""
    if not 0 <= value < limit:
        raise ArgumentError(
            f"{name} = {value}: it must be a finite number from 0 up"
            f"{'' if limit == math.inf else f', below {limit:g}'}"
        )


def _check_kind(what: str, kind: str, kinds: type[_native.RuleKind | _native.InitKind]) -> None:
    names = [one.name for one in kinds]
    if kind not in names:
        raise ArgumentError(f"{what} {kind!r}: the choices are {', '.join(names)}")


def native_rule(rule: UpdateRule) -> _native.UpdateRule:
    numbers = dataclasses.asdict(rule)
    kind = _native.RuleKind[numbers.pop("kind")]
    return _native.UpdateRule(kind=kind, learning_rate=numbers.pop("lr"), **numbers)


def native_init(init: KeyInit) -> _native.KeyInit:
    return _native.KeyInit(kind=_native.InitKind[init.kind], a=init.a, b=init.b, seed=init.seed)
