"""Recording of communications as nodes of autograd's graph.

A :class:`Call` is one communication with its arguments: its forward, its adjoint (another call,
which is recorded too, so that it can be differentiated again), and its batched form for ``vmap``.
Every call is linear in its tensor. :func:`record` runs it in torch's current mode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from torchrelay import _torch
from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.mpi import _chain, _compiled, _headers
from torchrelay.mpi._dtypes import Op, check_tensor, is_differentiable
from torchrelay.mpi._library import refusal
from torchrelay.mpi._memory import packed, placed
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import Requests
from torchrelay.mpi._wait import check_usable, finish

if TYPE_CHECKING:
    from torchrelay.mpi._comm import Comm

__all__ = [
    "Call",
    "Plan",
    "Started",
    "record",
    "run",
    "transforms_active",
    "unchanged",
]


OPS = tuple(Op)


def unchanged(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


@dataclass(slots=True, eq=False)
class Started:
    """A started communication: requests, the memory they use, and how to make the result."""

    requests: Requests
    result: Callable[[], Tensor]
    kept: object = None

    def finish(self, call: Call) -> Tensor:
        for request in self.requests:
            finish(request, call, self)
        return self.result()


class Plan(NamedTuple):
    """How to compute a function: communicate ``x`` by ``call``, if given, and then ``complete``."""

    call: Call | None
    x: Tensor
    complete: Callable[[Tensor], Tensor] = unchanged


@dataclass(slots=True, eq=False)
class Call:
    """One communication with its arguments; methods take the tensor.

    The arguments after ``comm`` are integers, ``op``, and at last ``shape`` or a text, ``of``.
    """

    comm: Comm
    overwrites: bool = field(default=False, kw_only=True)
    """Whether the result lies in the input's memory."""
    uniform: bool = field(default=False, kw_only=True)
    """Whether the ranks pass tensors of one shape and get parts of one length."""
    begins_recorded: bool = field(default=False, init=False)
    """Whether it is the start, which is not recorded itself, of one that is."""

    name: ClassVar[str]
    is_collective: ClassVar[bool] = True
    """Whether all ranks of the communicator take part."""
    blocking: ClassVar[bool] = True
    """Whether it may wait for ranks that have not called it yet."""
    transformable: ClassVar[bool] = True
    """Whether ``torch.func`` can transform it."""

    def __init_subclass__(cls) -> None:
        _compiled.kinds[cls.__name__] = cls

    def numbers(self, x: Tensor) -> Sequence[int]:
        """Return what the other ranks need to know of this call; equally many on all ranks."""
        return ()

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        """Start to communicate contiguous ``x``, on a device that the transport takes.

        ``numbers`` are those of all ranks. It may block if ``may_block``: all ranks have made the
        call.
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Communicate, without recording."""
        source = packed(x, self.comm.transport)
        numbers: Sequence[Sequence[int]] = [self.numbers(source)]
        if self.comm.size > 1:
            fields = self.fields(source)
            if not source.is_cpu:
                fields = _headers.on_device(fields, source.device)
            numbers = _headers.exchange_numbers(self, fields, numbers[0])
        return placed(self.start(source, numbers, True).finish(self), x)

    def joined(self, chain: _chain.Chain) -> None:
        """Note that the call has joined a chain, if not all ranks take part in it."""

    def adjoint(self, grad: Tensor) -> Plan:
        """Return how to compute the input's cotangent."""
        raise NotImplementedError

    def backward(self, grad: Tensor) -> Tensor | None:
        """Return the input's cotangent, computed with recorded communications."""
        return run(self.adjoint(grad))

    def tangent(self, tangent: Tensor) -> Tensor:
        """Return the output's tangent."""
        return record(self, tangent)

    def batched(self, size: int) -> Call:
        """Return the call for tensors with a further leading dimension of this ``size``."""
        return self

    def learn(self, batched: Any) -> None:
        """Note what ``batched``, which has run, found out of the other ranks' calls."""

    def in_graph(self, x: Tensor) -> Call | None:
        """Return the call as a compiled graph holds it.

        None if it cannot, because the shape of its result depends on values of other ranks.
        """
        return self

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the result if all ranks pass tensors of ``shape``."""
        return list(shape)

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        """Return the names of the constructor's arguments after ``comm``."""
        names: tuple[str, ...] = cls.__match_args__
        return names[1:]

    def encode(self) -> list[int]:
        """Return the constructor's arguments as integers."""
        code: list[int] = []
        for name in self.parameters():
            value = getattr(self, name)
            if name == "op":
                code.append(OPS.index(value))
            elif name == "shape":
                code.extend(value)
            elif name == "of":
                code.extend(map(ord, value))
            else:
                code.append(value)
        return code

    @classmethod
    def decode(cls, comm: Comm, code: Sequence[int]) -> Call:
        """Invert :meth:`encode`."""
        arguments: list[Any] = list(code)
        for i, name in enumerate(cls.parameters()):
            if name == "op":
                arguments[i] = OPS[code[i]]
            elif name == "shape":
                arguments[i:] = [code[i:]]
            elif name == "of":
                arguments[i:] = ["".join(map(chr, code[i:]))]
        return cls(comm, *arguments, uniform=True)

    def differentiable(self, x: Tensor) -> bool:
        """Return whether to record it; equal on all ranks, so by dtype and arguments only."""
        return is_differentiable(x.dtype)

    def fields(self, x: Tensor) -> _headers.CallSignature:
        """Return what must be equal on all ranks; see ``_headers.described``."""
        return (self.name, self.arguments(), x.dtype, x.shape)

    def describe(self) -> str:
        """Return function and arguments, for messages."""
        return f"{self.name}({self.arguments()})"

    def arguments(self) -> str:
        return ""

    def peers(self) -> Iterable[int]:
        """Return the ranks that this call waits for."""
        return range(self.comm.size)


_TOKEN = torch.empty((), device="cpu")


def _pull_back(ctx: Any, grad: Tensor | None) -> Tensor | None:
    """Compute the input's cotangent, also if only other ranks need it; None if unused here."""
    link: _chain.Link = ctx.link
    if grad is None:
        shape, dtype, device = link.like
        grad = torch.zeros(shape, dtype=dtype, device=device)
    result = link.call.backward(grad)
    return result if ctx.needs_input_grad[1] else None


class Node(torch.autograd.Function):
    """Autograd node of a call outside of ``torch.func``."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, x: Tensor, token: Tensor, chain: _chain.Chain
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, token = call.forward(x), torch.empty_like(_TOKEN)
        # Derivatives of this one continue from the token. And a checkpoint recomputes a segment
        # when a saved tensor is used, up to the last one saved. Each communication saves one, so
        # that all ranks recompute at the same place in the order.
        ctx.save_for_backward(token)
        if call.overwrites:
            ctx.mark_dirty(x)
        ctx.link = _chain.Link(chain, ctx, call, y)
        return y, token

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, _token: Tensor | None
    ) -> tuple[None, Tensor | None, None, None]:
        link: _chain.Link = ctx.link
        if not link.enter(grad is not None):
            return None, None, None, None
        (token,) = ctx.saved_tensors  # a checkpoint recomputes its segment here, on every rank
        if not is_grad_enabled():
            return None, _pull_back(ctx, grad), None, None
        with _chain.recording(link.chain, token if link.chain is not _chain.APART else None):
            return None, _pull_back(ctx, grad), None, None


@_compiled.eager_only
def _forward_eagerly(call: Call, x: Tensor) -> Tensor:
    return call.forward(x)


class TransformNode(torch.autograd.Function):
    """Autograd node of a call inside ``torch.func`` transforms, for each of them and below all."""

    generate_vmap_rule = False

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Record in the grad mode outside of the transforms above, which turn it on."""
        with torch.set_grad_enabled(_here.grad_modes[_torch.transform_depth()]):
            return super().apply(*args)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(call: Call, x: Tensor, token: Tensor, chain: _chain.Chain) -> tuple[Tensor, Tensor]:
        return _forward_eagerly(call, x), torch.empty_like(_TOKEN)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Call, Tensor, Tensor, _chain.Chain], output: tuple[Tensor, Tensor]
    ) -> None:
        call, x, _, chain = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])  # as in Node
        ctx.link = _chain.Link(chain, ctx, call, output[0])
        ctx.like = (x.shape, x.dtype, x.device)
        ctx.is_of_transform = transforms_active()
        # In forward mode the tangent is communicated after the primal. Else a cycle of references.
        ctx.token = output[1] if _torch.in_forward_transform() else None

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, _token: Tensor | None
    ) -> tuple[None, Tensor | None, None, None]:
        link: _chain.Link = ctx.link
        if ctx.is_of_transform:  # which may have ended
            with _chain.continuing(link.chain):
                return None, _pull_back(ctx, grad), None, None
        result: tuple[None, Tensor | None, None, None] = Node.backward(ctx, grad, _token)
        return result

    @staticmethod
    def jvp(
        ctx: Any, _call: None, tangent: Tensor | None, _token: Tensor | None, _chain_arg: None
    ) -> tuple[Tensor, Tensor]:
        chain = ctx.link.chain
        mode = _here.grad_modes[_torch.transform_depth()]
        with _torch.forward_mode_below(), torch.set_grad_enabled(mode):
            if ctx.token is not None:
                token, before = _torch.below_current(ctx.token), chain.wrapped
                chain.follow(token if before is None else token + _torch.below_current(before))
            if tangent is None:
                shape, dtype, device = ctx.like
                tangent = torch.zeros(shape, dtype=dtype, device=device)
            return ctx.link.call.tangent(tangent), torch.zeros_like(_TOKEN)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        call: Call,
        x: Tensor,
        token: Tensor,
        chain: _chain.Chain,
    ) -> Any:
        dim = in_dims[1]
        if in_dims[2] is not None:
            token = token.select(in_dims[2], 0)
        if dim is None:
            return _apply_transformed(call, x, token, chain), (None, None)
        batched = call.batched(x.shape[dim])
        y = _apply_transformed(batched, x.movedim(dim, 0), token, chain)
        call.learn(batched)
        return y, (0, None)


transforms_active, forward_mode_active = _torch.transforms_active, _torch.forward_mode_active
_apply = _torch.apply_of(Node)
_apply_transformed: Any = TransformNode.apply
_unpack_dual: Any = forward_ad.unpack_dual
_make_dual: Any = forward_ad.make_dual


def record(call: Call, x: Tensor) -> Tensor:
    """Run ``call`` on ``x``, recorded in the graph if grad mode is on."""
    if is_compiling():
        return _compiled.communicate(call, x, record)
    if type(x) is not Tensor or x.is_nested:
        x = _plain(call, x)
    try:
        if _torch.profiling():
            with _torch.span(f"torchrelay.mpi.{call.name}"):
                return _record(call, x)
        return _record(call, x)
    except Exception as error:
        cause = refusal(error)
        if cause is None:
            raise
        what = f"{call.describe()} on {call.comm.name}"
        raise ArgumentError(f"{what}: MPI refuses it: {cause}") from error


def run(plan: Plan) -> Tensor:
    """Run ``plan``, recorded in the graph if grad mode is on."""
    call, x, complete = plan
    return complete(x if call is None else record(call, x))


def _plain(call: Call, x: Tensor) -> Tensor:
    """Return the plain tensor in ``x``, with its history.

    Raises:
        ArgumentError: its class has no memory of its own, as DTensor; or it is nested or no tensor.
    """
    check_tensor(x)
    x = _torch.waited(x)
    if _torch.dispatches_itself(x):
        raise ArgumentError(f"{call.describe()} of a {type(x).__name__}: {_instead_of(x)}")
    return x


def _instead_of(x: Tensor) -> str:
    """Return what to communicate instead of a tensor whose class has no memory of its own."""
    from torchrelay.deferred import fake, is_deferred  # noqa: PLC0415 - for an error only

    if is_deferred(x):
        return "it is deferred and has no values yet; communicate after materialize_module()"
    if fake.is_fake(x) or _torch.is_fake(x):
        return "it is fake and has no values; communicate a tensor made outside the fake mode"
    if _torch.sharding_of(x) == "dtensor":
        return "communicate its to_local(), and wrap the result with DTensor.from_local()"
    return "communicate the tensors inside, and wrap the results again"


def _record(call: Call, x: Tensor) -> Tensor:
    check_usable(call.comm)
    _torch.recompute_whole()  # on every rank
    if settings.debug and call.is_collective and call.blocking:
        is_recorded = is_grad_enabled() and call.differentiable(x)
        compared = partial(_headers.exchange_numbers, call, (*call.fields(x)[:4], is_recorded))
        compared() if is_recorded else _torch.computed_once(compared)
    if not (is_grad_enabled() or transforms_active() or forward_mode_active()):
        return _unrecorded(call, x)  # backward passes too
    if transforms_active():
        return _record_under_transform(call, x)
    if forward_mode_active() and not _here.in_tangent:
        return _record_dual(call, x)
    return _record_plain(call, x)


def _record_plain(call: Call, x: Tensor) -> Tensor:
    if not (is_grad_enabled() and call.differentiable(x)):
        with torch.no_grad():
            return _unrecorded(call, x)
    chain = _chain.current()
    if call.comm.is_alone and call.is_collective:
        return _apply(call, x, _chain.ROOT, _chain.APART)[0]  # type: ignore[no-any-return]
    try:
        y, chain.head = _apply(call, x, chain.extend(call.name), chain)
    except BaseException:
        chain.names.pop()
        raise
    if not call.is_collective:
        call.joined(chain)
    return y  # type: ignore[no-any-return]


def _unrecorded(call: Call, x: Tensor) -> Tensor:
    """Communicate without a place in the order; not again if a checkpoint is recomputed.

    Ranks recompute a segment together where it saved a communication's token. Of one without them,
    what it saved may differ between ranks.
    """
    if call.begins_recorded or not _torch.saved_by_hooks():
        return call.forward(x)
    kept = _torch.computed_once(lambda: call.forward(x).clone())
    return x.copy_(kept) if call.overwrites else kept.clone()


class _Here(threading.local):
    """What each thread has of its own."""

    in_tangent = False
    grad_modes: Sequence[bool] = ()  # of the transforms around the call that runs


_here = _Here()


def _record_dual(call: Call, x: Tensor) -> Tensor:
    """Run in forward mode: every rank communicates a tangent, zero if it has none."""
    primal, tangent = _unpack_dual(x)
    if not call.differentiable(x):
        return _record_plain(call, primal)
    if tangent is None:
        tangent = torch.zeros_like(primal)
    _here.in_tangent = True
    try:
        y = _record_plain(call, primal)
        return _make_dual(y, call.tangent(tangent))  # type: ignore[no-any-return]
    finally:
        _here.in_tangent = False


def _record_under_transform(call: Call, x: Tensor) -> Tensor:
    """Run inside ``torch.func``: in the thread's chain, in the graph of each transform."""
    if not call.transformable:
        raise UnsupportedError(
            f"{call.describe()} inside a torch.func transform: a rank does not know what the other "
            "differentiates or batches; use Sendrecv or a collective, or torchrelay.mpi.grad and "
            "torch.autograd.forward_ad"
        )
    x = _torch.batched_by_all(x)  # ranks may not agree, such as one with a cotangent of zeros
    modes, _here.grad_modes = _here.grad_modes, _torch.grad_modes()
    try:
        if call.comm.is_alone or not call.differentiable(x):
            return _apply_transformed(call, x, _TOKEN, _chain.APART)[0]  # type: ignore[no-any-return]
        return _join_under_transform(call, x)
    finally:
        _here.grad_modes = modes


def _join_under_transform(call: Call, x: Tensor) -> Tensor:
    chain = _chain.current()
    before, length, is_recorded = chain.wrapped, len(chain.names), is_grad_enabled()
    with torch.enable_grad():  # which the innermost transform may have turned off for those below
        below = chain.extend(call.name) if _here.grad_modes[0] else _TOKEN
        token = chain.token_in_transform()
        if token is None:
            token = below
        elif below is not _TOKEN and not chain.is_wrapped(below):
            token = token + below
    try:
        y, head = _apply_transformed(call, x, token, chain)
    except BaseException:
        del chain.names[length:]
        raise
    with torch.enable_grad():
        if chain.wrapped is not before:  # a tangent was communicated, below this transform
            head = head + chain.wrapped
        if not is_recorded:  # in the innermost transform
            head = head + token
    chain.follow(head)
    return y  # type: ignore[no-any-return]
