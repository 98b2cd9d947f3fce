"""The gradient of a table's rows: when it is applied, and how several processes sum theirs.

The backward pass of a lookup calls :meth:`Gradients.add`. At the end of the backward
pass the processes sum them: each receives the rows that it applies, its share. An optimizer's step
applies the shares. The whole gradient is gathered only where something looks at it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torchrelay import _torch
from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.parameters._arrays import check_finite
from torchrelay.parameters._exchange import GradientExchange, sum_by_key
from torchrelay.parameters._server import Server
from torchrelay.parameters._worker import Worker

__all__ = ["ApplyGradients", "Gradients", "Reduction", "RowGradient"]

ApplyGradients = Literal["step", "backward"]
Reduction = Literal["mean", "sum"]


class RowGradient(torch.Tensor):
    """Gradient ``(n, dim)`` of rows, of which this process has its share ``(m, dim)``.

    The first operation on its elements gathers them, so it is collective; the result is the same
    on every process.

    Args:
        share: its keys, ascending, ``(m,)``, and its rows, on the CPU.
        shape: of the whole gradient.
        is_finite: whether all shares are.
        gather: returns all keys, ascending, and their rows. Collective.
        device: of the whole gradient.
    """

    is_finite: bool
    _share: tuple[Tensor, Tensor]
    _gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    _whole: tuple[Tensor, Tensor] | None

    def __new__(
        cls,
        share: tuple[Tensor, Tensor],
        shape: tuple[int, int],
        is_finite: bool,
        gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        device: torch.device,
    ) -> RowGradient:
        self: RowGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=share[1].dtype, device=device
        )
        self._share, self.is_finite, self._gather, self._whole = share, is_finite, gather, None
        return self

    @property
    def share(self) -> tuple[Tensor, Tensor] | None:
        """The share; None once the whole gradient was gathered, which may have changed since."""
        return self._share if self._whole is None else None

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return all keys, ascending, and their rows. Collective at the first call."""
        if self._whole is None:
            keys, values = self._gather(*self._share)
            self._whole = keys, _marked(values.to(self.device))
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # of what is known without the elements
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(RowGradient, lambda one: one.whole()[1], (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Gradients:
    """What becomes of the gradients of modules over the table ``name``.

    Args:
        server: this process's part of the table; ``worker``: its access to it.
        apply: as ``apply_gradients`` of :meth:`Table.create`; likewise ``reduction``.

    Attributes:
        apply: ``apply_gradients``; "step" once there is an optimizer.
        anchor: a leaf that autograd reaches from each lookup, and whose hook ends a backward pass.
    """

    def __init__(
        self,
        name: str,
        server: Server,
        worker: Worker,
        apply: ApplyGradients | None,
        reduction: Reduction | None,
    ) -> None:
        for option, value, kind in (
            ("apply_gradients", apply, ApplyGradients),
            ("reduction", reduction, Reduction),
        ):
            if value is not None and value not in get_args(kind):
                raise ArgumentError(
                    f"{option} = {value!r}: the choices are {', '.join(get_args(kind))}"
                )
        self.name, self.rule = name, server.rule
        self._server, self._worker = server, worker
        self._ranks = server.topology.ranks
        self.apply, self._reduction = apply, reduction
        self._exchange: GradientExchange | None = None
        self._settled = False
        self._configured: tuple[float, int] | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._pending: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.anchor = torch.empty(0, device="cpu", requires_grad=True)
        self.anchor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            _collector(weakref.ref(self))
        )

    @property
    def described(self) -> str:
        """The rows that these are gradients of, for messages."""
        dim = self._worker.get_key_size()
        return f"{self._server.num_keys} rows of {dim} in table {self.name!r}"

    @property
    def keys(self) -> Tensor | None:
        """The keys of the whole gradient; see :class:`TableWeight`."""
        return self._values.whole()[0] if isinstance(self._values, RowGradient) else self._keys

    @property
    def values(self) -> Tensor | None:
        """The rows of the whole gradient; see :class:`TableWeight`."""
        return self._values

    def replace(self, values: Tensor | None) -> None:
        """Clear the gradient, or replace it by another of its shape, such as a scaled one.

        Raises:
            ArgumentError: there is no gradient, or it has another shape.
        """
        if values is None:
            self._keys = self._values = None
            self._pending.clear()
        elif self._values is None or values.shape != self._values.shape:
            raise ArgumentError(
                "the gradient of a table's rows comes from backward(); it can be scaled or "
                "cleared, not set"
            )
        elif values is not self._values:
            self._keys, self._values = self.keys, values

    def keep_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep gradients for ``optimizer``; those that the table had before may not step.

        Raises:
            ArgumentError: gradients are applied in the backward pass.
        """
        if self.apply == "backward":
            raise ArgumentError(
                f"table {self.name!r} applies gradients in the backward pass, so there is "
                "nothing to step: make its optimizer before the first backward pass, and leave out "
                "apply_gradients='backward'"
            )
        self.apply = "step"
        self._optimizer = weakref.ref(optimizer)

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add the gradient of one lookup.

        Args:
            keys: distinct integers, ascending, ``(n,)``.
            values: ``(n, dim)`` in the table's dtype.
        """
        if not self.anchor.requires_grad:  # frozen since the forward pass
            return
        self._settle()
        keys = keys.to(torch.int64)
        if self.apply == "step":
            self._pending.setdefault(_torch.backward_id(), []).append((keys, values))
            return
        if self._reduction == "mean":
            values = values / self._ranks.size
        self._worker.push(keys.cpu(), values.detach().cpu().contiguous(), True)

    @torch.no_grad()
    def collect(self) -> None:
        """Add what the backward pass, which ends, has given to the gradient. Collective."""
        self.anchor.grad = None
        pending = self._pending.pop(_torch.backward_id(), [])
        if not pending:
            return
        keys, values = pending[0]
        device = values.device
        if len(pending) > 1:
            parts = zip(*pending, strict=True)
            keys, values = sum_by_key(*(torch.cat([x.to(device) for x in part]) for part in parts))
        exchange = self._shared_exchange()
        if exchange is not None:
            keys, values = exchange.sum(keys.cpu(), values.cpu(), self._owners(keys.cpu()))
            if self._reduction != "sum":
                values /= self._ranks.size
        if not self.is_cleared:
            earlier_keys, earlier = self._share()
            keys, values = sum_by_key(
                torch.cat([earlier_keys, keys.to(earlier_keys.device)]),
                torch.cat([earlier, values.to(earlier.device)]),
            )
        if exchange is None:
            self._keys, self._values = keys, _marked(values)
            return
        sizes, is_finite = exchange.sizes(len(keys), bool(values.sum().isfinite()))
        shape = sum(sizes), values.shape[1]
        gather = partial(exchange.gather, sizes=sizes)
        self._values = RowGradient((keys, values), shape, is_finite, gather, device)

    @property
    def is_cleared(self) -> bool:
        """Whether ``zero_grad(set_to_none=False)`` has cleared the gradient: no row has one.

        A gradient that is zero is kept as -0.0, so cleared ones are those with +0.0 only.
        """
        values = self._values
        if values is None or (isinstance(values, RowGradient) and values.share is not None):
            return values is None
        return not (_has_nonzero(values) or values.signbit().any())

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ArgumentError if another optimizer was made for the table since ``optimizer``, or
        the gradient is NaN or infinite; UnavailableError if the table is closed.
        """
        self._server.check_open()
        if self._optimizer is None or self._optimizer() is not optimizer:
            raise ArgumentError(
                f"table {self.name!r} has a newer optimizer than this one; if both step, "
                "each gradient is applied twice. Step the newest only; for several tables make "
                "one, TableOptimizer(weights)"
            )
        values = self._values
        if isinstance(values, RowGradient) and values.share is not None and values.is_finite:
            return
        if values is not None:
            check_finite(self.keys, values, f"step of table {self.name!r}")

    def step(self, lr: float, step: int) -> None:
        """Apply the gradient, and wait until every process sees the new rows. Collective.

        Args:
            step: of the table's optimizer, from 1.
        """
        keys, values = self._share()
        self._configure(lr, step if self.rule.kind == "adam" else 0)
        self._worker.push(keys.cpu(), values.cpu().contiguous(), checked=True)
        if self._exchange is not None:
            self._worker.wait_sync()
            self._exchange.barrier()

    def _share(self) -> tuple[Tensor, Tensor]:
        """Return keys and rows that this process applies."""
        if isinstance(self._values, RowGradient) and self._values.share is not None:
            return self._values.share
        assert self._values is not None
        keys, values = self.keys, self._values
        if isinstance(values, RowGradient):
            keys, values = values.whole()
        assert keys is not None
        if self._exchange is None:
            return keys, values
        mine = self._owners(keys.cpu()) == self._ranks.rank
        return keys.cpu()[mine], values.cpu()[mine]

    def _owners(self, keys: Tensor) -> Tensor:
        """Return the rank that applies each key's gradient, a process of the key's home node."""
        nodes = torch.tensor(self._server.topology.nodes, device="cpu")
        return nodes[keys % len(nodes), keys // len(nodes) % nodes.shape[1]]

    def _shared_exchange(self) -> GradientExchange | None:
        if self._exchange is None and self._ranks.size > 1:
            topology = self._server.topology
            self._exchange = GradientExchange(
                self._ranks, topology.group, topology.settings.timeout_s, self._server.lose
            )
        return self._exchange

    def _configure(self, lr: float, step: int) -> None:
        self._server.set_learning_rate(lr)  # Table.set_learning_rate may have set another
        self._server.store.set_step(step)
        is_new = self._configured != (lr, step)
        if is_new and self._exchange is not None and self._server.topology.num_nodes > 1:
            # An owner must have the rate before another node's push.
            self._exchange.barrier()
        self._configured = (lr, step)

    def _settle(self) -> None:
        """Raise at the first gradient if it would be lost, or applied while it is scaled."""
        if self._settled:
            return
        if self.apply is None:
            raise ArgumentError(
                f"table {self.name!r} has no optimizer to apply gradients: make one with "
                "table.optimizer() and call its step(), or pass apply_gradients='backward', which "
                "applies them in the backward pass"
            )
        if self.apply == "backward" and _gradient_scaler_exists():
            raise UnsupportedError(
                f"table {self.name!r} would apply gradients in the backward pass, but there "
                "is a GradScaler: they are scaled, and maybe infinite. Make an optimizer before "
                "the first backward pass (table.optimizer()) and step it with scaler.step"
            )
        self._settled = True


def _collector(gradients: weakref.ref[Gradients]) -> Callable[[Tensor], None]:
    def collect(_: Tensor) -> None:
        alive = gradients()
        if alive is not None:
            alive.collect()

    return collect


def _marked(values: Tensor) -> Tensor:
    """Return ``values``; -0.0 instead of 0.0 if all are zero. See :attr:`Gradients.is_cleared`."""
    return values if _has_nonzero(values) else torch.full_like(values, -0.0)


def _has_nonzero(values: Tensor) -> bool:
    """Return ``bool(values.any())``. Of a usual gradient the first row is enough to tell."""
    return bool(values[:1].any()) or bool(values.any())


def _gradient_scaler_exists() -> bool:
    """Return whether this process has an enabled GradScaler. Looks at all objects: call it once
    per table.
    """
    return any(
        issubclass(type(found), torch.amp.GradScaler) and found.is_enabled()
        for found in gc.get_objects()
    )
