"""This rank's part in a group of ``sml``, behind c10d's names for its calls.

c10d calls a group with options objects, users also with plain arguments; both are converted to one
form. The class that torch knows is a subclass: in ``_backend.py`` since torch 2.14, in
``_old_group.py`` before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from torchrelay._members import Configuration, Member
from torchrelay._torch import watched
from torchrelay.aggregation import _calls as calls
from torchrelay.aggregation._collectives import Collectives
from torchrelay.aggregation._plane import NoPlane, Plane, PlaneStats, Tensors
from torchrelay.aggregation._work import DoneWork, seconds
from torchrelay.errors import (
    ArgumentError,
    OperationTimeoutError,
    UnavailableError,
    UnsupportedError,
)
from torchrelay.world import Process

__all__ = ["LIVING", "METHODS", "NEW_NAMES", "Core"]

_SUM = dist.ReduceOp.SUM

# c10d declares each method with overloads; here one method takes all forms.
_c10d: Any = dist.distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup
_ErrorType: Any = torch._C._distributed_c10d.ErrorType

LIVING: weakref.WeakSet[Any] = weakref.WeakSet()


def _method(
    name: str, collective: str, options: type[Any], num_tensors: int
) -> Callable[..., dist.Work]:
    """Return c10d's method ``name``, which runs one of :class:`Collectives`.

    Its arguments are ``num_tensors`` tensors or lists of them, then an options object, or a root, a
    reduction or a timeout.
    """

    def call(self: Core, *arguments: Any, **named: Any) -> dist.Work:
        tensors = arguments[:num_tensors]
        if not name.endswith("_base"):  # those take two tensors
            tensors = calls.as_lists(tensors)
        given = (*arguments[num_tensors:], *named.values())
        if len(given) == 1 and type(given[0]) is options:  # as c10d calls it
            opts = given[0]
        else:
            opts = calls.options_of(options, given)
        return self._call(name, getattr(self._on, collective), tensors, opts)

    call.__name__ = name
    return call


class Core:
    """What a rank of a group has and does, on every torch.

    Args:
        plane: owned, and closed by :meth:`shutdown`.
        store: of the group.
        timeout_s: for calls that give none.
        processes: of the ranks, by global rank; kept while the group is in use.
        devices: the device types of ``sml`` in this group.
        others: a plain group of the same ranks that holds the backends of all other device types.
        new_member: makes what this rank is in groups that it forms with :meth:`reconfigure`.
        split_off: makes the core of some ranks of the group of the core that it is given, over a
            store, with a timeout in seconds for calls that give none.

    Attributes:
        host: the collectives of CPU tensors; None if another backend has them.
        is_compared: whether torch compares the ranks' calls before it runs them.
    """

    supports_coalescing = supports_time_estimate = False
    # Since torch 2.15.
    supports_reconfigure, supports_window = True, False

    def __init__(
        self,
        plane: Plane,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        processes: dict[int, Process],
        devices: Sequence[str],
        others: dist.ProcessGroup | None,
        new_member: Callable[[], Member],
        split_off: Callable[[Any, Sequence[int], dist.Store, float], Any],
    ) -> None:
        self.store, self.devices = store, frozenset(devices)
        self.others: Any = _ProcessGroup(store, rank, size) if others is None else others
        self._run_on(plane, rank, size, timeout_s)
        self.processes = processes
        self.is_closed = self.is_compared = False
        self._new_member, self.split_off = new_member, split_off
        self._member: Member | None = None
        self._changing = threading.Lock()
        LIVING.add(self)

    def _run_on(self, plane: Plane, rank: int, size: int, timeout_s: float) -> None:
        self._on = Collectives(plane, rank, size, timeout_s)
        self.host = self._on if "cpu" in self.devices else None

    def name(self) -> str:
        return "sml"

    getBackendName = name  # noqa: N815 - c10d calls it

    def getRank(self) -> int:
        return self._on.rank

    def getSize(self) -> int:
        return self._on.size

    rank, size = getRank, getSize

    def set_timeout(self, timeout: timedelta) -> None:
        self._on.timeout_s = timeout.total_seconds()

    def _get_sequence_number_for_group(self) -> int:
        return self._on.count

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the count starts at 0 on every rank."""

    @property
    def timeout_s(self) -> float:
        return self._on.timeout_s

    def stats(self) -> PlaneStats:
        return self._on.plane.stats()

    def start_coalescing(self, device: torch.device | None = None) -> None:
        self._on.pending.start_coalescing()

    def end_coalescing(self, device: torch.device | None = None) -> Any:
        return self._on.pending.end_coalescing()

    # --- other members, and the end

    @property
    def member(self) -> Member:
        """What this rank is in groups that it forms with :meth:`reconfigure`."""
        if self.others._device_types:
            raise UnsupportedError(
                "sml: a group with other backends cannot be reconfigured, because those cannot: "
                f"this one has one for {self.others._device_types}"
            )
        if self.is_compared:
            raise UnsupportedError(
                "sml: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares calls over a group of "
                "Gloo, which keeps its members; unset it, or make the group with enable_reconfigure"
            )
        if self._member is None:
            if self.is_closed:
                raise UnavailableError("sml: this group was destroyed, and has no handle")
            self._member = self._new_member()
        return self._member

    def get_reconfigure_handle(self) -> str:
        return self.member.handle

    def reconfigure(self, opts: Any) -> dist.Work:
        """Form a new group; called by c10d since torch 2.15. Blocks."""
        try:
            self.form(opts.uuid, opts.handles, seconds(opts.timeout, self._on.timeout_s))
        except ArgumentError as error:
            raise RuntimeError(str(error)) from error  # as backends in C++ do
        return DoneWork()

    def get_error(self) -> Any:
        """Return whether the group has failed, as c10d names it. Does not wait."""
        error = self._on.plane.failure
        if error is None:
            return _ErrorType.SUCCESS
        is_late = isinstance(error, OperationTimeoutError)
        return _ErrorType.TIMEOUT if is_late else _ErrorType.COMM_ERROR

    def form(self, uuid: int, handles: Any, timeout_s: float) -> Configuration:
        """Form a new group; see :meth:`Member.reconfigure`. Rank and size change in place."""
        member, on = self.member, self._on
        try:
            formed = member.reconfigure(uuid, handles, timeout_s)
        except BaseException as error:
            if member.group is None:
                reason = f"has no members, because reconfiguration {uuid} failed: {error}"
                self._run_on(NoPlane(reason), on.rank, on.size, on.timeout_s)
            raise
        with self._changing:
            if member.group is None:
                raise UnavailableError(f"sml: reconfiguration {uuid} was aborted in this process")
            self.processes = {}
            self._set_others(_ProcessGroup(self.store, formed.rank, formed.size))
            self._run_on(cast("Plane", member.group), formed.rank, formed.size, on.timeout_s)
        return formed

    def abort(self) -> None:
        """Leave the group, as :meth:`shutdown` does. If its handle was asked for, it can be
        reconfigured again.
        """
        if self._member is None:
            self.shutdown()
        else:
            with self._changing:
                self._member.abort()
                on = self._on
                self._run_on(NoPlane("was aborted"), on.rank, on.size, on.timeout_s)

    def shutdown(self) -> None:
        """Leave the group. Operations in progress fail, also on ranks that wait for this one."""
        if not self.is_closed:
            self.is_closed = True
            self.processes = {}
            self._on.close()
            if self._member is not None:
                self._member.close()

    def _set_others(self, others: Any) -> None:
        self.others = others

    # --- collectives; METHODS has more

    def _call(
        self, method: str, run: Callable[..., dist.Work], tensors: tuple[Any, ...], *rest: Any
    ) -> dist.Work:
        """Run a call. ``method`` is c10d's name for it, ``rest`` all arguments but the tensors."""
        raise NotImplementedError

    def short_sum(self, tensors: Any, opts: Any) -> dist.Work | None:
        """Run a blocking sum of one plain tensor by the shortest path; return None, with nothing
        done, for all others, and where a profiler or a mode must see it.
        """
        if (
            self.host is None
            or len(tensors) != 1
            or getattr(opts, "asyncOp", True)
            or opts.reduceOp != _SUM
            or watched()
        ):
            return None
        return self.host.sum_now(tensors[0], tensors[0], opts.timeout)

    def alltoall_base(self, output: Any, tensor: Any, *rest: Any, **named: Any) -> dist.Work:
        output_splits, input_splits, *given = rest
        opts = calls.options_of(_c10d.AllToAllOptions, (*given, *named.values()))
        run = self._on.all_to_all_single
        return self._call("alltoall_base", run, (output, tensor), output_splits, input_splits, opts)

    all_to_all_single = alltoall_base

    # --- synchronisation and messages

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if not hasattr(opts, "timeout"):  # not as c10d calls it
            opts = calls.options_of(_c10d.BarrierOptions, (opts, timeout))
            opts.asyncOp = False
        return self._call("barrier", self._on.barrier, (), opts)

    def monitored_barrier(
        self, opts: Any = None, wait_all_ranks: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Run a barrier whose error names every missing rank, whatever ``wait_all_ranks`` is."""
        self.barrier(opts, timeout).wait()

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        return self._call("send", self._on.send, (tensors,), to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        return self._call("recv", self._on.receive, (tensors,), source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._call("recv_anysource", self._on.receive_from_any, (tensors,), tag)


# c10d's name, the collective, its options, the number of its arguments that are tensors.
METHODS = (
    ("allreduce", "all_reduce", _c10d.AllreduceOptions, 1),
    ("allreduce_coalesced", "all_reduce", _c10d.AllreduceCoalescedOptions, 1),
    ("reduce", "reduce", _c10d.ReduceOptions, 1),
    ("reduce_scatter", "reduce_scatter", _c10d.ReduceScatterOptions, 2),
    ("_reduce_scatter_base", "reduce_scatter_tensors", _c10d.ReduceScatterOptions, 2),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter_tensors", _c10d.ReduceScatterOptions, 2),
    ("broadcast", "broadcast", _c10d.BroadcastOptions, 1),
    ("allgather", "all_gather", _c10d.AllgatherOptions, 2),
    ("_allgather_base", "all_gather_tensors", _c10d.AllgatherOptions, 2),
    ("allgather_into_tensor_coalesced", "all_gather_tensors", _c10d.AllgatherOptions, 2),
    ("allgather_coalesced", "all_gather_coalesced", _c10d.AllgatherOptions, 2),
    ("gather", "gather", _c10d.GatherOptions, 2),
    ("scatter", "scatter", _c10d.ScatterOptions, 2),
    ("alltoall", "all_to_all", _c10d.AllToAllOptions, 2),
)
# Since torch 2.13.
NEW_NAMES = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
}

for _name, *_rest in METHODS:
    setattr(Core, _name, _method(_name, *_rest))
for _name, _former in NEW_NAMES.items():
    setattr(Core, _name, getattr(Core, _former))
