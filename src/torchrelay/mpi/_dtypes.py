"""Dtypes that can be communicated, and the reductions that are defined for them.

Logical operations on floats are computed on bool.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchrelay import _native
from torchrelay.errors import ArgumentError

__all__ = [
    "ARITHMETIC",
    "CODES",
    "DTYPES",
    "EXTREMA",
    "KERNELS",
    "LOGICAL",
    "NATIVE",
    "Op",
    "check_dtype",
    "check_integer",
    "check_op",
    "check_reduction",
    "check_tensor",
    "fold",
    "integers",
    "is_differentiable",
    "is_integer",
]


class Op(enum.Enum):
    """A reduction. ``MAXLOC`` and ``MINLOC`` also return the rank that holds the value."""

    MAX = "MAX"
    MIN = "MIN"
    SUM = "SUM"
    PROD = "PROD"
    LAND = "LAND"
    BAND = "BAND"
    LOR = "LOR"
    BOR = "BOR"
    LXOR = "LXOR"
    BXOR = "BXOR"
    MINLOC = "MINLOC"
    MAXLOC = "MAXLOC"

    __hash__ = object.__hash__


LOGICAL = (Op.LAND, Op.LOR, Op.LXOR)
EXTREMA = (Op.MAX, Op.MIN)
ARITHMETIC = (Op.SUM, Op.PROD, *EXTREMA)

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
KERNELS: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add,
    Op.PROD: torch.multiply,
    Op.MAX: torch.maximum,
    Op.MIN: torch.minimum,
    Op.LAND: torch.logical_and,
    Op.LOR: torch.logical_or,
    Op.LXOR: torch.logical_xor,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
"""Each reduction of two tensors, as all implementations compute it: that of a NaN is a NaN."""


def fold(parts: Sequence[Tensor], op: Op) -> Tensor:
    """Reduce ``parts``, in order."""
    if op is Op.SUM and parts[0].is_complex():
        # torch.add multiplies by 1, and makes a NaN of an infinity
        return torch.view_as_complex(fold([torch.view_as_real(part) for part in parts], op))
    total = functools.reduce(KERNELS[op], parts)
    return (total != 0).to(parts[0].dtype) if op in LOGICAL else total


def _native_table() -> dict[tuple[torch.dtype, Op], tuple[_native.Dtype, _native.Op]]:
    arithmetic = {
        Op.SUM: _native.Op.SUM,
        Op.PROD: _native.Op.PRODUCT,
        Op.MIN: _native.Op.MIN,
        Op.MAX: _native.Op.MAX,
    }
    bitwise = {Op.BAND: _native.Op.BAND, Op.BOR: _native.Op.BOR, Op.BXOR: _native.Op.BXOR}
    table = {}
    for kind in _native.Dtype:
        dtype = getattr(torch, kind.name)
        if dtype is torch.bool or dtype.is_complex:
            continue
        for op, native in (arithmetic | bitwise).items():
            if _native.reduces(kind, native):
                table[dtype, op] = kind, native
    return table


NATIVE = _native_table()
"""What the native core reduces, under its names."""


def check_tensor(x: object) -> None:
    """Raise :class:`ArgumentError` if ``x`` is no tensor, or one that has no shape."""
    if not isinstance(x, Tensor):
        remedy = f"; pass torch.tensor({x!r})" if isinstance(x, int | float | complex) else ""
        raise ArgumentError(f"a tensor is needed, not {type(x).__name__}{remedy}")
    if isinstance(x, UninitializedParameter | UninitializedBuffer):
        raise ArgumentError("an uninitialized parameter has no values; call its module once before")
    if x.is_nested:
        raise ArgumentError("a nested tensor has no shape; communicate the tensors inside")


def is_integer(given: object) -> bool:
    """Return whether ``given`` is an integer, of Python or NumPy."""
    return isinstance(given, (int, np.integer, np.bool_))


def check_integer(name: str, given: object) -> None:
    """Raise :class:`ArgumentError` if ``given`` is no integer."""
    if not is_integer(given):
        raise ArgumentError(f"{name} must be an integer, not {type(given).__name__}")


def integers(name: str, given: object) -> list[int]:
    """Return ``given`` as a list; raise :class:`ArgumentError` unless it has integers only."""
    if isinstance(given, Tensor):
        given = given.tolist()
    if not isinstance(given, Iterable):
        raise ArgumentError(f"{name} must be a sequence of integers, not {type(given).__name__}")
    found = list(given)
    for each in found:
        check_integer(name, each)
    return found


def check_reduction(op: object) -> None:
    """Raise :class:`ArgumentError` if ``op`` is no reduction of this module, such as c10d's."""
    if not isinstance(op, Op):
        given = str(op).replace("RedOpType", "ReduceOp")  # torch's type is ReduceOp.RedOpType
        raise ArgumentError(f"op must be one of torchrelay.mpi's (MPI_SUM, ...), not {given}")


def check_dtype(dtype: torch.dtype) -> None:
    """Raise :class:`ArgumentError` if ``dtype`` cannot be communicated."""
    if dtype not in CODES:
        raise ArgumentError(
            f"{dtype} cannot be communicated; these can: {', '.join(map(str, DTYPES))}"
        )


def check_op(dtype: torch.dtype, op: Op) -> None:
    """Check that ``op`` is defined for ``dtype``.

    Raises:
        ArgumentError: it is not (bitwise on floats, all but sums and products of complex numbers).
    """
    check_dtype(dtype)
    if dtype.is_complex:
        is_defined = op in (Op.SUM, Op.PROD)
        hint = "pass a real tensor, such as torch.view_as_real(x) or x.abs()"
    elif op in KERNELS:
        is_defined = op in (*ARITHMETIC, *LOGICAL) or not dtype.is_floating_point
        hint = "pass a tensor of integers or bool, such as x != 0"
    else:
        is_defined, hint = False, "only Allreduce takes it"
    if not is_defined:
        raise ArgumentError(f"MPI_{op.value} is not defined for {dtype}; {hint}")


def is_differentiable(dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` is floating point or complex, equally on all ranks."""
    return dtype.is_floating_point or dtype.is_complex
