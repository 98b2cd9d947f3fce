"""Order in which cotangents of received tensors are sent back: last message first.

Receives posted one after the other may be waited for in another order. A cotangent that arrives
before those of later messages of the same source and tag is kept until these have been sent.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING

from torch import Tensor

from torchrelay import _torch
from torchrelay.mpi._comm import Comm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrelay.mpi import _chain

__all__ = ["Receipt", "numbers"]

numbers = itertools.count()
"""Receives get one when they are posted."""


class _Group:
    """The receipts of one source and tag, in the order of their posts."""

    __slots__ = ("left", "receipts", "task")

    def __init__(self) -> None:
        self.receipts: list[Receipt] = []
        self.task = -1
        self.left = 0  # of the backward pass ``task``: how many of the first have not been answered


class Receipt:
    """A recorded receive, and the cotangent to be sent back."""

    __slots__ = ("chain", "grad", "group", "number", "position")

    def __init__(self, link: _chain.Link, comm: Comm, source: int, tag: int, number: int) -> None:
        self.chain = link.chain
        self.position = link.position
        self.number = number
        self.grad: tuple[int, Tensor] | None = (
            None  # the backward pass it came in, and the cotangent
        )
        self.group: _Group = self.chain.receipts.setdefault((comm, source, tag), _Group())
        bisect.insort(self.group.receipts, self, key=lambda receipt: receipt.number)

    def answer(self, grad: Tensor, post: Callable[[Tensor], object]) -> None:
        """Send ``grad``, and those kept for it, unless that of a later message must go first."""
        group, task = self.group, _torch.backward_id()
        if group.task != task:
            group.task, group.left = task, len(group.receipts)
        self.grad = (task, grad)
        while group.left:
            receipt = group.receipts[group.left - 1]
            if receipt.position <= self.chain.begun:  # this backward pass reaches it
                if receipt.grad is None or receipt.grad[0] != task:
                    return
                (_, kept), receipt.grad = receipt.grad, None
                post(kept)
            group.left -= 1
