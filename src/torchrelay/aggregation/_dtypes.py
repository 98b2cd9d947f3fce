"""The dtypes that are reduced natively, and substitutes for the others."""

from __future__ import annotations

import torch

from torchrelay._native import Dtype, Op
from torchrelay.errors import ArgumentError, UnsupportedError

__all__ = ["NATIVE", "OPS", "as_native", "code"]

NATIVE: dict[torch.dtype, Dtype] = {getattr(torch, dtype.name): dtype for dtype in Dtype}

# By the value of c10d's ReduceOp; PREMUL_SUM is a SUM of tensors that were multiplied before.
OPS = (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR, Op.SUM)

_BOOL_OPS = {
    Op.SUM: Op.BOR,
    Op.MAX: Op.BOR,
    Op.BOR: Op.BOR,
    Op.PRODUCT: Op.BAND,
    Op.MIN: Op.BAND,
    Op.BAND: Op.BAND,
    Op.BXOR: Op.BXOR,
}
_BITWISE = (Op.BAND, Op.BOR, Op.BXOR)
_COMPLEX_OPS = (Op.SUM, Op.AVG)

# Numbers for types in messages and comparisons: the native ones first.
_OTHERS = "bool complex64 complex128 complex32 uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
_CODES = {
    dtype: index
    for index, dtype in enumerate([*NATIVE, *(getattr(torch, name) for name in _OTHERS.split())])
}


def code(dtype: torch.dtype) -> int:
    """Return a number for ``dtype`` that is equal on every rank."""
    return _CODES.get(dtype, 255)


def as_native(tensor: torch.Tensor, op: Op) -> tuple[torch.Tensor, Op]:
    """Return a view of ``tensor``, and the op on it, that the native core can reduce.

    bool is reduced as logic: SUM and MAX are or, PRODUCT and MIN are and. Complex numbers are added
    as pairs.

    Raises:
        ArgumentError: the op has no meaning for this dtype.
        UnsupportedError: the dtype is not reduced.
    """
    dtype = tensor.dtype
    native_op: Op | None
    if dtype in NATIVE:
        native_op = None if op in _BITWISE and dtype.is_floating_point else op
        hint = "it needs an integer dtype or bool"
    elif dtype is torch.bool:
        tensor, native_op = tensor.view(torch.uint8), _BOOL_OPS.get(op)
        hint = "convert to a numeric dtype first"
    elif dtype.is_complex and dtype is not torch.complex32:
        tensor, native_op = torch.view_as_real(tensor), op if op in _COMPLEX_OPS else None
        hint = "complex tensors have SUM and AVG"
    else:
        raise UnsupportedError(f"reductions of {dtype} are not supported: convert the tensor first")
    if native_op is None:
        raise ArgumentError(f"{op.name} of {dtype} is not defined: {hint}")
    return tensor, native_op
