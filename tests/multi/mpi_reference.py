"""What communications must give, computed in one process with plain torch on all ranks' inputs.

A *model* of an MPI function takes the list of all ranks' inputs and returns the list of all ranks'
outputs. Autograd through the model gives the reference gradients of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from torchrelay import mpi

Model = Callable[[list[Tensor]], list[Tensor]]
Function = Callable[[Tensor], Tensor]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
ALL_DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, torch.bool)
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5, torch.complex64: 1e-5}


def inputs(shapes: Sequence[Sequence[int]], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """One tensor a rank; every rank computes all of them alike."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return [
            torch.randn(*shape, generator=generator, dtype=torch.complex128).to(dtype)
            if dtype.is_complex
            else torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in shapes
        ]
    high = 2 if dtype is torch.bool else 4
    return [torch.randint(0, high, tuple(shape), generator=generator).to(dtype) for shape in shapes]


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (
        ours.dtype,
        ours.shape,
        theirs.dtype,
        theirs.shape,
    )
    tolerance = TOLERANCE.get(
        ours.dtype, 1e-12 if ours.is_floating_point() or ours.is_complex() else 0
    )
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def check(function: Function, model: Model, given: list[Tensor], rank: int) -> None:
    """Values, and where there are any, gradients under cotangents that differ between ranks."""
    with torch.no_grad():
        close(function(given[rank].clone()), model([x.clone() for x in given])[rank])
    if not (given[0].is_floating_point() or given[0].is_complex()):
        return
    theirs = [x.clone().requires_grad_() for x in given]
    wanted = model(theirs)
    cotangents = inputs([y.shape for y in wanted], wanted[0].dtype, seed=1)
    torch.autograd.backward(
        [y for y in wanted if y.requires_grad],
        [c for y, c in zip(wanted, cotangents, strict=True) if y.requires_grad],
    )
    ours = given[rank].clone().requires_grad_()
    got = function(ours)
    close(got.detach(), wanted[rank].detach())
    mpi.backward(got, cotangents[rank])
    grad = theirs[rank].grad
    assert ours.grad is not None
    close(ours.grad, torch.zeros_like(ours) if grad is None else grad)


# Distributed functions as functions of one process, for gradcheck: all ranks hold the same inputs
# and outputs.

_private = MPI.COMM_WORLD.Dup()


def _sum(x: Tensor) -> Tensor:
    return torch.from_numpy(_private.allreduce(x.detach().resolve_conj().numpy()))


class Spread(torch.autograd.Function):
    """From what all hold alike to each rank's own copy; backward sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Summed.apply(grad)


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Spread.apply(grad)


class Collected(torch.autograd.Function):
    """From each rank's own to what all hold alike; backward takes the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], rank: int) -> Tensor:
        ctx.lengths, ctx.rank = lengths, rank
        return torch.cat(
            [
                torch.from_numpy(part)
                for part in _private.allgather(x.detach().resolve_conj().numpy())
            ]
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Own.apply(grad, ctx.lengths, ctx.rank), None, None


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], rank: int) -> Tensor:
        ctx.lengths, ctx.rank = lengths, rank
        return x.split(lengths)[rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Collected.apply(grad, ctx.lengths, ctx.rank), None, None


def as_one_process(function: Function, comm: mpi.Communicator) -> Function:
    """``function`` of stacked inputs of all ranks, giving the outputs of all ranks, flat."""

    def whole(every: Tensor) -> Tensor:
        with mpi.chain():
            mine = function(Spread.apply(every)[comm.rank] * 1)
            flat = mine.reshape(-1)
            lengths = _private.allgather(flat.numel())
            return Collected.apply(flat, lengths, comm.rank)

    return whole
