"""mpi4torch's communicator as TorchScript sees it.

Scripted code knows neither our communicators nor autograd functions in Python. It gets a class of its own, whose
methods name the function and the communicator to one operator of ``torch.library``, which TorchScript takes to
have side effects: calls whose result is not used are kept, and keep their order.
"""

# TorchScript compiles no casts of an operator's result.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.mpi import Communicator, Op, compiled

__all__ = ["make_scriptable"]

_Library: Any = torch.library.Library
_library = _Library("torchrelay_mpi4torch", "DEF")
_SCHEMA = "call(Tensor tensor, int comm, str function, str op, int[] arguments) -> Tensor"
_library.define(_SCHEMA, "CONSERVATIVE")  # it has side effects


def _call(tensor: Tensor, comm: int, function: str, op: str, arguments: Sequence[int]) -> Tensor:
    method: Any = getattr(compiled.communicator(comm), function)
    return method(tensor, *([Op[op]] if op else []), *arguments)


_library.impl("call", _call, "CompositeImplicitAutograd")


class _Communicator:
    """The methods of mpi4torch's communicator that take and give tensors; scripted line by line."""

    def __init__(self, number: int, rank: int, size: int) -> None:
        self.number = number
        self.rank = rank
        self.size = size

    def Allreduce(self, tensor: Tensor, op: Op) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.number, "Allreduce", op.name, [])

    def Bcast_(self, tensor: Tensor, root: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.number, "Bcast_", "", [root])

    def Reduce_(self, tensor: Tensor, op: Op, root: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.number, "Reduce_", op.name, [root])

    def Gather(self, tensor: Tensor, gatheraxis: int, root: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.number, "Gather", "", [gatheraxis, root])

    def Allgather(self, tensor: Tensor, gatheraxis: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.number, "Allgather", "", [gatheraxis])

    def Scatter(self, tensor: Tensor, scatteraxis: int, numelem: int, root: int) -> Tensor:
        arguments = [scatteraxis, numelem, root]
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.number, "Scatter", "", arguments)

    def Alltoall(self, tensor: Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> Tensor:
        arguments = [gatheraxis, scatteraxis, numelem]
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.number, "Alltoall", "", arguments)

    def Send(self, tensor: Tensor, dest: int, tag: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.number, "Send", "", [dest, tag])

    def Recv(self, tensor: Tensor, source: int, tag: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.number, "Recv", "", [source, tag])


def make_scriptable(kind: type[Communicator]) -> None:
    """Lets scripted functions take a ``kind``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is
        script: Any = torch.jit.script  # it looks for `Op` where it is called
        script(_Communicator)
    _torch.script_as(kind, _Communicator)
