"""Ownership of the MPI communicators behind ours, and when they are freed.

MPI has few communicators, 2048 under MPICH, and frees one only if all its ranks do. A communicator
that a rank can no longer reach is freed when its parent creates the next one: the ranks then agree
on those that none can reach.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchrelay.mpi import _wait
from torchrelay.mpi._library import MPI

if TYPE_CHECKING:
    from torchrelay.mpi._headers import Headers

__all__ = ["Lease"]


class _Handles:
    """Communicators freed together, and their children, in an order equal on all ranks."""

    __slots__ = ("children", "mpi")

    def __init__(self) -> None:
        self.mpi: list[MPI.Comm] = []
        self.children: list[_Child] = []

    def free(self) -> None:
        for mpi in self.mpi:
            mpi.Free()
        self.mpi.clear()

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
        idle_headers: memory for headers that no exchange uses.
        is_freed: whether the communicator has been returned to MPI.
    """

    __slots__ = (
        "__weakref__",
        "control",
        "descending",
        "ended",
        "handles",
        "idle_headers",
        "is_freed",
        "parent",
        "rank",
        "size",
    )

    def __init__(self, mpi: MPI.Intracomm, parent: Lease | None) -> None:
        """Collective over the ranks of ``mpi``."""
        self.rank, self.size = mpi.rank, mpi.size
        self.parent = parent
        self.ended: set[int] = set()
        self.idle_headers: list[Headers] = []
        self.is_freed = False
        self.descending: MPI.Intracomm | None = None
        self.handles = _Handles()
        self.control = self.own(mpi.Dup())
        if parent is not None:
            self.own(mpi)
            parent.handles.children.append(_Child(weakref.ref(self), self.handles))
        _wait.register(self)

    def own(self, mpi: MPI.Intracomm) -> MPI.Intracomm:
        """Return ``mpi``, to be freed with the rest."""
        self.handles.mpi.append(mpi)
        return mpi

    def no_child(self) -> None:
        """Note a child that this rank is no part of."""
        self.handles.children.append(_Child(None, _Handles()))

    def collect(self, call: _wait.Waiting) -> None:
        """Free children that no rank can reach. Collective."""
        children = self.handles.children
        if not children:
            return
        free = np.array([child.is_out_of_reach() for child in children], np.uint8)
        request = call.comm.mpi.Iallreduce(
            MPI.IN_PLACE, (free, len(children), MPI.UINT8_T), MPI.MIN
        )
        _wait.finish(request, call, free)
        for child, is_free in zip(children, free, strict=True):
            if is_free:
                child.handles.free_all()
        self.handles.children = [
            child for child, is_free in zip(children, free, strict=True) if not is_free
        ]

    def free(self) -> None:
        """Free the communicators, but not the children. Collective."""
        self.is_freed = True
        _wait.unregister(self)
        self.handles.free()
