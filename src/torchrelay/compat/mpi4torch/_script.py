"""mpi4torch's communicator for TorchScript.

Scripted code supports neither our communicators nor autograd functions in Python. It gets a class
whose methods call operators of ``torch.library`` with the function's name and the communicator's
key. TorchScript treats these as having side effects: it keeps calls whose result is unused, and
their order. A started communication is identified by a number.
"""

# TorchScript compiles no casts of an operator's result.
# mypy: disable-error-code="no-any-return,return-value,attr-defined"
from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrelay import _torch, mpi
from torchrelay.errors import ArgumentError
from torchrelay.mpi import Communicator, Op, WaitHandle, _compiled

__all__ = ["JoinDummies", "JoinDummiesHandle", "make_scriptable"]

_Library: Any = torch.library.Library
_library = _Library("torchrelay_mpi4torch", "DEF")
for _schema in (
    "call(Tensor tensor, str comm, str function, str op, int[] arguments) -> Tensor",
    "start(Tensor tensor, str comm, str function, int peer, int tag) -> (Tensor, int)",
    "wait(Tensor dummy, int handle) -> Tensor",
    "join(Tensor tensor, Tensor[] dummies) -> Tensor",
):
    _library.define(_schema, "CONSERVATIVE")  # it has side effects

_started: dict[int, WaitHandle] = {}  # and not waited for, by number
_numbers = itertools.count()


def _call(tensor: Tensor, comm: str, function: str, op: str, arguments: Sequence[int]) -> Tensor:
    method: Any = getattr(_compiled.communicator(comm), function)
    return method(tensor, *([Op[op]] if op else []), *arguments)


def _start(tensor: Tensor, comm: str, function: str, peer: int, tag: int) -> tuple[Tensor, int]:
    handle: WaitHandle = getattr(_compiled.communicator(comm), function)(tensor, peer, tag)
    number = next(_numbers)
    _started[number] = handle
    return handle.dummy, number


def _wait(dummy: Tensor, handle: int) -> Tensor:
    started = _started.pop(handle, None)
    if started is None:
        raise ArgumentError("Wait: this communication was already waited for")
    return dataclasses.replace(started, dummy=dummy).Wait()


_library.impl("call", _call, "CompositeImplicitAutograd")
_library.impl("start", _start, "CompositeImplicitAutograd")
_library.impl("wait", _wait, "CompositeImplicitAutograd")
_library.impl("join", mpi.JoinDummies, "CompositeImplicitAutograd")


class _WaitHandle:
    """A communication in progress."""

    def __init__(self, dummy: Tensor, number: int) -> None:
        self.dummy = dummy
        self.number = number


def JoinDummies(loopthrough: Tensor, dummies: list[Tensor]) -> Tensor:
    """``loopthrough``, which for autograd depends on the ``dummies`` too."""
    if torch.jit.is_scripting():
        return torch.ops.torchrelay_mpi4torch.join(loopthrough, dummies)
    else:  # noqa: RET505 - TorchScript compiles what follows a return
        return mpi.JoinDummies(loopthrough, dummies)


def JoinDummiesHandle(handle: WaitHandle, dummies: list[Tensor]) -> WaitHandle:
    """``handle``, whose ``Wait`` for autograd depends on the ``dummies`` too."""
    if torch.jit.is_scripting():
        return _WaitHandle(
            torch.ops.torchrelay_mpi4torch.join(handle.dummy, dummies), handle.number
        )
    else:  # noqa: RET505 - TorchScript compiles what follows a return
        return mpi.JoinDummiesHandle(handle, dummies)


class _Communicator:
    """The methods of mpi4torch's communicator that take and give tensors; scripted line by line."""

    def __init__(self, key: str, rank: int, size: int) -> None:
        self.key = key
        self.rank = rank
        self.size = size

    def Allreduce(self, tensor: Tensor, op: Op) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.key, "Allreduce", op.name, [])

    def Bcast_(self, tensor: Tensor, root: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.key, "Bcast_", "", [root])

    def Reduce_(self, tensor: Tensor, op: Op, root: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.key, "Reduce_", op.name, [root])

    def Gather(self, tensor: Tensor, gatheraxis: int, root: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(
            tensor, self.key, "Gather", "", [gatheraxis, root]
        )

    def Allgather(self, tensor: Tensor, gatheraxis: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.key, "Allgather", "", [gatheraxis])

    def Scatter(self, tensor: Tensor, scatteraxis: int, numelem: int, root: int) -> Tensor:
        arguments = [scatteraxis, numelem, root]
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.key, "Scatter", "", arguments)

    def Alltoall(self, tensor: Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> Tensor:
        arguments = [gatheraxis, scatteraxis, numelem]
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.key, "Alltoall", "", arguments)

    def Send(self, tensor: Tensor, dest: int, tag: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.key, "Send", "", [dest, tag])

    def Recv(self, tensor: Tensor, source: int, tag: int) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.call(tensor, self.key, "Recv", "", [source, tag])

    def Isend(self, tensor: Tensor, dest: int, tag: int) -> WaitHandle:
        dummy, number = torch.ops.torchrelay_mpi4torch.start(tensor, self.key, "Isend", dest, tag)
        return _WaitHandle(dummy, number)

    def Irecv(self, tensor: Tensor, source: int, tag: int) -> WaitHandle:
        dummy, number = torch.ops.torchrelay_mpi4torch.start(tensor, self.key, "Irecv", source, tag)
        return _WaitHandle(dummy, number)

    def Wait(self, handle: WaitHandle) -> Tensor:
        return torch.ops.torchrelay_mpi4torch.wait(handle.dummy, handle.number)


def make_scriptable(kind: type[Communicator]) -> None:
    """Let scripted functions take a ``kind``, and make and wait for handles."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script")  # torch deprecates it
        script: Any = torch.jit.script  # it looks for `Op` where it is called
        script(_WaitHandle)
        _torch.script_as(WaitHandle, _WaitHandle)
        script(_Communicator)
    _torch.script_as(kind, _Communicator)
