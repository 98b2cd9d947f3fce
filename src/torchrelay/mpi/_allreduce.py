"""Allreduce: reduce the tensors of all ranks, with the result on every rank.

The derivative of a sum is Allreduce. That of a maximum is split equally between the ranks that hold
it. That of a product is the product of the other factors, computed without division.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from torchrelay.errors import ArgumentError
from torchrelay.mpi._allgather import allgather
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import LOGICAL, NATIVE, Op, check_reduction, is_differentiable
from torchrelay.mpi._headers import exchange_values, payload_bytes
from torchrelay.mpi._memory import fresh_like, packed, placed
from torchrelay.mpi._record import Adjoint, Call, Started, is_differentiated, record
from torchrelay.mpi._replicate import own_use

__all__ = ["Located", "allreduce"]

DIFFERENTIABLE = (Op.SUM, Op.PROD, Op.MAX, Op.MIN)


@dataclass(slots=True, eq=False)
class Allreduce(Call):
    name = "Allreduce"
    op: Op

    def __post_init__(self) -> None:
        check_reduction(self.op)

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

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        result = fresh_like(x)
        requests = self.comm.transport.allreduce(x, result, self.op, arrived)
        return Started(requests, lambda: result, x)

    def saved(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return () if self.op is Op.SUM else (x, y)

    def adjoint(self, grad: Tensor) -> Adjoint:
        if self.comm.convention == "replicated":
            return own_use(self.comm, grad)
        return Adjoint(Allreduce(self.comm.reverse, Op.SUM), grad)

    def backward(self, grad: Tensor, *saved: Tensor) -> Tensor:
        call, grad, _ = self.adjoint(grad)
        total = grad if call is None else record(call, grad)
        return total * share(self.comm.reverse, self.op, *saved) if saved else total

    def tangent(self, tangent: Tensor, *saved: Tensor) -> Tensor:
        if saved:
            tangent = tangent * share(self.comm.reverse, self.op, *saved).conj()
        return allreduce(self.comm, tangent, Op.SUM)

    def differentiable(self, x: Tensor) -> bool:
        return is_differentiable(x.dtype) and self.op in DIFFERENTIABLE

    def arguments(self) -> str:
        return self.op.value


class Located(NamedTuple):
    """Result of MAXLOC and MINLOC.

    Attributes:
        values: each element's extremum.
        ranks: the lowest rank that holds it.
    """

    values: Tensor
    ranks: Tensor


def allreduce(comm: Comm, x: Tensor, op: Op) -> Tensor:
    """Reduce all ranks' ``x``, of one shape and dtype, elementwise on every rank.

    MAXLOC and MINLOC return a :class:`Located`.
    """
    if op in LOGICAL and x.dtype is not torch.bool:
        return record(Allreduce(comm, op), x != 0).to(x.dtype)
    call = Allreduce(comm, op)
    if is_compiling() and is_gathered(call, x):  # an operator saves nothing for its derivative
        return reduce_locally(allgather(comm, x.unsqueeze(0), 0), op)
    return record(call, x)


def allreduce_located(comm: Comm, x: Tensor, op: Op) -> Located:
    """Reduce with MAXLOC or MINLOC."""
    if x.dtype.is_complex:
        raise ArgumentError(f"MPI_{op.value} is not defined for {x.dtype}")
    values = allreduce(comm, x, Op.MAX if op is Op.MAXLOC else Op.MIN)
    here = torch.where(x.detach() == values.detach(), comm.rank, comm.size)
    return Located(values, allreduce(comm, here, Op.MIN))


def share(comm: Comm, op: Op, x: Tensor, y: Tensor) -> Tensor:
    """Return the conjugate of dy/dx.

    For MAX and MIN it is 1 / (number of ranks that hold the extremum), for PROD the product of the
    other factors.
    """
    if op is Op.PROD:
        return product_of_others(comm, x, y).conj()
    with torch.no_grad():
        mine = (x == y).to(x.dtype)
        return mine / allreduce(comm, mine, Op.SUM)


class Reduction(Protocol):
    """A call that reduces."""

    @property
    def op(self) -> Op: ...
    def differentiable(self, x: Tensor) -> bool: ...


def is_gathered(call: Reduction, x: Tensor) -> bool:
    """Return whether to gather ``x`` and reduce it locally.

    This is needed if a derivative is wanted that is not a single communication.

    Raises:
        ArgumentError: the operation needs an order, which complex numbers lack.
    """
    if call.op is Op.SUM or not (is_differentiated() and call.differentiable(x)):
        return False
    if x.dtype.is_complex and call.op is not Op.PROD:
        raise ArgumentError(f"MPI_{call.op.value} is not defined for {x.dtype}")
    return True


def reduce_locally(parts: Tensor, op: Op) -> Tensor:
    """Reduce ``parts`` along their first axis with MAX, MIN or PROD, differentiably."""
    if op is Op.PROD:
        return parts.prod(0)
    return parts.amax(0) if op is Op.MAX else parts.amin(0)


def product_of_others(comm: Comm, x: Tensor, y: Tensor) -> Tensor:
    """Return the product of all other ranks' ``x``, given that of all, ``y``."""
    if torch.is_grad_enabled():
        # Differentiated again: let torch.prod, which is safe at zeros, do it.
        every = allgather(comm.replace(convention="sum"), x.unsqueeze(0), 0)
        return torch.cat([every[: comm.rank], every[comm.rank + 1 :]]).prod(0)
    is_zero = x == 0
    zeros = allreduce(comm, is_zero.to(torch.int32), Op.SUM)
    nonzero = allreduce(comm, torch.where(is_zero, torch.ones_like(x), x), Op.PROD)
    others = torch.where(
        zeros == 0, y / torch.where(is_zero, torch.ones_like(x), x), torch.zeros_like(y)
    )
    return torch.where((zeros == 1) & is_zero, nonzero, others)
