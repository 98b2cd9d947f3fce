"""Communications under ``torch.compile``: one ``torch.library`` operator with an ordered effect.

It takes and returns the token of the chain, as an eager communication does. A compiled region thus
joins the chain as one node, both passes keep the order, and no communication is eliminated as
unused. Its other arguments encode a communication: a text of the communicator and the name of the
class for the function, and integers for the function's arguments. Shapes and derivatives are those
of the class.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.mpi import _chain

if TYPE_CHECKING:
    from torchrelay.mpi._comm import Comm
    from torchrelay.mpi._record import Call

__all__ = ["communicate", "communicator", "eager_only", "kinds", "register"]


_Function = TypeVar("_Function", bound=Callable[..., Any])


kinds: dict[str, type[Call]] = {}
"""The classes of communications by their names, to which each class adds itself."""

_numbers = itertools.count()
_communicators: weakref.WeakValueDictionary[str, Comm] = weakref.WeakValueDictionary()


def register(comm: Comm) -> str:
    """Return the key by which compiled code finds ``comm`` and its backward communicator.

    A text, because torch.compile takes an integer that changes for a variable.
    """
    key = f"{next(_numbers)} "
    _communicators[key] = comm
    return key


def communicator(kind: str) -> Comm:
    """Return the communicator whose key ``kind`` starts with."""
    return _communicators[kind[: kind.index(" ") + 1]]


def communicate(call: Call, x: Tensor, eager: Callable[[Any, Tensor], Tensor]) -> Tensor:
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
    chain = call.comm.job.slot.chain
    if not (torch.is_grad_enabled() and call.differentiable(x)):
        with torch.no_grad():
            return _operator(x, chain.head, *_encoded(traced))[0]  # type: ignore[no-any-return]
    y, chain.head = _operator(x, chain.head, *_encoded(traced))
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


NOTHING = [0, 1]  # without a class: a backward pass without communication begins the chain's


def _encoded(call: Call) -> tuple[str, list[int]]:
    comm = call.comm
    context = (int(comm.convention == "replicated"), int(comm.is_reverse))
    return comm.key + type(call).__name__, [*context, *call.encode()]


def _decoded(kind: str, code: Sequence[int]) -> Call:
    is_replicated, is_reverse, *rest = code
    comm = communicator(kind).replace("replicated" if is_replicated else "sum")
    return kinds[kind[kind.index(" ") + 1 :]].decode(comm.reverse if is_reverse else comm, rest)


@torch.library.custom_op("torchrelay::mpi", mutates_args=())
def _operator(x: Tensor, token: Tensor, kind: str, code: Sequence[int]) -> tuple[Tensor, Tensor]:
    slot = communicator(kind).job.slot
    if code[1]:
        _chain.begin_compiled(slot, _torch.backward_id())
    else:
        _chain.check_compiled(slot)
    y = x if kind.endswith(" ") else _decoded(kind, code).forward(x)
    return y.clone() if y.data_ptr() == x.data_ptr() else y.contiguous(), torch.zeros_like(token)


@_operator.register_fake
def _(x: Tensor, token: Tensor, kind: str, code: Sequence[int]) -> tuple[Tensor, Tensor]:
    shape = x.shape if kind.endswith(" ") else _decoded(kind, code).result_shape(x.shape)
    return x.new_empty(shape), torch.empty_like(token)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.call = inputs[2:]


def _backward(ctx: Any, grad: Tensor, token: Tensor) -> tuple[Any, ...]:
    call, grad, complete = _decoded(*ctx.call).adjoint(grad)
    if call is None:
        token, _ = _operator(token, token, communicator(ctx.call[0]).key, NOTHING)
    else:
        grad, token = _operator(grad, token, *_encoded(call))
    return complete(grad), token, None, None


_operator.register_autograd(_backward, setup_context=_remember)
_torch.make_ordered(_operator)
