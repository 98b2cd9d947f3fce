"""Communications under ``torch.compile``: one ``torch.library`` operator with an ordered effect.

It takes and returns the token of the chain, as an eager communication does. A compiled region thus
joins the chain as one node, both passes keep the order, and no communication is eliminated as
unused. Its other arguments encode a communication: a number for the communicator, the name of the
class for the function, and integers for its arguments. Shapes and derivatives are those of the
class.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.mpi import _chain
from torchrelay.mpi._comm import Comm

__all__ = ["Traceable", "communicate", "communicator", "eager_only", "join", "register"]


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Traceable(Protocol):
    """The interface of communications for the operator; see ``Call``."""

    comm: Comm

    def in_graph(self, x: Tensor) -> Traceable | None: ...
    def encode(self) -> list[int]: ...
    @classmethod
    def decode(cls, comm: Comm, code: Sequence[int]) -> Traceable: ...
    def result_shape(self, shape: Sequence[int]) -> list[int]: ...
    def differentiable(self, x: Tensor) -> bool: ...
    def forward(self, x: Tensor) -> Tensor: ...
    def adjoint(self, grad: Tensor) -> Any: ...


kinds: dict[str, type[Traceable]] = {}
"""The classes of communications by their names, to which each class adds itself."""

_numbers = itertools.count()
_communicators: dict[int, weakref.WeakSet[Comm]] = {}


def register(comm: Comm) -> int:
    """Return the number by which compiled code finds ``comm`` and its backward communicator."""
    number = next(_numbers)
    _communicators[number] = weakref.WeakSet([comm])
    weakref.finalize(comm.lease, _communicators.pop, number, None)
    return number


def join(comm: Comm) -> None:
    """Register ``comm``, a copy of the communicator that has its number."""
    _communicators[comm.number].add(comm)


def communicator(number: int) -> Comm:
    """Return the communicator of ``number``, or a copy of it."""
    return next(iter(_communicators[number]))


def communicate(call: Traceable, x: Tensor, eager: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Run ``call`` on ``x`` as a traceable operator, or ``eager(call, x)`` outside of the graph.

    It runs outside if a shape depends on other ranks' arguments, if the sender is unknown, or
    inside a ``torch.func`` transform, which operators of ``torch.library`` do not support.
    """
    if _torch.transforms_active():
        _torch.graph_break("a communication inside of a torch.func transform")
    traced = call.in_graph(x)
    if traced is None:
        disable: Any = torch.compiler.disable
        outside = disable(eager, reason="ranks take unequal parts, or receive from any rank")
        return outside(call, x)  # type: ignore[no-any-return]
    chain, comm = _chain.current_compiled(), traced.comm
    arguments = (comm.number, comm.convention, type(traced).__name__, traced.encode(), False)
    if not call.differentiable(x):
        with torch.no_grad():
            return _operator(x, chain.head, *arguments)[0]  # type: ignore[no-any-return]
    y, chain.head = _operator(x, chain.head, *arguments)
    return y  # type: ignore[no-any-return]


def eager_only(function: _Function) -> _Function:
    """Exclude ``function`` and what it calls from ``torch.compile``; a decorator."""
    disabled: list[Any] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # loading it takes seconds
            return function(*args, **kwargs)
        if not disabled:
            disable: Any = torch.compiler.disable
            disabled.append(disable(function, reason="a communication in two steps"))
        return disabled[0](*args, **kwargs)

    return run  # type: ignore[return-value]


_NOTHING = ""  # a backward pass without communication: the chain's backward pass begins even so


def _decode(
    comm: int, convention: str, kind: str, code: Sequence[int], backward: bool
) -> Traceable:
    found = communicator(comm).replace(convention=convention)
    return kinds[kind].decode(found.reverse if backward else found, code)


@torch.library.custom_op("torchrelay::mpi", mutates_args=())
def _operator(
    x: Tensor,
    token: Tensor,
    comm: int,
    convention: str,
    kind: str,
    code: Sequence[int],
    backward: bool,
) -> tuple[Tensor, Tensor]:
    if backward:
        _chain.begin_compiled(_torch.backward_id())
    else:
        _chain.check_compiled()
    if kind == _NOTHING:
        return x.clone(), torch.zeros_like(token)
    y = _decode(comm, convention, kind, code, backward).forward(x)
    return y.clone() if y.data_ptr() == x.data_ptr() else y.contiguous(), torch.zeros_like(token)


@_operator.register_fake
def _(
    x: Tensor,
    token: Tensor,
    comm: int,
    convention: str,
    kind: str,
    code: Sequence[int],
    backward: bool,
) -> tuple[Tensor, Tensor]:
    if kind == _NOTHING:
        return torch.empty_like(x), torch.empty_like(token)
    call = _decode(comm, convention, kind, code, backward)
    return x.new_empty(call.result_shape(x.shape)), torch.empty_like(token)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.call = inputs[2:]


def _backward(ctx: Any, grad: Tensor, token: Tensor) -> tuple[Any, ...]:
    call, grad, complete = _decode(*ctx.call).adjoint(grad)
    number, convention = ctx.call[:2]
    if call is None:
        token, _ = _operator(token, token, number, convention, _NOTHING, [], True)
    else:
        name = type(call).__name__
        grad, token = _operator(
            grad, token, number, call.comm.convention, name, call.encode(), call.comm.is_reverse
        )
    return complete(grad), token, *([None] * len(ctx.call))


_operator.register_autograd(_backward, setup_context=_remember)
_torch.make_ordered(_operator)
