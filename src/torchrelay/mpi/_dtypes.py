"""Dtypes and operations of torch in terms of MPI.

MPI lacks float16 and bfloat16: they are sent as two bytes and reduced by operations defined here.
Logical operations on bool are MPI's; those on floats are computed on bool.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrelay import _native
from torchrelay.errors import ArgumentError
from torchrelay.mpi._library import MPI

__all__ = [
    "CODES",
    "DTYPES",
    "NATIVE",
    "Op",
    "buffer",
    "buffer_at",
    "datatype",
    "is_differentiable",
    "mpi_op",
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
BITWISE = (Op.BAND, Op.BOR, Op.BXOR)
ARITHMETIC = (Op.SUM, Op.PROD, Op.MAX, Op.MIN)

_two_bytes = MPI.BYTE.Create_contiguous(2).Commit()

_TYPES: dict[torch.dtype, MPI.Datatype] = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.float16: _two_bytes,
    torch.bfloat16: _two_bytes,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.bool: MPI.C_BOOL,
}
DTYPES = tuple(_TYPES)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

_BOOL_OPS = {
    Op.SUM: MPI.LOR,
    Op.MAX: MPI.LOR,
    Op.LOR: MPI.LOR,
    Op.BOR: MPI.LOR,
    Op.PROD: MPI.LAND,
    Op.MIN: MPI.LAND,
    Op.LAND: MPI.LAND,
    Op.BAND: MPI.LAND,
    Op.LXOR: MPI.LXOR,
    Op.BXOR: MPI.LXOR,
}
_KERNELS: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add,
    Op.PROD: torch.mul,
    Op.MAX: torch.maximum,
    Op.MIN: torch.minimum,
}


def _half_op(dtype: torch.dtype, op: Op) -> MPI.Op:
    kernel = _KERNELS[op]

    def reduce(incoming: Any, result: Any, _datatype: MPI.Datatype) -> None:
        if not len(incoming):  # a rank's part of a Reduce_scatter may be empty
            return
        theirs, ours = (
            torch.frombuffer(incoming, dtype=dtype),
            torch.frombuffer(result, dtype=dtype),
        )
        kernel(theirs, ours, out=ours)

    return MPI.Op.Create(reduce, commute=True)


def _table() -> dict[tuple[torch.dtype, Op], MPI.Op]:
    table: dict[tuple[torch.dtype, Op], MPI.Op] = {}
    for dtype in DTYPES:
        if dtype is torch.bool:
            table.update({(dtype, op): mpi for op, mpi in _BOOL_OPS.items()})
        elif dtype in (torch.float16, torch.bfloat16):
            table.update({(dtype, op): _half_op(dtype, op) for op in ARITHMETIC})
        else:
            ops: tuple[Op, ...] = ARITHMETIC if not dtype.is_complex else (Op.SUM, Op.PROD)
            if not (dtype.is_floating_point or dtype.is_complex):
                ops = ops + LOGICAL + BITWISE
            table.update({(dtype, op): getattr(MPI, op.value) for op in ops})
    return table


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
        ops = arithmetic if dtype.is_floating_point else arithmetic | bitwise
        table.update({(dtype, op): (kind, native) for op, native in ops.items()})
    return table


_OPS = _table()
NATIVE = _native_table()
"""What the native core reduces, under its names."""
buffer_at = MPI.buffer.fromaddress


def datatype(dtype: torch.dtype) -> MPI.Datatype:
    """Return the MPI datatype of ``dtype``.

    Raises:
        ArgumentError: there is none.
    """
    try:
        return _TYPES[dtype]
    except KeyError:
        raise ArgumentError(
            f"{dtype} cannot be communicated; these can: {', '.join(map(str, DTYPES))}"
        ) from None


def mpi_op(dtype: torch.dtype, op: Op) -> MPI.Op:
    """Return the MPI operation for ``op`` on ``dtype``.

    Raises:
        ArgumentError: it is undefined (bitwise on floats, an order of complex numbers).
    """
    try:
        return _OPS[dtype, op]
    except KeyError:
        raise ArgumentError(f"MPI_{op.value} is not defined for {dtype}") from None


def is_differentiable(dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` is floating point or complex, equally on all ranks."""
    return dtype.is_floating_point or dtype.is_complex


def buffer(tensor: Tensor) -> tuple[MPI.buffer, int, MPI.Datatype]:
    """Return the memory of a contiguous CPU tensor, which the caller keeps alive."""
    kind = _TYPES.get(tensor.dtype) or datatype(tensor.dtype)
    return (buffer_at(tensor.data_ptr(), tensor.nbytes), tensor.numel(), kind)
