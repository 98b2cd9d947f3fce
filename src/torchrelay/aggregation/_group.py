"""The process group for PyTorch.

c10d calls a group with options objects, users also with plain arguments; both are converted to one
form. The device of the tensors then selects our own collectives or another backend of the group.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay._members import Configuration, Member
from torchrelay._torch import (
    TimeoutOnly,
    dispatches_itself,
    fake_mode_active,
    is_setting_timeout,
    lowest_mode,
    name_backend,
    operator_results,
    route_group_operators,
    span,
    watched,
)
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

__all__ = ["LIVING", "SmlGroup"]

_AllreduceOptions = dist.AllreduceOptions
_SUM = dist.ReduceOp.SUM

# c10d declares each method with overloads; here one method takes all forms.
_c10d: Any = dist.distributed_c10d
_ErrorType: Any = torch._C._distributed_c10d.ErrorType
_ProcessGroup: Any = dist.ProcessGroup

LIVING: weakref.WeakSet[Any] = weakref.WeakSet()


def _method(
    name: str, collective: str, options: type[Any], num_tensors: int
) -> Callable[..., dist.Work]:
    """Return c10d's method ``name``, which runs one of :class:`Collectives`.

    Its arguments are ``num_tensors`` tensors or lists of them, then an options object, or a root, a
    reduction or a timeout.
    """

    def call(self: SmlGroup, *arguments: Any, **named: Any) -> dist.Work:
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


class _Kernel(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in the place of a device's kernel: runs the call after all other modes."""

    def __init__(self, run: Callable[..., dist.Work]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: dist.Work | None = None
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fake_mode_active() or self.work is not None or func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        if types:
            return NotImplemented  # a tensor subclass unwraps itself, and calls the operator again
        self.work = self._run(*args)
        return operator_results(func, args, self.work)


class _NamedGroup(_ProcessGroup):  # type: ignore[misc]
    """A group's store and names. Those that c10d sets reach ``others`` too.

    It is also the backend of its devices that c10d asks for what it supports.
    """

    supports_coalescing = supports_shrinking = supports_splitting = supports_time_estimate = False
    # Since torch 2.15.
    supports_reconfigure, supports_window = True, False

    def __init__(self, store: dist.Store, rank: int, size: int, others: Any) -> None:
        super().__init__(rank, size)
        self._store = store
        self._name = self._desc = ""
        self._set_others(_ProcessGroup(store, rank, size) if others is None else others)

    def _set_others(self, others: Any) -> None:
        self._others: Any = others
        if self._name:
            others._set_group_name(self._name)
            others._set_group_desc(self._desc)

    def name(self) -> str:
        return "sml"

    getBackendName = name  # noqa: N815 - c10d calls it

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: ranks are connected once the group exists."""

    def setGroupName(self, name: str) -> None:
        self._name = name
        self._others._set_group_name(name)

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc
        self._others._set_group_desc(desc)

    def getGroupDesc(self) -> str:
        return self._desc

    def get_group_store(self) -> dist.Store:
        return self._store


class SmlGroup(_NamedGroup):
    """Ranks that communicate over one data plane, for the devices whose backend is ``sml``.

    Args:
        plane: the group owns it and closes it.
        store: the group's own.
        timeout_s: for calls that give none.
        processes: of the ranks, by global rank; kept while the group is in use.
        devices: the device types of ``sml`` in this group.
        others: a plain group of the same ranks that holds the backends of all other device types;
            c10d's names reach it too.
        new_member: makes what this rank is in groups that it forms with :meth:`reconfigure`.

    Attributes:
        host: the collectives of CPU tensors; None if another backend has them.
    """

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
    ) -> None:
        super().__init__(store, rank, size, others)
        self._devices = frozenset(devices)
        self._run_on(plane, rank, size, timeout_s)
        name_backend(self, "sml")
        self.processes = processes
        self.is_closed = False
        self._new_member = new_member
        self._member: Member | None = None
        self._changing = threading.Lock()
        route_group_operators(SmlGroup)
        LIVING.add(self)

    def _run_on(self, plane: Plane, rank: int, size: int, timeout_s: float) -> None:
        self._on = Collectives(plane, rank, size, timeout_s)
        self.host = self._on if "cpu" in self._devices else None

    def getRank(self) -> int:
        return self._on.rank

    def getSize(self) -> int:
        return self._on.size

    rank, size = getRank, getSize

    def set_timeout(self, timeout: timedelta) -> None:
        self._on.timeout_s = timeout.total_seconds()
        self._others.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self._on.count

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the count starts at 0 on every rank."""

    def register_pre_hook(self, hook_id: int, hook: object) -> None:
        raise UnsupportedError(
            "sml: torch runs hooks in its own operators, which the collectives of sml bypass; "
            "to see them, use torch.profiler or torchrelay.aggregation.stats()"
        )

    register_post_hook = register_pre_hook

    @property
    def timeout_s(self) -> float:
        return self._on.timeout_s

    def stats(self) -> PlaneStats:
        return self._on.plane.stats()

    @property
    def _device_types(self) -> list[torch.device]:
        return [*map(torch.device, sorted(self._devices)), *self._others._device_types]

    def _get_backend(self, device: torch.device | str) -> Any:
        """Return the backend for tensors on ``device``. Raises RuntimeError, as c10d does, if there
        is none.
        """
        if torch.device(device).type in self._devices:
            return TimeoutOnly(self.set_timeout) if is_setting_timeout() else self
        return self._others._get_backend(torch.device(device))

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type in self._devices:
            self._on.pending.start_coalescing()
        else:
            self._others._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type in self._devices:
            return self._on.pending.end_coalescing()
        return self._others._end_coalescing(device)

    # C++ calls these since torch 2.15.
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # --- other members, and the end

    @property
    def member(self) -> Member:
        """What this rank is in groups that it forms with :meth:`reconfigure`."""
        if self._others._device_types:
            raise UnsupportedError(
                "sml: a group with other backends cannot be reconfigured, because those cannot: "
                f"this one has one for {self._others._device_types}"
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
            self._set_others(_ProcessGroup(self._store, formed.rank, formed.size))
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
            self._others.shutdown()
            if self._member is not None:
                self._member.close()

    # --- common to all

    def _call(
        self, method: str, run: Callable[..., dist.Work], tensors: tuple[Any, ...], *rest: Any
    ) -> dist.Work:
        """Run a call on the backend of its tensors' device.

        ``method`` is c10d's name for it, ``rest`` all arguments but the tensors.
        """
        tensor = calls.first_tensor(tensors)
        if tensor is not None and tensor.device.type not in self._devices:
            if torch.device(tensor.device.type) not in self._others._device_types:
                raise ArgumentError(
                    f"{method}: this group has no backend for a tensor on {tensor.device}, only "
                    f"for {', '.join(device.type for device in self._device_types)}"
                )
            work: dist.Work = getattr(self._others, method)(*tensors, *rest)
            return work
        if watched() or (tensor is not None and dispatches_itself(tensor)):
            return self._call_operator(method, run, tensors, *rest)
        return run(*tensors, *rest)

    def _call_operator(
        self, method: str, run: Callable[..., dist.Work], tensors: tuple[Any, ...], *rest: Any
    ) -> dist.Work:
        """Run a call as one of c10d's operators, so that profilers and dispatch modes see it: a
        plain group's method calls the operator, whose arguments begin with the tensors too.
        """

        def run_now(*arguments: Any) -> dist.Work:
            with span(f"sml:{run.__name__}"):
                return run(*arguments[: len(tensors)], *rest)

        kernel = _Kernel(run_now)
        with lowest_mode(kernel):
            work: dist.Work = getattr(self._others, method)(*tensors, *rest)
        return work if kernel.work is None else kernel.work

    # --- collectives; _METHODS has more

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> dist.Work:
        if type(opts) is not _AllreduceOptions:
            (tensors,) = calls.as_lists((tensors,))
            opts = calls.options_of(_AllreduceOptions, (opts, op, timeout))
        if (
            self.host is not None
            and len(tensors) == 1
            and not getattr(opts, "asyncOp", True)
            and opts.reduceOp == _SUM
            and not watched()
        ):
            work = self.host.sum_now(tensors[0], tensors[0], opts.timeout)
            if work is not None:
                return work
        return self._call("allreduce", self._on.all_reduce, (tensors,), opts)

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
        if opts.device is not None and opts.device.type not in self._devices:
            work: dist.Work = self._others.barrier(opts)
            return work
        if watched():
            opts.device = torch.device("cpu")  # the operator takes a tensor of this device
            return self._call_operator("barrier", self._on.barrier, (), opts)
        return self._on.barrier(opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Run a barrier whose error names every missing rank, whatever ``wait_all_ranks`` is."""
        self.barrier(timeout=timeout).wait()

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        return self._call("send", self._on.send, (tensors,), to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        return self._call("recv", self._on.receive, (tensors,), source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._call("recv_anysource", self._on.receive_from_any, (tensors,), tag)


# c10d's name, the collective, its options, the number of its arguments that are tensors.
_METHODS = (
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
_NEW_NAMES = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
}

for _name, *_rest in _METHODS:
    setattr(SmlGroup, _name, _method(_name, *_rest))
for _name, _former in _NEW_NAMES.items():
    setattr(SmlGroup, _name, getattr(SmlGroup, _former))
