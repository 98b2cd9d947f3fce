"""Communications inside ``torch.compile``: operators of ``torch.library`` with an ordered effect.

Each takes and returns the chain's token like a recorded communication, so a compiled region joins the chain as
one node, forward and backward keep the order, and nothing can be left out as unused. All ranks give tensors of one
shape, since a compiled graph must know the shape of what comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.mpi import _chain

if TYPE_CHECKING:
    from torchrelay.mpi._record import Call
    from torchrelay.mpi.communicator import Communicator

__all__ = ["communicate", "register"]

_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


def register(comm: Communicator) -> int:
    """A number by which compiled code finds ``comm`` and its backward communicator."""
    number = len(_communicators) and max(_communicators) + 1
    _communicators[number] = comm
    return number


def communicate(comm: Communicator, kind: str, args: Sequence[int], x: Tensor) -> Tensor:
    """The communication ``kind`` on ``x`` as an operator that ``torch.compile`` can trace."""
    chain = _chain.current_compiled()
    y, chain.head = _operator(x, chain.head, comm.number, kind, list(args), False)
    return y  # type: ignore[no-any-return]


def _call(comm: Communicator, kind: str, args: Sequence[int], x: Tensor) -> Call:
    from torchrelay.mpi._dtypes import Op  # noqa: PLC0415 - the communications import this module
    from torchrelay.mpi.allgather import Allgather  # noqa: PLC0415
    from torchrelay.mpi.allreduce import Allreduce  # noqa: PLC0415
    from torchrelay.mpi.alltoall import Alltoall  # noqa: PLC0415
    from torchrelay.mpi.bcast import Bcast  # noqa: PLC0415
    from torchrelay.mpi.reduce import Reduce  # noqa: PLC0415
    from torchrelay.mpi.reduce_scatter import ReduceScatter  # noqa: PLC0415

    if kind == "allreduce":
        return Allreduce(comm, Op.SUM)
    if kind == "allgather":
        return Allgather(comm, args[0], uniform=True)
    if kind == "reduce_scatter":
        return ReduceScatter(comm, Op.SUM, args[0], x.shape[args[0]] // comm.size, uniform=True)
    if kind == "bcast":
        return Bcast(comm, args[0])
    if kind == "reduce":
        return Reduce(comm, Op.SUM, args[0])
    return Alltoall(comm, args[0], args[1], x.shape[args[1]] // comm.size, x.shape[args[0]], uniform=True)


_ADJOINT = {
    "allgather": "reduce_scatter",
    "reduce_scatter": "allgather",
    "bcast": "reduce",
    "reduce": "bcast",
}


def _result_shape(size: int, kind: str, args: Sequence[int], shape: Sequence[Any]) -> list[Any]:
    result = list(shape)
    if kind in ("allgather", "alltoall"):
        result[args[0]] = result[args[0]] * size
    if kind in ("reduce_scatter", "alltoall"):
        result[args[-1]] = result[args[-1]] // size
    return result


@torch.library.custom_op("torchrelay::mpi", mutates_args=())
def _operator(
    x: Tensor, token: Tensor, comm: int, kind: str, args: Sequence[int], backward: bool
) -> tuple[Tensor, Tensor]:
    communicator = _communicators[comm]
    if backward:
        communicator = communicator.reverse
        _chain.begin_compiled(_torch.backward_id())
    y = _call(communicator, kind, args, x).forward(x)
    return y.clone() if y.data_ptr() == x.data_ptr() else y.contiguous(), torch.zeros_like(token)


@_operator.register_fake
def _(
    x: Tensor, token: Tensor, comm: int, kind: str, args: Sequence[int], backward: bool
) -> tuple[Tensor, Tensor]:
    shape = _result_shape(_communicators[comm].size, kind, args, x.shape)
    return x.new_empty(shape), torch.empty_like(token)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.call = inputs[2:]


def _backward(ctx: Any, grad: Tensor, token: Tensor) -> tuple[Any, ...]:
    comm, kind, args, backward = ctx.call
    grad, token = _operator(grad, token, comm, _ADJOINT.get(kind, kind), args[::-1], not backward)
    return grad, token, None, None, None, None


_operator.register_autograd(_backward, setup_context=_remember)
_torch.make_ordered(_operator)
