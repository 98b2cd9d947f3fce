"""The order of communications, kept as a chain in autograd's graph.

Every recorded communication takes the head of the chain, a 0-dim tensor that requires grad, as an
additional input and returns a new head. The backward pass therefore runs *all* communications of a
rank in reverse order; if every rank could finish in the forward order, it can in reverse.

A chain belongs to a thread, not to a communicator: a thread's communications have one order.
Forward code inside a backward pass, such as a recomputed checkpoint, has its own chain.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.errors import GraphError, UnsupportedError
from torchrelay.mpi._library import MPI
from torchrelay.mpi._settings import settings

if TYPE_CHECKING:
    from torch.autograd.graph import Node

__all__ = ["ROOT", "Chain", "Link", "active", "adjoint_chain", "chain", "current", "reset"]

MAIN = threading.main_thread().ident

ROOT = torch.zeros((), requires_grad=True)
"""Every chain starts here, so that ``torch.autograd.grad`` can be told to go all the way."""


class Chain:
    """Communications since the last backward pass, each dependent on the previous one."""

    __slots__ = (
        "__weakref__",
        "begun",
        "first",
        "head",
        "names",
        "operations",
        "receipts",
        "slot",
        "task",
        "warned",
    )

    def __init__(self, slot: Slot | None = None) -> None:
        self.slot = slot
        self.head: Tensor | None = ROOT
        self.names: list[str] = []
        self.operations: list[Any] = []  # its non-blocking collectives
        self.first: weakref.ref[Node] | None = None
        self.receipts: dict[Any, Any] = {}  # of messages, by communicator, source and tag
        self.task = -1  # the backward pass that runs, or ran last
        self.begun = 0  # the position it begins at
        self.warned = False

    def extend(self, name: str | None) -> Tensor:
        """Return the token for the next communication; the caller stores its result in ``head``.

        A link without a name communicates nothing in the backward pass and need not be reached.
        """
        if name is not None:
            self.names.append(name)
        if len(self.names) > settings.chain_warning and not self.warned:
            self.warned = True
            warnings.warn(
                f"{len(self.names)} communications were recorded without a backward pass, and "
                "everything they depend on is kept: run evaluation under torch.no_grad(), or drop "
                "them with torchrelay.mpi.reset()",
                stacklevel=4,
            )
        assert self.head is not None
        return self.head

    def close(self) -> None:
        """Release the graph, whose nodes refer to their chain and would form a cycle."""
        self.head = None


class Slot:
    """Holds the chain that communications join: one per thread, and one per backward pass."""

    __slots__ = ("chain",)

    def __init__(self) -> None:
        self.chain = Chain(self)

    def renew(self) -> Chain:
        """Replace the chain, whose backward pass runs, by a new one."""
        self.chain.close()
        self.chain = Chain(self)
        return self.chain


class Link:
    """Place of a recorded communication in its chain."""

    __slots__ = ("chain", "done", "name", "position")

    def __init__(self, chain: Chain, node: Node, name: str) -> None:
        self.chain = chain
        self.name = name
        self.position = len(chain.names)
        self.done = False
        if self.position == 1 and chain.first is None:
            chain.first = weakref.ref(node)

    def enter(self, policy: str, is_used: bool) -> bool:
        """Start the node's backward; return False if it has run before and only keeps the order.

        Raises:
            GraphError: it has run before, and a loss used its result again.
        """
        if self.done:
            if is_used:
                raise GraphError(
                    f"a second backward pass reaches {self.name}, whose backward has run: pass "
                    "retain_graph=True to the first backward pass on every rank, or add the losses "
                    "and differentiate the sum"
                )
            return False
        chain, task = self.chain, _torch.backward_id()
        if chain.task != task:
            chain.task = task
            self._begin(policy)
        self.done = not _torch.backward_keeps_graph()
        return True

    def _begin(self, policy: str) -> None:
        """Check, as the first communication of this backward pass, that all others are in reach."""
        chain = self.chain
        chain.begun = self.position
        if policy != "ignore":
            self._check_reach(policy)
        slot = chain.slot
        if slot is not None and slot.chain is chain and not _torch.backward_keeps_graph():
            slot.renew()

    def _check_reach(self, policy: str) -> None:
        chain, position = self.chain, self.position
        if position == 1 == len(chain.names):
            return
        first = chain.first() if chain.first is not None and position > 1 else None
        before = first is not None and not _torch.backward_will_run(first)
        after = chain.names[position:]
        if not after and not before:
            return
        where = f"the {len(after)} communications after it ({_few(after)})" if after else ""
        if before:
            where += " and " if where else ""
            earlier = self.chain.names[: self.position - 1]
            where += f"some of the {self.position - 1} before it ({_few(earlier)})"
        message = (
            f"this backward pass starts at {self.chain.names[self.position - 1]} (number "
            f"{self.position}) and does not reach {where}; ranks whose loss depends on them would "
            "wait forever or get wrong values. Use torchrelay.mpi.backward(loss) or "
            "torchrelay.mpi.grad(outputs, inputs), which run all of them, or communicate what "
            "needs no gradient under torch.no_grad()"
        )
        if policy == "warn":
            warnings.warn(message, stacklevel=2)
        else:
            self.chain.task = -1
            raise GraphError(message)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


class _Here(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.adjoint: Chain | None = None  # of the node whose backward runs
        if threading.get_ident() == MAIN:
            self.slot = _main
        elif MPI is None or MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.slot = Slot()
        else:
            raise UnsupportedError(
                "this MPI was not started for more than one thread; communicate in the main thread"
            )


_main = Slot()
_here = _Here()


def current() -> Chain:
    """Return the chain that the next communication joins."""
    if _here.adjoint is not None:
        return _here.adjoint
    if _torch.backward_id() >= 0:
        return _scratch(_torch.backward_id()).chain
    return _here.slot.chain


def current_compiled() -> Chain:
    """Return the chain for code under ``torch.compile``: that of the main thread."""
    return _main.chain


def check_compiled() -> None:
    """Raise :class:`UnsupportedError` if compiled code would join another thread's chain."""
    if threading.get_ident() != MAIN and _torch.backward_id() < 0:
        raise UnsupportedError("compiled code communicates in the main thread only")


def begin_compiled(task: int) -> None:
    """Start the backward pass ``task`` for a compiled region, as :class:`Link` does for a node."""
    chain = _main.chain
    if task >= 0 and chain.task != task:
        chain.task, chain.begun = task, len(chain.names)
        if not _torch.backward_keeps_graph():
            _main.renew().task = task


def active() -> Chain | None:
    """Return the thread's chain if it has recorded communications."""
    chain = _here.slot.chain
    return chain if chain.head is not ROOT else None


_scratches: dict[int, Slot] = {}


def _scratch(task: int) -> Slot:
    """Return a chain for forward code inside a backward pass, such as a recomputed checkpoint.

    Its graph serves that backward pass only and must not join the thread's chain. A reentrant
    checkpoint differentiates it at once in its own pass; the next one gets a new chain.
    """
    if task not in _scratches:
        _scratches[task] = Slot()
        _torch.after_backward(lambda: _forget(task))
    return _scratches[task]


def _forget(task: int) -> None:
    slot = _scratches.pop(task, None)
    if slot is not None:
        slot.chain.close()


@contextlib.contextmanager
def adjoint_chain(link: Link) -> Iterator[None]:
    """Record within the block in the chain of the node whose backward runs."""
    here, before = _here, _here.adjoint
    is_open = link.chain.head is not None
    here.adjoint = link.chain if is_open else _scratch(_torch.backward_id()).chain
    try:
        yield
    finally:
        here.adjoint = before


@contextlib.contextmanager
def chain() -> Iterator[None]:
    """Record the communications of the block in a chain of their own.

    Use it for computations with a separate backward pass: two losses of one step, or a function for
    ``torch.autograd.gradcheck``. All ranks must run these backward passes in the same order.
    """
    slot = _here.slot
    before = slot.chain
    mine = slot.chain = Chain(slot)
    try:
        yield
    finally:
        mine.close()
        slot.chain.close()
        slot.chain = before


def reset() -> None:
    """Discard all recorded communications; later backward passes do not run them."""
    _here.slot.renew()
