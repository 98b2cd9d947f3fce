"""mpi4torch's names over :mod:`torchrelay.mpi`.

Differences: the order of communications is kept without dummies, and a backward pass that leaves
communications out warns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrelay.compat.mpi4torch._script import JoinDummies, JoinDummiesHandle, make_scriptable
from torchrelay.errors import GraphError
from torchrelay.mpi import COMM_WORLD as _WORLD
from torchrelay.mpi import (
    MPI_BAND,
    MPI_BOR,
    MPI_BXOR,
    MPI_LAND,
    MPI_LOR,
    MPI_LXOR,
    MPI_MAX,
    MPI_MAXLOC,
    MPI_MIN,
    MPI_MINLOC,
    MPI_PROD,
    MPI_SUM,
    Communicator,
    Op,
    WaitHandle,
    _compiled,
    from_mpi4py,
)

if TYPE_CHECKING:
    from mpi4py import MPI as _MPI

__all__ = [
    "COMM_WORLD",
    "MPI_BAND",
    "MPI_BOR",
    "MPI_BXOR",
    "MPI_LAND",
    "MPI_LOR",
    "MPI_LXOR",
    "MPI_MAX",
    "MPI_MAXLOC",
    "MPI_MIN",
    "MPI_MINLOC",
    "MPI_PROD",
    "MPI_SUM",
    "JoinDummies",
    "JoinDummiesHandle",
    "MPI_Communicator",
    "WaitHandle",
    "comm_from_mpi4py",
    "deactivate_cuda_aware_mpi_support",
]


class MPI_Communicator(Communicator):  # noqa: N801 - mpi4torch's name
    """A communicator whose in-place functions leave an input that must not be used again."""

    @classmethod
    def _of(cls, comm: Communicator) -> MPI_Communicator:
        # mpi4torch recorded nothing without a gradient, so its scripts may leave communications
        # out.
        self = cls.__new__(cls)
        self.__dict__.update(comm.replace(unreachable_policy="warn").__dict__)
        self.key = self.reverse.key = _compiled.register(self)
        return self

    @classmethod
    def _world(cls, convention: str, unreachable_policy: str | None) -> MPI_Communicator:
        return COMM_WORLD.replace(convention, unreachable_policy)

    def Bcast_(self, tensor: Tensor, root: int) -> Tensor:
        """Root's values, in place; ``tensor`` itself has no derivative from here on."""
        return _overwritten(tensor, lambda given: super(MPI_Communicator, self).Bcast_(given, root))

    def Reduce_(self, tensor: Tensor, op: Op, root: int) -> Tensor:
        """Reduce to root, in place; ``tensor`` itself has no derivative from here on."""
        return _overwritten(
            tensor, lambda given: super(MPI_Communicator, self).Reduce_(given, op, root)
        )


def _overwritten(tensor: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    if not (torch.is_grad_enabled() and tensor.requires_grad) or tensor.is_leaf:
        return run(tensor)
    result = run(tensor.clone())
    _forbid(tensor, result.detach())
    return result


class _Forbidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, values: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor.copy_(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise GraphError(
            "a tensor was overwritten by an MPI function and used again: use the function's result "
            "instead, or give it a clone of the tensor"
        )


_forbid: Any = _Forbidden.apply
make_scriptable(MPI_Communicator)
COMM_WORLD = MPI_Communicator._of(_WORLD)


def comm_from_mpi4py(comm: _MPI.Intracomm) -> MPI_Communicator:
    """mpi4py's communicator, made differentiable."""
    return MPI_Communicator._of(from_mpi4py(comm))


def deactivate_cuda_aware_mpi_support() -> None:
    """Nothing: device tensors always go through host memory."""
