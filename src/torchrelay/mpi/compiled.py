"""Communications inside ``torch.compile``: operators of ``torch.library`` with an ordered effect.

Each takes and returns the chain's token like a recorded communication, so a compiled region joins the chain as
one node, forward and backward keep the order, and nothing can be left out as unused. All ranks give tensors of one
shape, since a compiled graph must know the shape of what comes, and name their peers. What needs more than one
communication (MAX, MIN and PROD gather, and are reduced locally) is traced as such.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.errors import UnsupportedError
from torchrelay.mpi import _chain
from torchrelay.mpi._library import MPI

if TYPE_CHECKING:
    from torchrelay.mpi._record import Call
    from torchrelay.mpi.communicator import Communicator

__all__ = ["communicate", "exchange", "in_place", "in_unequal_parts", "reduced", "register", "send"]

_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


def register(comm: Communicator) -> int:
    """A number by which compiled code finds ``comm`` and its backward communicator."""
    number = len(_communicators) and max(_communicators) + 1
    _communicators[number] = comm
    return number


def communicator(number: int) -> Communicator:
    """The communicator that :func:`register` gave ``number``."""
    return _communicators[number]


# What Communicator's methods call while they are traced


def communicate(comm: Communicator, kind: str, args: Sequence[int], x: Tensor) -> Tensor:
    """The communication ``kind`` on ``x`` as an operator that ``torch.compile`` can trace.

    Inside a ``torch.func`` transform, which operators of ``torch.library`` do not support, the graph ends before it.
    """
    if _torch.transforms_active():
        _torch.graph_break("a communication inside of a torch.func transform")
    chain = _chain.current_compiled()
    y, chain.head = _operator(x, chain.head, comm.number, kind, list(args), False)
    return y  # type: ignore[no-any-return]


def in_place(comm: Communicator, kind: str, args: Sequence[int], x: Tensor) -> Tensor:
    """As :func:`communicate`, into ``x``, which must not be a leaf that requires grad."""
    return x.copy_(communicate(comm, kind, args, x))


def reduced(comm: Communicator, op: str, x: Tensor) -> Tensor:
    """The reduction of all ranks' ``x``."""
    if op == "SUM":
        return communicate(comm, "allreduce", (), x)
    every = communicate(comm, "allgather", (0,), x.unsqueeze(0))
    if op == "PROD":
        return every.prod(0)
    if op not in ("MAX", "MIN"):
        raise UnsupportedError(f"MPI_{op} inside torch.compile")
    return every.amax(0) if op == "MAX" else every.amin(0)


def send(comm: Communicator, x: Tensor, dest: int, tag: int) -> Tensor:
    """A 0-dim tensor that depends on ``x`` having been sent."""
    return communicate(comm, "send", (dest, tag), x)


def exchange(comm: Communicator, x: Tensor, dest: int, source: int, sendtag: int, recvtag: int) -> Tensor:
    """Sendrecv of tensors of one shape; what comes has ``sendtag`` too if ``recvtag`` is any."""
    tag = sendtag if recvtag == MPI.ANY_TAG else recvtag
    return communicate(comm, "sendrecv", (dest, sendtag, source, tag), x)


def in_unequal_parts(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function(*args)``, outside of the compiled graph, which must know all shapes."""
    disable: Callable[..., Callable[..., Tensor]] = torch.compiler.disable
    outside = disable(function, reason="ranks take unequal parts")
    return outside(*args)


# The operator


def _call(comm: Communicator, kind: str, args: Sequence[int], x: Tensor) -> Call:  # noqa: PLR0911 - a table
    from torchrelay.mpi import point_to_point, scan  # noqa: PLC0415 - the communications import this module
    from torchrelay.mpi._dtypes import Op  # noqa: PLC0415
    from torchrelay.mpi.allgather import Allgather  # noqa: PLC0415
    from torchrelay.mpi.allreduce import Allreduce  # noqa: PLC0415
    from torchrelay.mpi.alltoall import Alltoall  # noqa: PLC0415
    from torchrelay.mpi.bcast import Bcast  # noqa: PLC0415
    from torchrelay.mpi.gather import Gather  # noqa: PLC0415
    from torchrelay.mpi.reduce import Reduce  # noqa: PLC0415
    from torchrelay.mpi.reduce_scatter import ReduceScatter  # noqa: PLC0415
    from torchrelay.mpi.replicate import Replicate  # noqa: PLC0415
    from torchrelay.mpi.scatter import Scatter  # noqa: PLC0415

    size = comm.size
    length = x.shape[args[0]] if kind in ("allgather", "gather", "scatter", "reduce_scatter") else 0
    part = length // size
    if kind == "allreduce":
        return Allreduce(comm, Op.SUM)
    if kind == "allgather":
        return Allgather(comm, args[0], [length] * size)
    if kind == "reduce_scatter":
        return ReduceScatter(comm, Op.SUM, args[0], part, [part] * size)
    if kind == "gather":
        return Gather(comm, args[0], length, args[1], [length] * size)
    if kind == "scatter":
        return Scatter(comm, args[0], part, args[1], [part] * size)
    if kind == "alltoall":
        return Alltoall(comm, args[0], args[1], x.shape[args[1]] // size, x.shape[args[0]], uniform=True)
    if kind == "sendrecv":
        return point_to_point.Sendrecv(comm, args[0], args[1], x.shape, x.dtype, args[2], args[3])
    if kind in ("scan", "exscan"):
        return (scan.Scan if kind == "scan" else scan.Exscan)(comm, Op.SUM)
    if kind == "replicate":
        return Replicate(comm)
    if kind == "bcast":
        return Bcast(comm, args[0])
    if kind == "reduce":
        return Reduce(comm, Op.SUM, args[0])
    kinds = {"send": point_to_point.Send, "post": point_to_point.Post, "recv": point_to_point.Recv}
    return kinds[kind](comm, args[0], args[1])


# What gives the cotangent, where it is another kind; arguments that are not the same are in _adjoint_args.
_ADJOINT = {
    "allgather": "reduce_scatter",
    "reduce_scatter": "allgather",
    "bcast": "reduce",
    "reduce": "bcast",
    "gather": "scatter",
    "scatter": "gather",
    "send": "recv",
    "recv": "post",
    "post": "recv",
    "replicate": "allreduce",
}


def _adjoint_args(kind: str, args: Sequence[int]) -> list[int]:
    if kind == "alltoall":
        return list(args[::-1])
    if kind == "sendrecv":
        return [*args[2:], *args[:2]]
    return list(args)


def _result_shape(comm: Communicator, kind: str, args: Sequence[int], shape: Sequence[Any]) -> list[Any]:
    result = list(shape)
    if kind in ("send", "post"):
        return []
    if kind in ("allgather", "alltoall"):
        result[args[0]] = result[args[0]] * comm.size
    if kind in ("reduce_scatter", "scatter"):
        result[args[0]] = result[args[0]] // comm.size
    if kind == "alltoall":
        result[args[1]] = result[args[1]] // comm.size
    if kind == "gather":
        result[args[0]] = result[args[0]] * comm.size if comm.rank == args[1] else 0
    return result


@torch.library.custom_op("torchrelay::mpi", mutates_args=())
def _operator(
    x: Tensor, token: Tensor, comm: int, kind: str, args: Sequence[int], backward: bool
) -> tuple[Tensor, Tensor]:
    communicator = _communicators[comm]
    if backward:
        communicator = communicator.reverse
        if kind in ("scan", "exscan"):
            communicator = communicator.from_the_end()
        _chain.begin_compiled(_torch.backward_id())
    else:
        _chain.check_compiled()
    call = _call(communicator, kind, args, x)
    if call.everyone:
        communicator.history.begin(x)
    y = call.forward(x)
    return y.clone() if y.data_ptr() == x.data_ptr() else y.contiguous(), torch.zeros_like(token)


@_operator.register_fake
def _(
    x: Tensor, token: Tensor, comm: int, kind: str, args: Sequence[int], backward: bool
) -> tuple[Tensor, Tensor]:
    shape = _result_shape(_communicators[comm], kind, args, x.shape)
    return x.new_empty(shape), torch.empty_like(token)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.call = inputs[2:]
    ctx.shape = inputs[0].shape


def _backward(ctx: Any, grad: Tensor, token: Tensor) -> tuple[Any, ...]:
    number, kind, args, backward = ctx.call
    comm, shape = _communicators[number], ctx.shape
    alone = _without_communication(comm, kind, args, grad, shape)
    if alone is not None:
        return alone, token, None, None, None, None
    if kind in ("send", "post") or (kind == "gather" and comm.rank != args[1]):
        grad = grad.new_zeros(_shape_to_receive(comm, kind, args, shape))
    grad, token = _operator(
        grad, token, number, _ADJOINT.get(kind, kind), _adjoint_args(kind, args), not backward
    )
    if kind == "recv" or (kind == "scatter" and comm.rank != args[1]):
        grad = grad.new_zeros(shape)  # what was given had no influence
    return grad, token, None, None, None, None


def _shape_to_receive(comm: Communicator, kind: str, args: Sequence[int], shape: Sequence[Any]) -> list[Any]:
    """Of what tells the adjoint what comes: for a gather, that of root's cotangent."""
    result = list(shape)
    if kind == "gather":
        result[args[0]] = result[args[0]] * comm.size
    return result


def _without_communication(
    comm: Communicator, kind: str, args: Sequence[int], grad: Tensor, shape: Sequence[Any]
) -> Tensor | None:
    """The cotangent, if it needs no communication under the communicator's convention."""
    is_replicated = comm.convention == "replicated"
    if kind == "replicate" and not is_replicated:
        return grad.clone()
    if not is_replicated or kind not in ("allreduce", "allgather", "bcast"):
        return None
    if kind == "allgather":
        return grad.narrow(args[0], comm.rank * shape[args[0]], shape[args[0]]).clone()
    return grad.clone() if kind == "allreduce" or comm.rank == args[0] else torch.zeros_like(grad)


_operator.register_autograd(_backward, setup_context=_remember)
_torch.make_ordered(_operator)
