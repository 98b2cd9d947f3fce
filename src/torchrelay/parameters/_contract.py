"""Vocabulary of the parameter manager.

A *node* is a group of processes of one host that share one slab of values. Keys are int64; each key
has a row of ``length`` elements of the table's dtype. Under an :class:`UpdateRule` other than
``add``, a row also has optimizer state, which moves with it, and :meth:`Worker.push` takes
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay import _native

__all__ = ["KeyInit", "UpdateRule"]

RULES = tuple(kind.name for kind in _native.RuleKind)
INITS = tuple(kind.name for kind in _native.InitKind)


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
    """

    kind: str = "add"
    lr: float = 1.0
    eps: float = 1e-10
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0


@dataclass(frozen=True)
class KeyInit:
    """The initial value of a key: a function of ``seed`` and the key, so equal on all nodes.

    ``constant``: ``a``; ``uniform``: from [a, b); ``normal``: mean ``a``, standard deviation ``b``.
    """

    kind: str = "zeros"
    a: float = 0.0
    b: float = 0.0
    seed: int = 0


def native_rule(rule: UpdateRule) -> _native.UpdateRule:
    return _native.UpdateRule(
        kind=_native.RuleKind[rule.kind],
        learning_rate=rule.lr,
        eps=rule.eps,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        initial_accumulator=rule.initial_accumulator,
    )


def native_init(init: KeyInit) -> _native.KeyInit:
    return _native.KeyInit(kind=_native.InitKind[init.kind], a=init.a, b=init.b, seed=init.seed)
