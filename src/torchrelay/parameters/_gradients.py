"""When the gradients of a table's rows are applied, and how those of several processes become
one.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from torchrelay._addresses import is_loopback
from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.parameters._exchange import GradientExchange

if TYPE_CHECKING:
    from torchrelay.parameters._table import Table

__all__ = ["ApplyGradients", "Gradients", "Reduction"]

ApplyGradients = Literal["step", "backward"]
Reduction = Literal["mean", "sum"]


class Gradients:
    """What becomes of the gradients of modules over ``table``; arguments as of
    :meth:`Table.create`.
    """

    def __init__(
        self, table: Table, apply: ApplyGradients | None, reduction: Reduction | None
    ) -> None:
        for name, value, kind in (
            ("apply_gradients", apply, ApplyGradients),
            ("reduction", reduction, Reduction),
        ):
            if value is not None and value not in get_args(kind):
                raise ArgumentError(
                    f"{name} = {value!r}: the choices are {', '.join(get_args(kind))}"
                )
        self._table: Table = weakref.proxy(table)  # it has this object
        self._apply = apply
        self._reduction = reduction
        self._exchange: GradientExchange | None = None
        self._settled = False
        self._configured: tuple[float, int] | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None

    @property
    def kept(self) -> bool:
        """Whether gradients wait for an optimizer's step."""
        return self._apply == "step"

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep gradients for ``optimizer``, which was just created; earlier ones may not step.

        Raises:
            ArgumentError: gradients are applied in the backward pass.
            UnsupportedError: they would be sent to other hosts, and there is a key file.
        """
        topology = self._table.server.topology
        if topology.transport.key_file and not is_loopback(topology.interface):
            raise UnsupportedError(
                f"table {self._table.name!r}: TORCHRELAY_TRANSPORT_KEY_FILE is set, but gradients "
                "that wait for an optimizer are summed over all hosts without encryption: make no "
                "optimizer and pass apply_gradients='backward', which sends them encrypted, or "
                "unset the key file"
            )
        if self._apply == "backward":
            raise ArgumentError(
                f"table {self._table.name!r} applies gradients in the backward pass, so there is "
                "nothing to step: make its optimizer before the first backward pass, and leave out "
                "apply_gradients='backward'"
            )
        self._apply = "step"
        self._optimizer = weakref.ref(optimizer)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ArgumentError if another optimizer was made for the table since ``optimizer``."""
        if self._optimizer is None or self._optimizer() is not optimizer:
            raise ArgumentError(
                f"table {self._table.name!r} has a newer optimizer than this one; if both step, "
                "each gradient is applied twice. Step the newest only; for several tables make "
                "one, TableOptimizer(weights)"
            )

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Takes the gradient of one lookup: ``keys`` ``(n,)`` may repeat, ``values`` ``(n,
        dim)``.
        """
        table = self._table
        if not table.weight.requires_grad:  # frozen since the forward pass
            return
        self._settle()
        if self.kept:
            table.weight.keep(keys, values)
            return
        if self._reduction == "mean":
            values = values / table.workers
        table.push(keys, values, wait=False)

    def reduce(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of all processes; collective. Arguments and results have each key once,
        ascending.
        """
        table = self._table
        if table.workers == 1:
            return keys, values
        if self._exchange is None:
            topology = table.server.topology
            assert topology.store is not None
            self._exchange = GradientExchange(
                topology.store,
                table.worker_index,
                table.workers,
                topology.settings.timeout_s,
                topology.interface,
            )
        keys, values = self._exchange(keys, values)
        return keys, values if self._reduction == "sum" else values / table.workers

    def apply(self, keys: Tensor, values: Tensor, *, lr: float, step: int) -> None:
        """Applies the gradient that :meth:`reduce` gave on every process; collective.

        Args:
            step: of the table's optimizer, from 1.
        """
        table = self._table
        self._configure(lr, step if table.rule.kind == "adam" else 0)
        if table.workers > 1:
            mine = self._mine(keys)
            keys, values = keys[mine], values[mine]
        table.push(keys, values)
        if table.workers > 1:
            table.sync()

    def _mine(self, keys: Tensor) -> Tensor:
        """Which ``keys`` this process pushes: each key is pushed once, by a process of its home
        node.
        """
        topology = self._table.server.topology
        at_home = keys % topology.num_nodes == topology.node
        return at_home & (keys // topology.num_nodes % topology.members == topology.member)

    def _configure(self, lr: float, step: int) -> None:
        if self._configured == (lr, step):
            return
        self._table.server.set_learning_rate(lr)
        self._table.server.store.set_step(step)
        if self._table.server.num_nodes > 1:
            # An owner must have the rate before another node's push.
            self._table.worker.barrier()
        self._configured = (lr, step)

    def _settle(self) -> None:
        """Decides at the first gradient, if neither the caller nor an optimizer has."""
        if self._settled:
            return
        self._settled = True
        if self.kept:
            return
        if _gradient_scaler_exists():
            self._settled = False
            raise UnsupportedError(
                f"table {self._table.name!r} would apply gradients in the backward pass, but there "
                "is a GradScaler: they are scaled, and maybe infinite. Make an optimizer before "
                "the first backward pass (table.optimizer()) and step it with scaler.step"
            )
        if self._apply is None:
            self._apply = "backward"
            warnings.warn(
                f"table {self._table.name!r} has no optimizer, so gradients are applied in the "
                "backward pass. Make one with table.optimizer() and call its step(), or pass "
                "apply_gradients='backward' to keep this; it will become an error",
                DeprecationWarning,
                stacklevel=2,
            )


def _gradient_scaler_exists() -> bool:
    """Whether this process has an enabled GradScaler. Looks at all objects, so it is called once
    per table.
    """
    return any(
        issubclass(type(found), torch.amp.GradScaler) and found.is_enabled()
        for found in gc.get_objects()
    )
