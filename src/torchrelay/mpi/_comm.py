"""What all communicators are: ranks, the transports between them, and settings.

A communicator has two duplicates: one for the communication of backward passes, and one over which
waiting ranks report their state.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from torch.compiler import is_compiling

from torchrelay import _torch
from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi import _compiled, _headers, _wait
from torchrelay.mpi._dtypes import check_integer
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG, PROC_NULL, Transport

__all__ = ["WORLD_NAME", "Comm", "Lease", "collective", "once"]

_C = TypeVar("_C", bound="Comm")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_names = itertools.count()
WORLD_NAME = "COMM_WORLD"


class Lease:
    """State shared by a communicator and its copies.

    Attributes:
        control: carries messages of waiting ranks.
        answers: where each rank is, as it answered last.
        calls: each rank's description of a call that matches no other's.
        ended: the ranks that have ended.
        is_freed: whether the communicator has been freed.
        comparisons: how often its ranks have compared their calls.
    """

    def __init__(self, transport: Transport, is_owned: bool) -> None:
        """Wrap a transport; collective over the ranks of ``transport``."""
        self.rank, self.size = transport.rank, transport.size
        self.answers: dict[int, str] = {}
        self.calls: dict[int, str] = {}
        self.ended: set[int] = set()
        self.is_freed = False
        self.comparisons = 0
        self.owned = [transport] if is_owned else []
        self.control = self.duplicate(transport, for_messages=True)
        self.job = transport.job
        self.job.leases.add(self)

    def duplicate(self, transport: Transport, for_messages: bool = False) -> Transport:
        """Return a duplicate of ``transport``, to be freed with the rest. Collective."""
        copy: Transport = transport.duplicate(for_messages)
        self.owned.append(copy)
        return copy

    def free(self) -> None:
        """Free the transports. Collective."""
        self.is_freed = True
        self.job.leases.discard(self)
        for transport in self.owned:
            transport.free()


class Comm:
    """The base of communicators, whose functions are in classes derived from it.

    ``key`` is that by which compiled code finds it; ``is_alone`` whether no communicator of this
    process has other ranks, so that nothing waits for another and needs an order. Of one rank among
    others it is false: the same code may communicate there.
    """

    key: str
    is_alone: bool
    announces = True  # whether debug mode announces messages to their receivers
    _original: Comm | None = None

    def __init__(
        self, transport: Transport, name: str | None = None, is_owned: bool = False
    ) -> None:
        """Use ``transport``, and free it if it ``is_owned``. Collective over its ranks."""
        self.rank, self.size, self.is_alone = transport.rank, transport.size, transport.is_alone
        self.name = name or f"communicator {next(_names)}"
        self.convention = "sum"
        self.unreachable_policy: str | None = None  # None: as the setting
        self.is_reverse = False
        self.lease = Lease(transport, is_owned)
        self.job = transport.job
        self._use(transport)

    def _use(self, transport: Transport) -> None:
        """Use ``transport``, and in backward passes a duplicate. Collective."""
        self.transport = transport
        self._reverse: Comm | None = None
        reverse = self._copy()
        reverse.transport = self.lease.duplicate(transport)
        reverse.name = f"{self.name} (backward)"
        reverse.is_reverse = True
        self._reverse = reverse
        self.key = reverse.key = _compiled.register(self)

    @property
    def reverse(self) -> Comm:
        """The communicator of backward passes; for that one, itself."""
        return self if self._reverse is None else self._reverse

    def _copy(self: _C) -> _C:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __repr__(self) -> str:
        return f"<{self.name}: rank {self.rank} of {self.size}>"

    def replace(
        self: _C, convention: str | None = None, unreachable_policy: str | None = None
    ) -> _C:
        """Return this communicator with other settings. Not collective.

        Args:
            convention: ``"sum"`` or ``"replicated"``.
            unreachable_policy: ``"raise"``, ``"warn"`` or ``"ignore"``, instead of
                ``TORCHRELAY_MPI_UNREACHABLE_POLICY``.

        Raises:
            ArgumentError: a value is not one of these.
        """
        convention = convention or self.convention
        policy = unreachable_policy or self.unreachable_policy
        if (convention, policy) == (self.convention, self.unreachable_policy):
            return self
        if convention not in ("sum", "replicated"):
            raise ArgumentError(f"convention={convention!r}: it must be 'sum' or 'replicated'")
        if policy not in (None, "raise", "warn", "ignore"):
            raise ArgumentError(
                f"unreachable_policy={policy!r}: it must be 'raise', 'warn' or 'ignore'"
            )
        other = self._copy()
        other.convention, other.unreachable_policy = convention, policy
        if self._reverse is not None:
            other._reverse = self._reverse._copy()
            other._reverse.convention, other._reverse.unreachable_policy = convention, policy
        other._original = self  # which compiled code finds by its key
        return other

    def Free(self) -> None:
        """Release the communicator, which MPI has few of. Collective.

        Neither it nor its copies (:meth:`replace`) can be used afterwards.

        Raises:
            ArgumentError: it is ``COMM_WORLD``.
        """
        if self.name == WORLD_NAME:
            raise ArgumentError(f"{self.name} cannot be freed")
        if not self.lease.is_freed:
            self._agree("Free")
            self.lease.free()

    @_compiled.eager_only
    def _agree(
        self, name: str, arguments: str = "", numbers: Sequence[int] = ()
    ) -> Sequence[Sequence[int]]:
        """Wait until all ranks call ``name``, and return the numbers of all."""
        _wait.check_usable(self)
        call = _wait.Named(self, f"{name}({arguments})")
        return _headers.exchange_numbers(call, (name, arguments), numbers)

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Free it, unless the block raised: other ranks may not leave theirs then."""
        if kind is None:
            self.Free()

    def check_rank(self, rank: int) -> int:
        """Raise :class:`ArgumentError` if there is no such rank."""
        check_integer("rank", rank)
        if not 0 <= rank < self.size:
            raise ArgumentError(f"rank {rank} of {self.name}, which has ranks 0 to {self.size - 1}")
        return rank

    def check_peer(
        self, name: str, rank: int, tag: int, is_source: bool = False
    ) -> tuple[int, int]:
        """Raise :class:`ArgumentError` unless a message can go to ``rank``, or come from it.

        ``MPI_PROC_NULL`` is taken as a rank, and in a source the wildcards.
        """
        check_integer(name, rank)
        check_integer("tag", tag)
        if rank != PROC_NULL and not (is_source and rank == ANY_SOURCE):
            self.check_rank(rank)
        if not (0 <= tag <= self.transport.max_tag or (is_source and tag == ANY_TAG)):
            raise ArgumentError(
                f"tag {tag}: a message has a tag from 0 to {self.transport.max_tag}"
            )
        return rank, tag


def collective(
    method: Callable[Concatenate[_C, _P], _R],
) -> Callable[Concatenate[_C, _P], _R]:
    """Let the other ranks know of wrong arguments; a decorator of functions that all ranks call.

    A rank that only raised would leave the others in this call, and compare its next one with it.
    It therefore takes part in the comparison, with its error, and raises it afterwards; ranks that
    pass other arguments raise a :class:`MismatchError` that contains it.
    """

    @functools.wraps(method)
    def call(self: _C, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_compiling():
            return method(self, *args, **kwargs)
        lease = self.lease
        before = lease.comparisons
        try:
            return method(self, *args, **kwargs)
        except (AttributeError, TypeError, ValueError) as error:
            if lease.comparisons == before and not lease.is_freed and self.size > 1:
                with contextlib.suppress(MismatchError):
                    self._agree(method.__name__, f"refused: {error}")
            raise

    return call


def once(
    method: Callable[Concatenate[_C, _P], _R],
) -> Callable[Concatenate[_C, _P], _R]:
    """Return what it returned before where a checkpoint is recomputed; a decorator.

    Not all ranks may recompute it.
    """

    @functools.wraps(method)
    def call(self: _C, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return _torch.computed_once(lambda: method(self, *args, **kwargs))

    return call
