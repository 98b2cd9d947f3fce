"""The collectives: Bcast, Gather, Allgather, Scatter, Alltoall and Alltoallv copy the tensors of
ranks, or parts; Allreduce, Reduce, Reduce_scatter, Scan and Exscan reduce them elementwise.

Gather and Scatter are each other's derivatives, as are Bcast and Reduce, and Allgather and
Reduce_scatter, of sums; that of an Allreduce is an Allreduce, and that of a scan one in the reverse
order of ranks. What only root's tensor decides has no derivative for those of others. Alltoall
gathers along one axis and scatters along another; with equal axes, parts move between ranks. Its
derivative exchanges the axes. Alltoallv sends a part of any length to each rank, and its derivative
sends the cotangents of the parts back.

MAX, MIN and PROD are not linear: if a derivative is wanted, they gather, and reduce locally. The
derivative of MAX and MIN is then split equally between the ranks that hold the extremum, and that
of PROD is right at zeros.

Replicate marks a tensor, equal on all ranks, as used differently by each from here on. It
communicates nothing forward. Under the convention "replicated" it is the conjugate of Allreduce:
its derivative sums the cotangents of the ranks. Under "sum" it is the identity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from torchrelay import _torch
from torchrelay.errors import ArgumentError
from torchrelay.mpi._dtypes import (
    ARITHMETIC,
    CODES,
    DTYPES,
    LOGICAL,
    NATIVE,
    Op,
    check_integer,
    check_op,
    check_reduction,
    check_tensor,
    is_differentiable,
)
from torchrelay.mpi._headers import MAX_NUMBERS, CallSignature, exchange_values, payload_bytes
from torchrelay.mpi._inplace import overwrite
from torchrelay.mpi._memory import (
    Blocks,
    Layout,
    any_length,
    axis_of,
    check_counts,
    fresh,
    fresh_like,
    layout,
    packed,
    parts,
    placed,
    with_length,
)
from torchrelay.mpi._record import Call, Plan, Started, record, run, unchanged
from torchrelay.mpi._settings import settings

if TYPE_CHECKING:
    from torchrelay.mpi._comm import Comm

__all__ = [
    "Allreduce",
    "Bcast",
    "Exscan",
    "Located",
    "Replicate",
    "Scan",
    "allgather",
    "allreduce",
    "allreduce_located",
    "alltoall",
    "alltoallv",
    "gather",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "scan",
    "scatter",
    "zeros_with_graph",
]

MAX_DIMS = MAX_NUMBERS - 3


def is_differentiated() -> bool:
    """Return whether derivatives may be needed; equal on all ranks."""
    return is_grad_enabled() or _torch.forward_mode_active()


def zeros_with_graph(y: Tensor) -> Tensor:
    """Return zeros of y's shape that depend on it, so that a loss of them runs its backward."""
    return torch.where(torch.zeros((), dtype=torch.bool, device=y.device), y, 0)


def check_parts(call: Call, lengths: Sequence[int], there: int, axis: int) -> None:
    """Raise :class:`ArgumentError` if the ``lengths`` that ranks ask for are not all there is."""
    if min(lengths) < 0 or sum(lengths) != there:
        raise ArgumentError(
            f"{call.describe()}: the ranks ask for {list(lengths)}, together {sum(lengths)}, but "
            f"there are {there} along axis {axis}"
        )


class AlongAxis(Call):
    """A call on tensors that are cut or concatenated along an axis."""

    __slots__ = ()
    axis: int

    def batched(self, size: int) -> Call:
        return replace(self, axis=self.axis + 1)  # type: ignore[call-arg]

    def in_graph(self, x: Tensor) -> Call | None:
        return self if self.uniform else None

    def fields(self, x: Tensor) -> CallSignature:
        shape = x.shape if self.uniform else any_length(x, self.axis)
        return (self.name, self.arguments(), x.dtype, shape)

    def arguments(self) -> str:
        return f"axis={self.axis}"


# Copies


class Replicate(Call):
    __slots__ = ()
    name = "Replicate"

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        return Started([], x.clone)

    def adjoint(self, grad: Tensor) -> Plan:
        if self.comm.convention == "sum":
            return Plan(None, grad)
        return Plan(Allreduce(self.comm.reverse, Op.SUM), grad)


def own_use(comm: Comm, grad: Tensor, complete: Callable[[Tensor], Tensor] = unchanged) -> Plan:
    """Differentiate a function with equal results on all ranks, whose cotangent is ``grad``."""
    return Plan(Replicate(comm.reverse) if is_differentiated() else None, grad, complete)


@dataclass(slots=True, eq=False)
class Bcast(Call):
    name = "Bcast"
    root: int

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        if self.overwrites:
            result = x
        else:
            result = x.clone() if self.comm.rank == self.root else fresh_like(x)
        requests = self.comm.transport.broadcast(result, self.root)
        return Started(requests, lambda: result)

    def adjoint(self, grad: Tensor) -> Plan:
        if self.comm.convention == "replicated":
            return own_use(
                self.comm, grad, unchanged if self.comm.rank == self.root else zeros_with_graph
            )
        return Plan(Reduce(self.comm.reverse, Op.SUM, self.root), grad)

    def arguments(self) -> str:
        return f"root={self.root}"


@dataclass(slots=True, eq=False)
class Allgather(AlongAxis):
    name = "Allgather"
    axis: int
    of: str = ""  # the reduction that each rank computes of the result, for messages
    lengths: Sequence[int] = field(default=(), init=False)  # of all ranks, once they are known

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (x.shape[self.axis],)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        self.lengths = [length for (length,) in numbers]
        layout = parts(tuple(x.shape), tuple(self.lengths), self.axis)
        received = Blocks.empty(x.dtype, layout, x.device)
        move = self.comm.transport.move
        requests = move("Allgatherv", x, received, None, layout.total, may_block)
        return Started(requests, received.joined, x)

    def adjoint(self, grad: Tensor) -> Plan:
        rank, size = self.comm.rank, self.comm.size
        lengths = [grad.shape[self.axis] // size] * size if self.uniform else self.lengths
        if self.comm.convention == "replicated":
            start, length = sum(lengths[:rank]), lengths[rank]
            return own_use(self.comm, grad, lambda whole: whole.narrow(self.axis, start, length))
        scatter, arguments = ReduceScatter, (Op.SUM, self.axis, lengths[rank])
        return Plan(scatter(self.comm.reverse, *arguments, uniform=self.uniform), grad)

    def learn(self, batched: Allgather) -> None:
        self.lengths = batched.lengths

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, shape[self.axis] * self.comm.size)

    def arguments(self) -> str:
        return f"axis={self.axis}{self.of}"


@dataclass(slots=True, eq=False)
class Gather(AlongAxis):
    name = "Gather"
    axis: int
    length: int
    root: int

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (x.shape[self.axis],)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        layout = parts(tuple(x.shape), tuple([length for (length,) in numbers]), self.axis)
        is_root = self.comm.rank == self.root
        received = Blocks.empty(x.dtype, layout, x.device) if is_root else None
        move = self.comm.transport.move
        requests = move("Gatherv", x, received, self.root, layout.total, may_block)
        if received is not None:
            return Started(requests, received.joined, x)
        nothing = x.new_empty(with_length(x.shape, self.axis, 0))
        return Started(requests, lambda: nothing, x)

    def adjoint(self, grad: Tensor) -> Plan:
        if self.uniform and self.comm.rank != self.root:  # give the shape of root's cotangent
            shape = with_length(grad.shape, self.axis, self.length * self.comm.size)
            grad = grad.sum().expand(shape)  # zero, since it is empty
        arguments = (self.comm.reverse, self.axis, self.length, self.root)
        return Plan(Scatter(*arguments, uniform=self.uniform), grad)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        is_root = self.comm.rank == self.root
        return with_length(shape, self.axis, self.length * self.comm.size if is_root else 0)

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


@dataclass(slots=True, eq=False)
class Scatter(AlongAxis):
    name = "Scatter"
    axis: int
    length: int
    root: int
    input_shape: Sequence[int] = field(default=(), init=False)
    recorded: bool = field(default=False, kw_only=True)

    def numbers(self, x: Tensor) -> Sequence[int]:
        """Return the length of this rank's part, and dtype and shape, which count on root."""
        self.input_shape = tuple(x.shape)
        if x.ndim > MAX_DIMS:
            raise ArgumentError(f"{self.describe()}: {x.ndim} axes are more than {MAX_DIMS}")
        rest = [0] * (MAX_DIMS - x.ndim)
        return (self.length, CODES[x.dtype], x.ndim, *x.shape, *rest)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        _, code, ndim, *shape = numbers[self.root]
        whole, lengths = tuple(shape[:ndim]), [length for length, *_ in numbers]
        axis = self._check(whole, lengths)
        blocks = Blocks.cut(x, lengths, axis) if self.comm.rank == self.root else None
        layout = parts(whole, tuple(lengths), axis)
        mine = layout.shapes[self.comm.rank]
        received = fresh(mine, DTYPES[code], x.device)
        move = self.comm.transport.move
        requests = move("Scatterv", blocks, received, self.root, layout.total, may_block)
        return Started(requests, lambda: received, blocks)

    def _check(self, whole: tuple[int, ...], lengths: list[int]) -> int:
        """Return the axis, counted from the front, or raise on all ranks alike."""
        ndim = len(whole)
        if not -ndim <= self.axis < ndim:
            raise ArgumentError(f"{self.describe()}: root's tensor has {ndim} axes")
        axis = self.axis % ndim
        check_parts(self, lengths, whole[axis], axis)
        return axis

    def adjoint(self, grad: Tensor) -> Plan:
        axis, is_root = self.axis % grad.ndim, self.comm.rank == self.root
        length, uniform, shape = grad.shape[axis], self.uniform, self.input_shape
        call = Gather(self.comm.reverse, axis, length, self.root, uniform=uniform)
        if uniform:
            shape = with_length(grad.shape, axis, length * self.comm.size)
        # An empty tensor's sum is zero, and depends on it: differentiated again, all ranks reach
        # the Gather.
        return Plan(
            call, grad, lambda gathered: gathered if is_root else gathered.sum().expand(shape)
        )

    def batched(self, size: int) -> Scatter:
        return replace(self, axis=self.axis + (self.axis >= 0))

    def learn(self, batched: Scatter) -> None:
        self.input_shape = batched.input_shape[1:]

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, self.length)

    def fields(self, x: Tensor) -> CallSignature:
        if self.uniform:
            return AlongAxis.fields(self, x)
        return (self.name, self.arguments(), None, None, self.recorded)

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


@dataclass(slots=True, eq=False)
class Alltoall(AlongAxis):
    name = "Alltoall"
    axis: int  # along which it gathers
    scatteraxis: int
    numelem: int
    length: int  # of the input along axis: what the derivative asks for
    of: str = ""  # as in Allgather

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (self.numelem, x.shape[self.axis])

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        wanted, held = zip(*numbers, strict=True)
        g, s = self.axis, self.scatteraxis
        there = sum(held) if g == s else x.shape[s]
        check_parts(self, wanted, there, s)
        sending, parts, total = _cuts(tuple(x.shape), g, s, wanted, held, self.comm.rank)
        blocks = Blocks.cut(x, sending, s)
        received = Blocks.empty(x.dtype, parts, x.device)
        requests = self.comm.transport.move("Alltoallv", blocks, received, None, total, may_block)
        return Started(requests, received.joined, blocks)

    def adjoint(self, grad: Tensor) -> Plan:
        g, s, uniform = self.scatteraxis, self.axis, self.uniform
        call = Alltoall(self.comm.reverse, g, s, self.length, grad.shape[g], uniform=uniform)
        return Plan(call, grad)

    def batched(self, size: int) -> Alltoall:
        return replace(self, axis=self.axis + 1, scatteraxis=self.scatteraxis + 1)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        gathered = with_length(shape, self.axis, shape[self.axis] * self.comm.size)
        return with_length(gathered, self.scatteraxis, self.numelem)

    def arguments(self) -> str:
        return f"gatheraxis={self.axis}, scatteraxis={self.scatteraxis}{self.of}"


@functools.lru_cache(maxsize=128)
def _cuts(
    shape: tuple[int, ...],
    gatheraxis: int,
    scatteraxis: int,
    wanted: tuple[int, ...],
    held: tuple[int, ...],
    rank: int,
) -> tuple[list[int], Layout, int]:
    """Return what ``rank`` sends, as lengths, what it receives, and how many elements all hold."""
    if gatheraxis == scatteraxis:
        old, new, peers = _borders(held), _borders(wanted), range(len(wanted))
        sending = [_overlap(old[rank : rank + 2], new[peer : peer + 2]) for peer in peers]
        lengths = [_overlap(old[peer : peer + 2], new[rank : rank + 2]) for peer in peers]
    else:
        sending, lengths = list(wanted), [wanted[rank]] * len(wanted)
    shapes = []
    for length, own in zip(held, lengths, strict=True):
        theirs = with_length(shape, gatheraxis, length)
        shapes.append(tuple(with_length(theirs, scatteraxis, own)))
    total = math.prod(with_length(shape, gatheraxis, sum(held)))
    return sending, layout(tuple(shapes), gatheraxis), total


def _borders(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _overlap(a: list[int], b: list[int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


@dataclass(slots=True, eq=False)
class Alltoallv(AlongAxis):
    name = "Alltoallv"
    sent: Sequence[int]
    axis: int
    received: Sequence[int] = field(default=(), init=False)  # how much comes from each rank

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (x.numel(),)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        move, size = self.comm.transport.move, self.comm.size
        counts = Blocks.cut(torch.tensor(self.sent, device="cpu"), [1] * size, 0)
        coming = Blocks.empty(torch.int64, counts.layout)
        requests = move("Alltoallv", counts, coming, None, size, may_block)
        self.received = Started(requests, coming.joined, counts).finish(self).tolist()
        blocks = Blocks.cut(x, self.sent, self.axis)
        layout = parts(tuple(x.shape), tuple(self.received), self.axis)
        received = Blocks.empty(x.dtype, layout, x.device)
        total = sum([count for (count,) in numbers])
        requests = move("Alltoallv", blocks, received, None, total, may_block)
        return Started(requests, received.joined, blocks)

    def adjoint(self, grad: Tensor) -> Plan:
        return Plan(Alltoallv(self.comm.reverse, self.received, self.axis), grad)

    def learn(self, batched: Alltoallv) -> None:
        self.received = batched.received


def is_uniform(comm: Comm, x: Tensor, axis: int, length: int) -> bool:
    """Return whether a compiled graph holds a call that gets ``length`` along ``axis`` of ``x``.

    In the graph, all ranks are assumed to pass tensors of one shape and to get equal parts.
    """
    return is_compiling() and length * comm.size == x.shape[axis]


def allgather(comm: Comm, x: Tensor, axis: int) -> Plan:
    """Concatenate all ranks' ``x`` along ``axis`` on every rank."""
    axis = axis_of(axis, x)
    return Plan(Allgather(comm, axis, uniform=is_compiling()), x)


def gather(comm: Comm, x: Tensor, axis: int, root: int) -> Plan:
    """Concatenate all ranks' ``x`` along ``axis`` on root; others get an empty tensor."""
    axis = axis_of(axis, x)
    return Plan(Gather(comm, axis, x.shape[axis], comm.check_rank(root), uniform=is_compiling()), x)


def scatter(comm: Comm, x: Tensor, axis: int, length: int, root: int) -> Plan:
    """Return a part of root's ``x`` along ``axis``, of the length that this rank asks for.

    Other ranks' tensors are not read, but decide like root's whether they record it. In a compiled
    graph, they have the shape of root's.
    """
    check_tensor(x)
    check_integer("numelem", length)
    comm.check_rank(root)
    recorded = is_differentiated() and is_differentiable(x.dtype)
    uniform = False
    if is_compiling():
        axis = axis_of(axis, x)
        uniform = is_uniform(comm, x, axis, length)
    return Plan(Scatter(comm, axis, length, root, uniform=uniform, recorded=recorded), x)


def alltoall(comm: Comm, x: Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> Plan:
    """Gather along ``gatheraxis``, and scatter along ``scatteraxis``: ``numelem`` to this rank."""
    g, s = axis_of(gatheraxis, x), axis_of(scatteraxis, x)
    check_integer("numelem", numelem)
    uniform = g != s and is_uniform(comm, x, s, numelem)
    return Plan(Alltoall(comm, g, s, numelem, x.shape[g], uniform=uniform), x)


def alltoallv(comm: Comm, x: Tensor, sendcounts: Sequence[int], axis: int) -> Plan:
    """Send ``sendcounts[r]`` along ``axis`` to rank r, and join what comes in the ranks' order."""
    axis = axis_of(axis, x)
    sent = check_counts(sendcounts, comm.size, x.shape[axis])
    return Plan(Alltoallv(comm, sent, axis), x)


# Reductions


@dataclass(slots=True, eq=False)
class Reduction(Call):
    """A call that reduces."""

    op: Op

    def __post_init__(self) -> None:
        check_reduction(self.op)

    def differentiable(self, x: Tensor) -> bool:
        return is_differentiable(x.dtype) and self.op in ARITHMETIC

    def arguments(self) -> str:
        return self.op.value


def linear(call: Reduction, x: Tensor, gathered: Callable[[str], Plan]) -> Plan:
    """Return how to reduce ``x`` by ``call``, or as ``gathered`` if its derivative needs more.

    The other ranks compare its argument. Logical operations are computed on bool.

    Raises:
        ArgumentError: ``x`` is no tensor, or the operation is undefined for its dtype.
    """
    check_tensor(x)
    check_op(x.dtype, call.op)
    if call.op in LOGICAL and x.dtype is not torch.bool:
        return Plan(call, x != 0, lambda y: y.to(x.dtype))
    if call.op is Op.SUM or not (is_differentiated() and call.differentiable(x)):
        return Plan(call, x)
    return gathered(f", for {call.describe()}")


def _gathered(comm: Comm, x: Tensor, of: str, complete: Callable[[Tensor], Tensor]) -> Plan:
    """Return how to compute a result from the tensors of all ranks."""
    return Plan(Allgather(comm, 0, of, uniform=True), x.unsqueeze(0), complete)


def reduce_locally(parts: Tensor, op: Op) -> Tensor:
    """Reduce ``parts`` along their first axis with MAX, MIN or PROD, differentiably."""
    if op is Op.PROD:
        # not prod(0), which multiplies by 1, and makes an infinite complex number a NaN
        return functools.reduce(torch.mul, parts.unbind(0))
    return parts.amax(0) if op is Op.MAX else parts.amin(0)


# Allreduce


@dataclass(slots=True, eq=False)
class Allreduce(Reduction):
    name = "Allreduce"

    def forward(self, x: Tensor) -> Tensor:
        """Exchange small tensors with the headers, and reduce them here."""
        native = NATIVE.get((x.dtype, self.op))
        size = self.comm.size
        if native is None or size == 1 or x.numel() * x.itemsize > payload_bytes(size):
            return Call.forward(self, x)
        source = packed(x)  # the header travels through this host
        result = torch.empty_like(source)
        exchange_values(self, source, result, *native)
        return result if source is x else placed(result, x)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        result = fresh_like(x)
        requests = self.comm.transport.reduce(x, result, self.op, None, may_block)
        return Started(requests, lambda: result, x)

    def adjoint(self, grad: Tensor) -> Plan:
        if self.comm.convention == "replicated":
            return own_use(self.comm, grad)
        return Plan(Allreduce(self.comm.reverse, Op.SUM), grad)


class Located(NamedTuple):
    """Result of MAXLOC and MINLOC.

    Attributes:
        values: each element's extremum; NaN if a rank holds one.
        ranks: the lowest rank that holds it.
    """

    values: Tensor
    ranks: Tensor


def allreduce(comm: Comm, x: Tensor, op: Op) -> Plan:
    """Reduce all ranks' ``x``, of one shape and dtype, elementwise on every rank."""
    # Under its convention: all ranks reduce to the same.
    return linear(
        Allreduce(comm, op), x, lambda of: _gathered(comm, x, of, partial(reduce_locally, op=op))
    )


def allreduce_located(comm: Comm, x: Tensor, op: Op) -> Located:
    """Reduce with MAXLOC or MINLOC."""
    check_tensor(x)
    if x.is_complex():
        check_op(x.dtype, op)
    values = run(allreduce(comm, x, Op.MAX if op is Op.MAXLOC else Op.MIN))
    held = x.detach()
    here = torch.where((held == values.detach()) | held.isnan(), comm.rank, comm.size)
    return Located(values, record(Allreduce(comm, Op.MIN), here))


# Reduce


@dataclass(slots=True, eq=False)
class Reduce(Reduction):
    name = "Reduce"
    root: int

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        is_root = self.comm.rank == self.root
        result = x if self.overwrites else fresh_like(x)
        requests = self.comm.transport.reduce(x, result, self.op, self.root, may_block)
        return Started(requests, lambda: result if is_root else result.zero_(), x)

    def adjoint(self, grad: Tensor) -> Plan:
        return Plan(Bcast(self.comm.reverse.replace(convention="sum"), self.root), grad)

    def arguments(self) -> str:
        return f"{self.op.value}, root={self.root}"


def reduce(comm: Comm, x: Tensor, op: Op, root: int) -> Plan:
    """Reduce all ranks' ``x`` on root into new memory, with zeros on the others."""
    call, is_root = Reduce(comm, op, comm.check_rank(root)), comm.rank == root

    def complete(parts: Tensor) -> Tensor:
        # Differentiated again, all ranks must communicate alike.
        y = reduce_locally(parts, op)
        return y if is_root else zeros_with_graph(y)

    return linear(call, x, lambda of: _gathered(comm.replace("sum"), x, of, complete))


def reduce_(comm: Comm, x: Tensor, op: Op, root: int) -> Tensor:
    """Call :func:`reduce` into ``x`` itself."""
    call = Reduce(comm, op, comm.check_rank(root))
    if op is Op.SUM:
        return overwrite(call, x)
    return overwrite(call, x, lambda t: run(reduce(comm, t.clone(), op, root)))


# Reduce_scatter


@dataclass(slots=True, eq=False)
class ReduceScatter(Reduction, AlongAxis):
    name = "Reduce_scatter"
    axis: int
    length: int

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (self.length,)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        lengths = [length for (length,) in numbers]
        check_parts(self, lengths, x.shape[self.axis], self.axis)
        if x.numel() > settings.max_count:
            total, before = fresh_like(x), sum(lengths[: self.comm.rank])
            requests = self.comm.transport.reduce(x, total, self.op, None, may_block)
            return Started(
                requests, lambda: total.narrow(self.axis, before, self.length).clone(), x
            )
        blocks = Blocks.cut(x, lengths, self.axis)
        result = fresh(with_length(x.shape, self.axis, self.length), x.dtype, x.device)
        requests = self.comm.transport.reduce_scatter(blocks, result, self.op, may_block)
        return Started(requests, lambda: result, blocks)

    def adjoint(self, grad: Tensor) -> Plan:
        reverse = self.comm.reverse.replace(convention="sum")
        return Plan(Allgather(reverse, self.axis, uniform=self.uniform), grad)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, self.length)

    def fields(self, x: Tensor) -> CallSignature:
        return (self.name, self.arguments(), x.dtype, x.shape)

    def arguments(self) -> str:
        return f"{self.op.value}, axis={self.axis}"


def reduce_scatter(comm: Comm, x: Tensor, op: Op, axis: int, length: int) -> Plan:
    """Return a part along ``axis`` of the reduction of all ranks' ``x``, of one shape and dtype.

    It has the ``length`` that this rank asks for.
    """
    axis = axis_of(axis, x)
    check_integer("numelem", length)
    uniform = is_uniform(comm, x, axis, length)
    return linear(
        ReduceScatter(comm, op, axis, length, uniform=uniform),
        x,
        lambda of: Plan(
            Alltoall(comm, 0, axis + 1, length, 1, of, uniform=uniform),
            x.unsqueeze(0),
            partial(reduce_locally, op=op),
        ),
    )


# Scan and Exscan


@dataclass(slots=True, eq=False)
class Scan(Reduction):
    name = "Scan"
    exclusive: ClassVar[bool] = False
    descending: int = False  # from the last rank to the first: the derivative

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], may_block: bool) -> Started:
        result = fresh_like(x)
        requests = self.comm.transport.scan(
            x, result, self.op, self.exclusive, bool(self.descending)
        )
        first = self.comm.size - 1 if self.descending else 0
        is_undefined = self.exclusive and self.comm.rank == first
        return Started(requests, lambda: result.zero_() if is_undefined else result, x)

    def adjoint(self, grad: Tensor) -> Plan:
        return Plan(type(self)(self.comm.reverse, Op.SUM, not self.descending), grad)

    def arguments(self) -> str:
        return f"{self.op.value}, from the last rank" if self.descending else self.op.value


class Exscan(Scan):
    __slots__ = ()
    name = "Exscan"
    exclusive = True


def scan(kind: type[Scan], comm: Comm, x: Tensor, op: Op) -> Plan:
    """Reduce the ``x`` of ranks 0 to this one, elementwise; without this one's if exclusive."""
    before = comm.rank + (not kind.exclusive)

    def complete(parts: Tensor) -> Tensor:
        return reduce_locally(parts[:before], op) if before else parts[:0].sum(0)

    return linear(kind(comm, op), x, lambda of: _gathered(comm.replace("sum"), x, of, complete))
