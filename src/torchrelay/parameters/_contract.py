"""Vocabulary of the parameter manager.

A *node* is a group of processes of one host that share one slab of values. Keys are int64; each key
has a row of ``length`` elements of the table's dtype. Under an :class:`UpdateRule` other than
``add``, a row also has optimizer state, which moves with it, and :meth:`Worker.push` takes
gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrelay import _native
from torchrelay.errors import ArgumentError

__all__ = ["KeyInit", "Metrics", "UpdateRule"]


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


# What torch's optimizers call options that a table's rules do not have, with the values that
# change nothing; None and False mean the same.
_WITHOUT: dict[str, Any] = {
    "momentum": 0,
    "dampening": 0,
    "nesterov": False,
    "maximize": False,
    "amsgrad": False,
    "decoupled_weight_decay": False,
    "lr_decay": 0,
    "foreach": False,
    "fused": False,
    "capturable": False,
    "differentiable": False,
}
# What steps read, and what torch adds: rates that schedulers remember, and names of parameters.
_KEPT_BY_TORCH = frozenset(
    ("lr", "params", "param_names", "initial_lr", "max_lr", "min_lr", "swa_lr")
)


def check_options(table: str, rule: UpdateRule, group: Mapping[str, Any]) -> None:
    """Raise ArgumentError unless a parameter group has a valid ``lr``, and no option by which
    ``rule`` would not apply gradients.
    """
    check_number(f"table {table!r}: learning rate lr", group["lr"])
    own = _WITHOUT | {"weight_decay": rule.weight_decay}
    if rule.kind.endswith("adagrad"):
        own |= {"eps": rule.eps, "initial_accumulator_value": rule.initial_accumulator}
    elif rule.kind == "adam":
        own |= {"eps": rule.eps, "betas": (rule.beta1, rule.beta2)}
    for name, value in group.items():
        is_label = name not in own and isinstance(value, str)
        if name not in _KEPT_BY_TORCH and not is_label and not _means(value, own.get(name, ...)):
            raise ArgumentError(
                f"table {table!r}: {name} = {value!r} in a group of its optimizer has no effect: "
                f"apart from lr, the table applies gradients as its own optimizer, {rule}. Choose "
                "it when the table is created, e.g. optimizer=optim.sgd(0.1, weight_decay=0.01)"
            )


def _means(value: Any, own: Any) -> bool:
    value = tuple(value) if isinstance(value, list) else value
    try:
        return bool((value or 0) == (own or 0))
    except (TypeError, ValueError, RuntimeError):  # of tensors and arrays of several elements
        return False


def check_number(name: str, value: float, limit: float = math.inf) -> None:
    """Raise ArgumentError unless ``value`` is from 0 to less than ``limit``."""
    try:
        is_valid = bool(0 <= value < limit)
    except (TypeError, ValueError, RuntimeError):  # of other types; of tensors of several elements
        is_valid = False
    if not is_valid:
        raise ArgumentError(
            f"{name} = {value}: it must be finite and not negative"
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


class Metrics:
    """Statistics of one node since its start; ``later - earlier`` is the difference.

    Each statistic of :meth:`Server.statistics` is an attribute: keys pulled and pushed in this
    host's memory and elsewhere (``local_pulls``, ``remote_pulls``, ``local_pushes``,
    ``remote_pushes``), ``sent_bytes``, ``received_bytes`` and ``sent_messages``, ``relocations``
    to this node, ``refreshes`` of replicas on other nodes because a value had changed,
    ``evictions``, ``protocol_errors``, and ``rounds`` of the channels and ``round_seconds`` in
    them. ``replicas`` is a state, the keys of other nodes that this node holds a copy of now: a
    difference keeps the later one.
    """

    def __init__(self, statistics: Mapping[str, float]) -> None:
        self._statistics = dict(statistics)

    def __getattr__(self, name: str) -> float:
        try:
            return self.__dict__["_statistics"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"there is no statistic {name!r}") from None

    def __sub__(self, earlier: Metrics) -> Metrics:
        return Metrics(
            {
                name: value if name == "replicas" else value - getattr(earlier, name)
                for name, value in self._statistics.items()
            }
        )

    @property
    def locality(self) -> float:
        """The share of pulled keys served from this host's memory, 0 to 1; 1 if none was pulled."""
        pulls = self.local_pulls + self.remote_pulls
        return self.local_pulls / pulls if pulls else 1.0

    @property
    def staleness_s(self) -> float:
        """The average of the longest time that a changed key waited until it was sent to replicas.

        In seconds, without the transfer; 0 if nothing was sent.
        """
        return self.refresh_age_seconds / self.refreshes if self.refreshes else 0.0

    def __str__(self) -> str:
        """Return one line for a progress bar."""
        return (
            f"{self.locality:.3%} local, {self.sent_bytes / 1e6:.1f} MB out, "
            f"{self.received_bytes / 1e6:.1f} MB in, {self.relocations:.0f} moved, "
            f"{self.replicas:.0f} replicas, staleness {self.staleness_s * 1e3:.1f} ms"
        )
