"""What communications must give, computed in one process with plain torch on all ranks' inputs.

A *model* of an MPI function takes the list of all ranks' inputs and returns the list of all ranks'
outputs. Autograd through the model gives the reference gradients of the sum of all ranks' losses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from grads import grad_of
from multi.mpi.runner import THREADS, mpi_test
from multi.mpi.threads import gather
from torchrelay import mpi
from torchrelay.errors import ArgumentError
from torchrelay.mpi import _library

Model = Callable[[list[Tensor]], list[Tensor]]
Function = Callable[[Tensor], Tensor]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
ALL_DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, torch.bool)
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5, torch.complex64: 1e-5}


SIZES = (1, 2, 3, 5)  # numbers of ranks for values and gradients
DERIVATIVE_SIZES = (1, 2, 3)
REDUCTIONS: dict[mpi.Op, Callable[[Tensor], Tensor]] = {
    mpi.MPI_SUM: lambda s: s.sum(0, dtype=s.dtype) if s.dtype is not torch.bool else s.any(0),
    mpi.MPI_PROD: lambda s: s.prod(0, dtype=s.dtype) if s.dtype is not torch.bool else s.all(0),
    mpi.MPI_MAX: lambda s: s.amax(0),
    mpi.MPI_MIN: lambda s: s.amin(0),
}


def ops_of(dtype: torch.dtype) -> list[mpi.Op]:
    return [op for op in REDUCTIONS if not (dtype.is_complex and op in (mpi.MPI_MAX, mpi.MPI_MIN))]


def ragged(
    comm: mpi.Communicator, axis: int, shape: Sequence[int] = (2, 3, 2)
) -> list[tuple[int, ...]]:
    """Shapes whose length along ``axis`` is different on each rank, and zero on the second."""
    return [
        tuple((r * 2) % 5 + (r != 1) if a == axis % len(shape) else n for a, n in enumerate(shape))
        for r in range(comm.size)
    ]


def copy(x: Tensor) -> Tensor:
    """A tensor with a history of its own, as what a rank receives."""
    return x * 1 if x.dtype is not torch.bool else x


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


@functools.cache
def _mpi() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


def everyone(value: Any) -> list[Any]:
    """Return all ranks' values, gathered by mpi4py, c10d or their threads themselves."""
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values
    return gather(value) if _library.MPI is None else _mpi().allgather(value)


def _sum(x: Tensor) -> Tensor:
    return torch.stack(everyone(x.detach().resolve_conj().clone())).sum(0)


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
        return torch.cat(everyone(x.detach().resolve_conj().clone()))

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
            lengths = everyone(flat.numel())
            return Collected.apply(flat, lengths, comm.rank)

    return whole


# Every output element of every rank gets its own cotangent, so cotangents differ between ranks.
# The fast mode multiplies the Jacobian by random vectors on both sides; without it, the number of
# communications grows with the square of the number of elements.

Differentiable = Callable[[mpi.Communicator, Tensor], Tensor]


def stacked(comm: mpi.Communicator, dtype: torch.dtype) -> Tensor:
    return torch.stack(inputs([(2, 2)] * comm.size, dtype)).requires_grad_()


def check_gradient(comm: mpi.Communicator, function: Differentiable) -> None:
    whole = as_one_process(lambda x: function(comm, x), comm)
    assert gradcheck(whole, stacked(comm, torch.float64), fast_mode=True)


def check_forward_mode(comm: mpi.Communicator, function: Differentiable) -> None:
    x, t = (inputs([(2, 2)] * comm.size, torch.float64, seed)[comm.rank] for seed in (0, 3))
    with torch.no_grad():
        difference = (function(comm, x + 1e-6 * t) - function(comm, x - 1e-6 * t)) / 2e-6
        with forward_ad.dual_level():
            y = function(comm, forward_ad.make_dual(x, t))
            tangent = forward_ad.unpack_dual(y).tangent
    assert torch.allclose(tangent, difference, atol=1e-7)


def for_complex(names: Iterable[str]) -> list[str]:
    """Leave out the functions that need an order of the numbers."""
    return [name for name in names if not any(op in name for op in ("MAX", "MIN"))]


def check_complex_gradient(comm: mpi.Communicator, function: Differentiable) -> None:
    whole = as_one_process(lambda x: function(comm, x), comm)
    assert gradcheck(whole, stacked(comm, torch.complex128), fast_mode=True)


def check_second_derivative(comm: mpi.Communicator, function: Differentiable) -> None:
    whole = as_one_process(lambda x: function(comm, x), comm)
    check_second_order(whole, stacked(comm, torch.float64))


def check_second_order(whole: Function, every: Tensor) -> None:
    """Check the second derivative under cotangents that all ranks hold alike."""
    with torch.no_grad():
        shape = whole(every).shape
    (cotangent,) = inputs([shape], every.dtype, seed=2)
    assert gradgradcheck(whole, every, cotangent.requires_grad_(), fast_mode=True)


def derivative_tests(
    functions: Mapping[str, Differentiable], reverse_only: Collection[str] = ()
) -> tuple[Callable[..., None], ...]:
    """Return the four tests that the functions of a file have in common, each by its own name.

    Those named in ``reverse_only`` have no forward mode. A derivative does not depend on what moves
    the bytes: :func:`check` compares gradients over every backend.
    """

    @mpi_test(DERIVATIVE_SIZES, on=THREADS, name=functions)
    def test_gradient(comm: mpi.Communicator, name: str) -> None:
        check_gradient(comm, functions[name])

    @mpi_test(
        DERIVATIVE_SIZES,
        on=THREADS,
        name=[name for name in functions if name not in reverse_only],
    )
    def test_forward_mode(comm: mpi.Communicator, name: str) -> None:
        check_forward_mode(comm, functions[name])

    @mpi_test((1, 2), on=THREADS, name=for_complex(functions))
    def test_complex_gradient(comm: mpi.Communicator, name: str) -> None:
        check_complex_gradient(comm, functions[name])

    @mpi_test(DERIVATIVE_SIZES, on=THREADS, name=functions)
    def test_second_derivative(comm: mpi.Communicator, name: str) -> None:
        check_second_derivative(comm, functions[name])

    return test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative


def check_transforms(comm: mpi.Communicator, function: Differentiable) -> None:
    """``torch.func.grad``, ``jvp``, ``vmap``, ``jacrev``, and gradients per sample."""
    x = inputs([(2, 2)] * comm.size, torch.float64)[comm.rank]
    apply = functools.partial(function, comm)
    leaf = x.clone().requires_grad_()
    y = apply(leaf)
    mpi.backward(y.sin().sum())
    gradient = torch.func.grad(lambda x: apply(x).sin().sum())
    assert torch.allclose(gradient(x), grad_of(leaf))
    batch = torch.stack([x, 2 * x, 3 * x], 1)
    grads = torch.stack([gradient(batch[:, i]) for i in range(3)])
    assert torch.allclose(torch.vmap(gradient, in_dims=1)(batch), grads)
    value, tangent = torch.func.jvp(apply, (x,), (torch.ones_like(x),))[:2]
    with torch.no_grad():
        difference = (apply(x + 1e-6) - apply(x - 1e-6)) / 2e-6
        assert torch.allclose(value, apply(x))
        assert torch.allclose(tangent, difference, atol=1e-7)
        rows = torch.stack([apply(batch[:, i]) for i in range(3)])
        assert torch.allclose(torch.vmap(apply, in_dims=1)(batch), rows)
    # It batches over the outputs, which must be as many on each rank.
    if len({*everyone(y.shape)}) == 1:
        assert torch.func.jacrev(apply)(x).shape == (*y.shape, *x.shape)


def check_arguments(*calls: Callable[[], object]) -> None:
    """Wrong arguments raise before anything is sent, on this rank alone."""
    for call in calls:
        with pytest.raises(ArgumentError):
            call()
        mpi.reset()
