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

__all__ = ["ApplyGradients", "Gradients", "Reduction", "RowGradient", "check_choices"]

ApplyGradients = Literal["step", "backward"]
Reduction = Literal["mean", "sum"]


def check_choices(apply_gradients: object, reduction: object) -> None:
    """Raise ArgumentError if one of the options of :meth:`Table.create` is none of its choices."""
    for option, value, kind in (
        ("apply_gradients", apply_gradients, ApplyGradients),
        ("reduction", reduction, Reduction),
    ):
        if value is not None and value not in get_args(kind):
            raise ArgumentError(
                f"{option} = {value!r}: the choices are {', '.join(get_args(kind))}"
            )


class RowGradient(torch.Tensor):
    """Gradient ``(n, dim)`` of rows, of which this process has its share ``(m, dim)``.

    The first operation on its elements gathers them, so it is collective; the result is the same
    on every process.

    Args:
        share: its keys, ascending, ``(m,)``, and its rows.
        shape: of the whole gradient.
        is_finite: whether all shares are.
        gather: returns all keys, ascending, and their rows, collectively; None if the share is the
            whole.
        device: of the whole gradient.
    """

    is_finite: bool
    _share: tuple[Tensor, Tensor]
    _gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    _whole: tuple[Tensor, Tensor] | None

    def __new__(
        cls,
        share: tuple[Tensor, Tensor],
        shape: tuple[int, int],
        is_finite: bool,
        gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
        device: torch.device,
    ) -> RowGradient:
        self: RowGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=share[1].dtype, device=device
        )
        self._share, self.is_finite, self._gather, self._whole = share, is_finite, gather, None
        return self

    def with_values(self, values: Tensor) -> RowGradient:
        """Return a gradient of the same rows, with other ``values``."""
        keys, _ = self.whole()
        shape = values.shape[0], values.shape[1]
        changed = RowGradient((keys, values), shape, False, None, values.device)
        changed._whole = keys, values
        return changed

    @property
    def share(self) -> tuple[Tensor, Tensor] | None:
        """The share; None once the whole gradient was gathered, which may have changed since."""
        return self._share if self._whole is None else None

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return all keys, ascending, and their rows. Collective at the first call."""
        if self._whole is None:
            keys, values = self._gather(*self._share) if self._gather else self._share
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
        if args and isinstance(args[0], RowGradient):
            # By a DTensor, such as a factor that clips this gradient and those of FSDP.
            args = args[0], *(x.full_tensor() if hasattr(x, "full_tensor") else x for x in args[1:])
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
        self.name, self.rule = name, server.rule
        self._server, self._worker = server, worker
        self._ranks = server.topology.ranks
        self.apply, self._reduction = apply, reduction
        self._exchange: GradientExchange | None = None
        self._is_checked = self._is_scaler_near = False
        self._configured: tuple[float, int] | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._values: RowGradient | None = None
        self._pending: dict[int, list[tuple[Tensor, Tensor]]] = {}
        with _torch.plain_torch():  # a table has memory, also inside deferred_init
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
        return None if self._values is None else self._values.whole()[0]

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
            self._values = None
            self._pending.clear()
        elif self._values is None or values.shape != self._values.shape:
            raise ArgumentError(
                "the gradient of a table's rows comes from backward(); it can be scaled or "
                "cleared, not set"
            )
        elif values is not self._values:
            self._values = self._values.with_values(values)

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
        self._check_first()
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
        sizes, gather, is_finite = [len(keys)], None, bool(values.sum().isfinite())
        if exchange is not None:
            sizes, is_finite = exchange.sizes(len(keys), is_finite)
            gather = partial(exchange.gather, sizes=sizes)
        shape = sum(sizes), values.shape[1]
        self._values = RowGradient((keys, values), shape, is_finite, gather, device)

    @property
    def is_cleared(self) -> bool:
        """Whether ``zero_grad(set_to_none=False)`` has cleared the gradient: no row has one.

        A gradient that is zero is kept as -0.0, so cleared ones are those with +0.0 only.
        """
        if self._values is None or self._values.share is not None:
            return self._values is None
        _, values = self._values.whole()
        return not (_has_nonzero(values) or values.signbit().any())

    def begin_step(
        self, optimizer: torch.optim.Optimizer, lr: float, problem: ArgumentError | None
    ) -> None:
        """Raise on every process if one cannot step. Collective.

        Args:
            problem: with the options of ``optimizer``.

        Raises:
            ArgumentError: ``problem``; or the table has a newer optimizer; or the gradient is NaN
                or infinite.
            MismatchError: another process cannot step, or steps otherwise.
            UnavailableError: the table is closed.
        """
        self._server.check_open()
        try:
            self._check(optimizer)
        except ArgumentError as error:
            problem = problem or error
        exchange = self._shared_exchange()
        if exchange is not None:
            exchange.begin_step(problem, lr, not self.is_cleared)
        elif problem is not None:
            raise problem

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is None or self._optimizer() is not optimizer:
            raise ArgumentError(
                f"table {self.name!r} has a newer optimizer than this one; if both step, "
                "each gradient is applied twice. Step the newest only; for several tables make "
                "one, TableOptimizer(weights)"
            )
        found = self._values
        if found is not None and (found.share is None or not found.is_finite):
            check_finite(*found.whole(), f"step of table {self.name!r}")

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
        assert self._values is not None
        if self._values.share is not None:
            return self._values.share
        keys, values = self._values.whole()
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
                self._ranks,
                lambda: topology.group,
                topology.settings.timeout_s,
                self._server.lose,
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

    def _check_first(self) -> None:
        """Raise at the first gradient if it would be lost, or applied while it is scaled."""
        if self._is_checked:
            if self._is_scaler_near and _torch.backward_is_of_product():
                self._refuse_scaling()
            return
        if self.apply is None:
            raise ArgumentError(
                f"table {self.name!r} has no optimizer to apply gradients: make one with "
                "table.optimizer() and call its step(), or pass apply_gradients='backward', which "
                "applies them in the backward pass"
            )
        if self.apply == "backward" and _gradient_scaler_exists():
            self._is_scaler_near = True
            if _torch.backward_is_of_product():
                self._refuse_scaling()
        self._is_checked = True

    def _refuse_scaling(self) -> None:
        raise UnsupportedError(
            f"table {self.name!r} would apply gradients in the backward pass, but there is a "
            "GradScaler, and the loss is a product, as a scaled one is: the gradients would be "
            "scaled, and maybe infinite. Make an optimizer before the first backward pass "
            "(table.optimizer()) and step it with scaler.step. If the scaler is for another model, "
            "let the loss end with another operation, e.g. (loss * factor).sum()"
        )


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
