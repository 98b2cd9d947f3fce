"""Which dtypes are reduced, and how c10d's reductions are called."""

from __future__ import annotations

import torch

from torchrelay import _native
from torchrelay._group import CODES, Op
from torchrelay._native import Dtype
from torchrelay.errors import ArgumentError, UnsupportedError

__all__ = ["OPS", "SUMMED", "check_reduction"]

OPS = tuple(Op)  # by the value of c10d's ReduceOp
# Whose memory is what it looks like, too; that of complex ones may be conjugated.
SUMMED = frozenset(
    dtype
    for dtype, code in CODES.items()
    if _native.reduces(Dtype(code), Op.SUM) and not dtype.is_complex
)


def check_reduction(dtype: torch.dtype, op: Op) -> None:
    """Raise unless tensors of ``dtype`` are reduced with ``op``.

    bool is reduced as logic: SUM and MAX are or, PRODUCT and MIN are and. Complex numbers are added
    as pairs.

    Raises:
        ArgumentError: the op has no meaning for this dtype.
        UnsupportedError: the dtype is not reduced.
    """
    if dtype not in CODES or not _native.reduces(Dtype(CODES[dtype]), Op.SUM):
        raise UnsupportedError(f"reductions of {dtype} are not supported: convert the tensor first")
    is_number = dtype.is_floating_point or dtype.is_complex
    if _native.reduces(Dtype(CODES[dtype]), op) and (op is not Op.PREMUL_SUM or is_number):
        return
    if op is Op.PREMUL_SUM:
        hint = "it needs a floating-point dtype"
    elif dtype is torch.bool:
        hint = "convert to a numeric dtype first"
    elif dtype.is_complex:
        hint = "complex tensors have SUM and AVG"
    else:
        hint = "it needs an integer dtype or bool"
    raise ArgumentError(f"{op.name} of {dtype} is not defined: {hint}")
