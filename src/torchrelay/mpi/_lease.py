"""Ownership of the transports behind communicators, and when they are freed.

MPI has few communicators, 2048 under MPICH, and frees one only if all its ranks do. A communicator
that a rank can no longer reach is freed when its parent creates the next one: the ranks then agree
on those that none can reach.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchrelay.mpi import _wait
from torchrelay.mpi._dtypes import Op

if TYPE_CHECKING:
    from torchrelay.mpi._transport import Transport

__all__ = ["Lease"]


class _Handles:
    """Communicators freed together, and their children, in an order equal on all ranks."""

    __slots__ = ("children", "transports")

    def __init__(self) -> None:
        self.transports: list[Transport] = []
        self.children: list[_Child] = []

    def free(self) -> None:
        for transport in self.transports:
            transport.free()
        self.transports.clear()

    def free_all(self) -> None:
        for child in self.children:
            child.handles.free_all()
        self.free()


class _Child(NamedTuple):
    lease: weakref.ref[Lease] | None  # None: this rank is not in it
    handles: _Handles

    def is_out_of_reach(self) -> bool:
        return self.lease is None or self.lease() is None


class Lease:
    """Ownership shared by a communicator, its copies and its children.

    Attributes:
        control: carries messages of waiting ranks.
        ended: the ranks that have ended.
        is_freed: whether the communicator has been freed.
    """

    __slots__ = (
        "__weakref__",
        "control",
        "ended",
        "handles",
        "is_freed",
        "parent",
        "rank",
        "size",
    )

    def __init__(self, transport: Transport, parent: Lease | None) -> None:
        """Collective over the ranks of ``transport``."""
        self.rank, self.size = transport.rank, transport.size
        self.parent = parent
        self.ended: set[int] = set()
        self.is_freed = False
        self.handles = _Handles()
        self.control = self.own(transport.duplicate())
        if parent is not None:
            self.own(transport)
            parent.handles.children.append(_Child(weakref.ref(self), self.handles))
        _wait.register(self)

    def own(self, transport: Transport) -> Transport:
        """Return ``transport``, to be freed with the rest."""
        self.handles.transports.append(transport)
        return transport

    def no_child(self) -> None:
        """Note a child that this rank is no part of."""
        self.handles.children.append(_Child(None, _Handles()))

    def collect(self, call: _wait.Waiting) -> None:
        """Free children that no rank can reach. Collective."""
        children = self.handles.children
        if not children:
            return
        mine = torch.tensor([child.is_out_of_reach() for child in children], dtype=torch.uint8)
        free = torch.empty_like(mine)
        for request in call.comm.transport.allreduce(mine, free, Op.MIN, False):
            _wait.finish(request, call, (mine, free))
        for child, is_free in zip(children, free.tolist(), strict=True):
            if is_free:
                child.handles.free_all()
        self.handles.children = [
            child for child, is_free in zip(children, free.tolist(), strict=True) if not is_free
        ]

    def free(self) -> None:
        """Free the communicators, but not the children. Collective."""
        self.is_freed = True
        _wait.unregister(self)
        self.handles.free()
