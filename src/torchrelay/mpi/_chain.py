"""The order of communications, kept as a chain in autograd's graph.

Every recorded communication takes the head of the chain, a 0-dim tensor that requires grad, as an
additional input and returns a new head. The backward pass therefore runs *all* communications of a
rank in reverse order; if every rank could finish in the forward order, it can in reverse.

A chain belongs to a thread, not to a communicator: a thread's communications have one order, that
in which it runs them. What is a part of the order must not depend on what only one rank knows, such
as the size of a communicator: on another rank it has another size.

- The communications of a backward pass that is differentiated again continue one chain, whichever
  chains they are derivatives of. It is joined to each of these, so that a later pass that reaches
  it runs these as well.
- A block of :func:`chain` that leaves derivatives is a part of the order of what follows it.
- Inside of ``torch.func`` transforms the token is wrapped as tensors are, so the order is in the
  graph of each transform, and in that below all of them.
- Forward code inside a backward pass has a chain of its own, which nothing else continues: a
  checkpoint that is recomputed when a saved tensor is needed (its graph is discarded), and one of
  reentrant checkpointing (it is differentiated at once).
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay.errors import GraphError, UnsupportedError
from torchrelay.mpi._library import MPI
from torchrelay.mpi._settings import settings

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from torchrelay.mpi._record import Call

__all__ = [
    "APART",
    "ROOT",
    "Answer",
    "Chain",
    "Link",
    "backward",
    "chain",
    "continuing",
    "current",
    "grad",
    "main",
    "recording",
    "reset",
    "slot_of_thread",
]

MAIN = threading.main_thread().ident


def _root() -> Tensor:
    with _torch.outside_transforms():  # such as those that a checkpoint recomputes
        return torch.zeros((), device="cpu", requires_grad=True)


ROOT = _root()
"""Where communications that keep no order start."""


class Chain:
    """Communications since the last backward pass, each dependent on the previous one.

    Attributes:
        head: what the next communication takes.
        wrapped: the same inside of ``torch.func`` transforms, which have graphs of their own.
        kept: those of blocks that ended, whose derivatives are differentiated again.
        roots: where it starts, and chains that it was joined to: ``torch.autograd.grad`` of these
            as well runs the whole chain, and nothing before it.
    """

    def __init__(self, slot: Slot | None = None) -> None:
        self.slot = slot
        self.roots = [_root()]
        self.head: Tensor | None = self.roots[0]
        self.wrapped: Tensor | None = None
        self.kept: list[Chain] = []
        self.is_over = False  # whether a backward pass has freed its graph
        self.names: list[str] = []
        self.answers: defaultdict[Any, _Answers] = defaultdict(_Answers)
        self.first: weakref.ref[Node] | None = None
        self.task = -1  # the backward pass that runs, or ran last
        self.begun = 0  # the position it begins at
        self.added = (-1, 0)  # a backward pass that records in it, and the length before
        self.warned = False

    def extend(self, name: str) -> Tensor:
        """Return the token for the next communication; the caller stores its result in ``head``."""
        self.names.append(name)
        if len(self.names) > settings.chain_warning and not self.warned:
            self.warned = True
            warnings.warn(
                f"{len(self.names)} communications were recorded without a backward pass, and "
                "everything they depend on is kept: run evaluation under torch.no_grad(), or drop "
                "them with torchrelay.mpi.reset()",
                stacklevel=4,
            )
        self.join_kept()
        assert self.head is not None
        return self.head

    def keep(self, other: Chain) -> None:
        """Let what follows depend on ``other``, a block that ends, unless its graph is gone then.

        A backward pass in the block that kept its graph made derivatives: what uses them reaches
        the block on all ranks, or on some.
        """
        self._drop_kept()
        if torch.is_grad_enabled() and other.names and other.task >= 0:
            self.kept.append(other)
        else:
            other.close()

    def join_kept(self) -> None:
        """Let what follows depend on the blocks that are kept."""
        self._drop_kept()
        for other in self.kept:
            assert other.head is not None
            self.join(other, other.head)
        self._drop_kept(every=True)

    def _drop_kept(self, every: bool = False) -> None:
        """Close the blocks whose graph is gone, or ``every`` one."""
        for other in self.kept:
            if every or other.is_over:
                other.close()
        self.kept = [other for other in self.kept if other.head is not None]

    def token_in_transform(self) -> Tensor | None:
        """Return what the last communication inside the transforms that run returned, if any."""
        head = None if self.wrapped is None else _torch.lowered(self.wrapped)
        return head if head is not None and _torch.is_transformed(head) else None

    def is_wrapped(self, head: Tensor) -> bool:
        """Return whether ``head`` is below the last communication inside of transforms."""
        return self.wrapped is not None and _torch.lowered(self.wrapped, 0) is head

    def follow(self, wrapped: Tensor) -> None:
        """Let what follows inside of transforms, and below them, depend on ``wrapped``."""
        if self.head is None:
            return
        self.wrapped = wrapped
        head = _torch.lowered(wrapped, 0)
        if head.requires_grad:
            self.head = head

    def join(self, other: Chain, token: Tensor) -> None:
        """Let what follows depend on ``token``, of another chain, as well."""
        assert self.head is not None
        self.head = self.head + token
        self.roots += other.roots

    def close(self) -> None:
        """Release the graph, whose nodes refer to their chain and would form a cycle."""
        self.head = self.wrapped = None
        self._drop_kept(every=True)


class _Answers:
    """The derivatives of started communications that must begin last start first.

    They may be waited for in another order: a cotangent that arrives before those of later starts
    is kept until these have begun.
    """

    __slots__ = ("answers", "left", "task")

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.task = -1
        self.left = 0  # of the backward pass ``task``: how many of the first have not begun

    def advance(self, until: Answer | None = None) -> None:
        """Begin those whose cotangents have arrived; down to ``until``, also without them."""
        task = _torch.backward_id()
        if self.task != task:
            self.task, self.left = task, len(self.answers)
        while self.left:
            answer = self.answers[self.left - 1]
            if answer.position <= answer.chain.begun:  # this backward pass reaches it
                has_arrived = answer.grad is not None and answer.grad[0] == task
                if not has_arrived and until is None:
                    return
                grad, answer.grad = answer.grad, None
                answer.task = task
                self.left -= 1
                answer.begin(grad[1] if grad is not None and has_arrived else None)
            else:
                self.left -= 1
            if answer is until:
                return


class Answer:
    """The derivative of a started communication.

    Args:
        place: what it communicates over, and with whom, which decides what must keep an order.
        number: from ``numbers``, by the order of the starts.
        begin: begins it, with the cotangent, or None for zeros.
    """

    __slots__ = ("answers", "begin", "chain", "grad", "number", "position", "task")

    numbers = itertools.count()

    def __init__(
        self, chain: Chain, place: object, number: int, begin: Callable[[Tensor | None], object]
    ) -> None:
        self.chain, self.position = chain, len(chain.names)
        self.number, self.begin = number, begin
        self.task = -1  # the backward pass in which it began
        self.grad: tuple[int, Tensor] | None = None  # the pass it came in, and the cotangent
        self.answers = chain.answers[place]
        bisect.insort(self.answers.answers, self, key=lambda answer: answer.number)

    def give(self, grad: Tensor) -> None:
        """Begin with ``grad``, once those of later starts have begun."""
        self.grad = (_torch.backward_id(), grad)
        self.answers.advance()

    def force(self) -> None:
        """Begin, also without a cotangent."""
        if self.task != _torch.backward_id():
            self.answers.advance(until=self)


class Slot:
    """Holds the chain that communications join: one per thread, and one for forward code in each
    backward pass and recomputed checkpoint.
    """

    __slots__ = ("__weakref__", "chain")

    def __init__(self) -> None:
        self.chain = Chain(self)

    def renew(self) -> Chain:
        """Replace the chain, whose backward pass runs, by a new one."""
        self.chain.close()
        self.chain = Chain(self)
        return self.chain

    def close(self) -> None:
        self.chain.close()


APART = Chain()
"""Of communications that keep no order. It holds none, and is closed."""
APART.close()


class Link:
    """A recorded communication, and its place in its chain.

    Attributes:
        like: shape, dtype and device of its result.
    """

    __slots__ = ("call", "chain", "done", "like", "position")

    def __init__(self, chain: Chain, node: Node, call: Call, y: Tensor) -> None:
        self.chain, self.call = chain, call
        self.like = (y.shape, y.dtype, y.device)
        self.position = len(chain.names)
        self.done = False
        if self.position == 1 and chain.first is None:
            chain.first = weakref.ref(node)

    def enter(self, is_used: bool) -> bool:
        """Start the node's backward; return False if it has run before and only keeps the order.

        Raises:
            GraphError: it has run before, and a loss used its result again.
        """
        if self.done:
            if is_used:
                raise GraphError(
                    f"a second backward pass reaches {self.call.name}, whose backward has run: "
                    "pass retain_graph=True to the first backward pass on every rank, or add the "
                    "losses and differentiate the sum"
                )
            return False
        chain, task = self.chain, _torch.backward_id()
        if chain.task != task:
            chain.task = task
            self._begin()
        self.done = not _torch.backward_keeps_graph()
        return True

    def _begin(self) -> None:
        """Check, as the first communication of this backward pass, that all others are in reach."""
        chain = self.chain
        chain.begun = self.position
        if not self.call.comm.is_alone:
            self._check_reach()
        slot = chain.slot
        if not _torch.backward_keeps_graph():
            chain.is_over = True
            if slot is not None and slot.chain is chain:
                slot.renew()

    def _check_reach(self) -> None:
        chain, position = self.chain, self.position
        policy = self.call.comm.unreachable_policy or settings.unreachable_policy
        task, length = chain.added
        names = chain.names[: length if task == chain.task else None]
        if policy == "ignore" or position == 1 == len(names):
            return
        first = chain.first() if chain.first is not None and position > 1 else None
        before = first is not None and not _torch.backward_will_run(first)
        after = names[position:]
        if not after and not before:
            return
        where = f"the {len(after)} communications after it ({_few(after)})" if after else ""
        if before:
            where += " and " if where else ""
            earlier = names[: position - 1]
            where += f"some of the {self.position - 1} before it ({_few(earlier)})"
        message = (
            f"this backward pass starts at {names[position - 1]} (number "
            f"{position}) and does not reach {where}; ranks whose loss depends on them would "
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
        self.adjoint: Chain | None = None  # that the node whose backward runs records in
        self.whole: Chain | None = None  # of which all is differentiated, by grad or backward
        self.recomputed: dict[Any, Slot] = {}  # of checkpoints, by their hooks
        if threading.get_ident() == MAIN:
            self.slot = main
        elif MPI is None or MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.slot = Slot()
        else:
            raise UnsupportedError(
                "this MPI was not started for more than one thread; communicate in the main thread"
            )


main = Slot()
"""That of the main thread."""

_here = _Here()


def slot_of_thread() -> Slot:
    """Return the slot of the thread that runs, outside of backward passes."""
    return _here.slot


def current() -> Chain:
    """Return the chain that the next communication joins."""
    return _slot().chain if _here.adjoint is None else _here.adjoint


def _slot() -> Slot:
    """Return the slot of the code that runs: of the thread, or of forward code in a pass."""
    task = _torch.backward_id()
    if task < 0:
        return _here.slot
    running = _torch.recomputations()
    if not running:
        return _pass(task).slot
    slot = _here.recomputed.get(running[0])
    if slot is None:
        _end_recomputations()
        slot = _here.recomputed[running[0]] = Slot()
        _torch.after_backward(_end_recomputations)
    return slot


def _end_recomputations() -> None:
    """Close the slots of the checkpoints that are no longer being recomputed: a chain refers to its
    graph, which refers to the hook that took the graph's tensors.
    """
    running = _torch.recomputations()
    for hook in [each for each in _here.recomputed if each not in running]:
        _here.recomputed.pop(hook).close()


def check_compiled(main: Slot) -> None:
    """Prepare for compiled code, which joins the chain in ``main``, also in a backward pass.

    Raises:
        UnsupportedError: another thread runs it, or a reentrant checkpoint recomputes it.
    """
    _torch.recompute_whole()
    task = _torch.backward_id()
    if task < 0:
        if _here.slot is not main:
            raise UnsupportedError("compiled code communicates in the main thread only")
        return
    if not _torch.recomputations():
        raise UnsupportedError(
            "compiled code that communicates, in a backward pass: a reentrant checkpoint would "
            "differentiate what was called before it, too; pass use_reentrant=False"
        )
    _pass(task).keep(main)


def begin_compiled(main: Slot, task: int) -> None:
    """Start the backward pass ``task`` for a compiled region, as :class:`Link` does for a node."""
    chain = main.chain
    if task >= 0 and chain.task != task:
        chain.task, chain.begun = task, len(chain.names)
        if not _torch.backward_keeps_graph():
            main.renew().task = task


class _Pass:
    """What a backward pass records.

    Attributes:
        slot: of forward code, such as a reentrant checkpoint, which differentiates it at once in a
            pass of its own; the next one gets a new chain.
        adjoint: the chain of the derivatives, if they are differentiated again.
        joined: the chains of which these are derivatives.
    """

    def __init__(self) -> None:
        self.slot = Slot()
        self.own = Chain()
        self.adjoint: Chain | None = None
        self.joined: set[Chain] = set()
        self.kept: tuple[Chain, Tensor | None] | None = None

    def keep(self, main: Slot) -> None:
        """Note the head of the chain in ``main``, to which recomputed code must add nothing."""
        if self.kept is None:
            self.kept = (main.chain, main.chain.head)

    def end(self) -> None:
        _end_recomputations()
        self.slot.close()
        self.own.close()
        if self.kept is not None:
            chain, head = self.kept
            if chain.head is not None:
                chain.head = head


_passes: dict[int, _Pass] = {}


def _pass(task: int) -> _Pass:
    found = _passes.get(task)
    if found is None:
        found = _passes[task] = _Pass()
        _torch.after_backward(lambda: _passes.pop(task).end())
    return found


@contextlib.contextmanager
def recording(chain: Chain, token: Tensor | None) -> Iterator[None]:
    """Record the derivative of a communication of ``chain`` within the block.

    The first of a pass decides which chain those of all continue: that which the pass runs to its
    end, if it is one of :func:`grad` or :func:`backward`; or ``chain``; or one of its own, if that
    has ended.

    Args:
        token: what the communication returned.
    """
    here, before, task = _here, _here.adjoint, _torch.backward_id()
    found = _pass(task)
    if found.adjoint is None:
        choices = (here.whole, chain, found.own)
        found.adjoint = next(c for c in choices if c is not None and c.head is not None)
        found.joined.add(found.adjoint)
        found.adjoint.added = (task, len(found.adjoint.names))
    if chain not in found.joined and token is not None:
        found.joined.add(chain)
        found.adjoint.join(chain, token)
    here.adjoint = found.adjoint
    try:
        yield
    finally:
        here.adjoint = before


@contextlib.contextmanager
def continuing(chain: Chain) -> Iterator[None]:
    """Record in ``chain`` within the block: a backward pass of a transform is its forward code."""
    here, before = _here, _here.adjoint
    here.adjoint = chain if chain.head is not None else before
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
    slot = _slot()
    before = slot.chain
    mine = slot.chain = Chain(slot)
    try:
        yield
    finally:
        last, slot.chain = slot.chain, before
        if last is not mine:
            mine.close()
        before.keep(last)


def reset() -> None:
    """Discard all recorded communications; later backward passes do not run them."""
    _slot().renew()


# Backward passes that reach every communication, whether or not the loss depends on it.


def backward(
    loss: Tensor | None = None,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> None:
    """Call ``loss.backward(gradient)`` through all communications since the last backward pass.

    Collective over all ranks that communicated. A rank without a loss passes none.

    Args:
        loss: any shape; a scalar needs no ``gradient``.
        gradient: of the shape of ``loss``; a scalar loss needs none.
        retain_graph: as for ``Tensor.backward``.
        create_graph: as for ``Tensor.backward``.
    """
    outputs, grads = _ends([] if loss is None else [loss], [] if loss is None else [gradient])
    if outputs:
        with _whole():
            torch.autograd.backward(outputs, grads, retain_graph, create_graph)


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...]:
    """Call ``torch.autograd.grad`` through all communications since the last backward pass.

    Collective over all ranks that communicated. Arguments and results are those of
    ``torch.autograd.grad``.

    Raises:
        GraphError: the outputs do not depend on an input, and ``allow_unused`` is false.
    """
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if grad_outputs is None:
        grad_outputs = [None] * len(outputs)
    elif isinstance(grad_outputs, Tensor):
        grad_outputs = [grad_outputs]
    ends, cotangents = _ends(outputs, list(grad_outputs))
    roots = _slot().chain.roots
    with _whole():
        results = torch.autograd.grad(
            ends,
            [*inputs, *roots],
            cotangents,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=materialize_grads,
        )[: len(inputs)]
    if not allow_unused and any(g is None for g in results):
        unused = [number for number, g in enumerate(results) if g is None]
        raise GraphError(
            f"the outputs do not depend on inputs {unused}; allow_unused=True gives None for them"
        )
    return results


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Let derivatives continue the chain that is run to its end within the block."""
    here, before = _here, _here.whole
    here.whole = _slot().chain
    try:
        yield
    finally:
        here.whole = before


def _ends(
    outputs: list[Tensor], grads: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs that have a graph, and the head of the chain."""
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    chain = _slot().chain
    chain.join_kept()
    head = chain.head
    if head is not None and head is not chain.roots[0]:
        pairs.append((head, torch.zeros_like(head)))
    return [y for y, _ in pairs], [g for _, g in pairs]
