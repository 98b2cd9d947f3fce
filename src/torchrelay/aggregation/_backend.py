"""``sml`` for torch 2.14 and later, where Python can make a Backend.

The Backend is this rank's part in the group. The group is c10d's own but for three things, which
torch keeps from a Backend of Python: rank and size can change, calls return our Work, of which C++
passes on only two methods, and a blocking sum of one plain tensor takes the short path, because the
way through c10d's operators costs several times as much. All other calls go through the operators,
so hooks, recorders, profilers and modes see them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchrelay._torch import span, watched
from torchrelay.aggregation._core import METHODS, NEW_NAMES, Core
from torchrelay.errors import UnsupportedError

__all__ = ["SmlBackend", "SmlGroup"]

_Backend: Any = torch._C._distributed_c10d.Backend
_ProcessGroup: Any = dist.ProcessGroup
_KIND: Any = _ProcessGroup.BackendType.CUSTOM
_AllreduceOptions = dist.AllreduceOptions
# Variables by which users ask torch to look at each call. The flight recorder is on without them,
# and then does not see the sums that take the short path.
_ASKING = ("TORCH_DIST_NAN_CHECK", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_NO_OPTIONS = (
    "sml: a part of a group has its settings and its devices, and the group no other backends; "
    "use new_group(ranks, backend=..., pg_options=...)"
)


class _Issued(threading.local):
    """The Works that a backend made for the call of its group that this thread is in."""

    backend: SmlBackend | None = None
    works: list[dist.Work]


_issued = _Issued()


class SmlBackend(Core, _Backend):  # type: ignore[misc]
    """This rank's part in a group, as c10d's Backend of its devices."""

    supports_splitting = supports_shrinking = supports_abort_hooks = True
    _supports_time_estimate = False

    def __init__(self, plane: Any, store: dist.Store, rank: int, size: int, *rest: Any) -> None:
        _Backend.__init__(self, rank, size)
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        super().__init__(plane, store, rank, size, *rest)

    @property
    def options(self) -> Any:
        return _Backend.Options("sml", timedelta(seconds=self.timeout_s))

    def _call(
        self, method: str, run: Callable[..., dist.Work], tensors: tuple[Any, ...], *rest: Any
    ) -> dist.Work:
        try:
            with span(f"sml:{run.__name__}"):
                return self._issue(run(*tensors, *rest))
        except BaseException:
            self.report_failure()
            raise

    def allreduce_sparse(self, tensors: Any, opts: Any) -> dist.Work:
        return self._call("allreduce_sparse", self._on.all_reduce, (tensors,), opts)

    def end_coalescing(self, device: torch.device | None = None) -> Any:
        return self._issue(super().end_coalescing())

    def _issue(self, work: Any) -> dist.Work:
        if _issued.backend is self:
            _issued.works.append(work)
        if self._abort_hooks and work.in_progress:
            work.get_future().add_done_callback(lambda _: self.report_failure())
        return work  # type: ignore[no-any-return]

    # --- hooks

    def report_failure(self) -> None:
        """Run the abort hooks if the group has failed."""
        if self._abort_hooks and self._on.plane.failure is not None:
            for hook in list(self._abort_hooks.values()):
                hook()

    def registerAbortHook(self, hook_id: int, hook: Callable[[], None]) -> None:
        self._abort_hooks[hook_id] = hook

    def unregisterAbortHook(self, hook_id: int) -> None:
        self._abort_hooks.pop(hook_id, None)

    def _register_on_completion_hook(self, hook: object) -> None:
        raise UnsupportedError(
            "sml: torch lets no backend in Python make the WorkInfo that a completion hook gets; "
            "use register_post_hook, or the future of a Work"
        )

    # --- groups of some of the ranks

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: only the ranks of a new group meet."""

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: object = None
    ) -> SmlBackend:
        """Return the backend of all other ranks; called by c10d on those."""
        if opts_override is not None:
            raise UnsupportedError(_NO_OPTIONS)
        ranks = [rank for rank in range(self.size()) if rank not in ranks_to_exclude]
        if shrink_flags & dist.distributed_c10d.SHRINK_ABORT:
            self.abort()
        store = dist.PrefixStore(f"without/{sorted(ranks_to_exclude)}", self.store)
        backend: SmlBackend = self.split_off(self, ranks, store, self.timeout_s)
        backend.supports_splitting = False  # its group is c10d's, which calls split on all ranks
        return backend


class _Issuing:
    """A call of a group, which gets the Works that the backend makes for it."""

    def __init__(self, backend: SmlBackend) -> None:
        self._outer = _issued.__dict__.copy()  # another call's, where a hook makes this one
        _issued.backend, _issued.works = backend, []

    def __enter__(self) -> list[dist.Work]:
        return _issued.works

    def __exit__(self, *error: object) -> None:
        _issued.backend = None
        _issued.__dict__.update(self._outer)


def _method(name: str) -> Callable[..., dist.Work]:
    """Return c10d's method ``name``, which returns our Work instead of torch's around it. Where
    torch has no operator for the tensors, such as several sparse ones, the backend runs the call.
    """
    run = getattr(_ProcessGroup, name)

    def call(self: SmlGroup, *arguments: Any, **named: Any) -> dist.Work:
        try:
            with _Issuing(self.core) as works:
                made: dist.Work = run(self, *arguments, **named)
        except NotImplementedError as error:
            if type(error) is not NotImplementedError or watched():
                raise
            made = getattr(self.core, name)(*arguments, **named)
        return works[0] if works else made

    # By this name C++ knows that it is called by the method that overrides its own.
    call.__code__ = call.__code__.replace(co_name=name)
    return call


_allreduce = _method("allreduce")


class SmlGroup(_ProcessGroup):  # type: ignore[misc]
    """Ranks that communicate over one data plane, for the devices whose backend is ``sml``.

    Args:
        core: this rank's part.
        backend: the same, or what compares the ranks' calls before it.
    """

    supports_abort_hooks = True

    def __init__(self, core: SmlBackend, backend: Any) -> None:
        _ProcessGroup.__init__(self, core.store, core.rank(), core.size())
        self.core = core
        core.is_compared = backend is not core
        for name in sorted(core.devices):
            self._register_backend(torch.device(name), _KIND, backend)
        for device in core.others._device_types:
            other = core.others._get_backend(device)
            kind = dist.Backend.backend_type_map.get(other.name().lower(), _KIND)
            if kind == _KIND:
                raise UnsupportedError(
                    f"sml: a group of torch holds one backend that torch does not have itself, so "
                    f"it cannot have {other.name()} beside sml"
                )
            self._register_backend(device, kind, other)
        self._set_default_backend(_KIND)
        self._is_observed = core.is_compared or any(
            os.environ.get(name, "0") not in ("", "0") for name in _ASKING
        )

    def getBackendName(self) -> str:
        return "sml"

    def getRank(self) -> int:
        return self.core.rank()

    def getSize(self) -> int:
        return self.core.size()

    rank, size = getRank, getSize

    def __getattr__(self, name: str) -> Any:
        """Return what the group has before torch 2.14: its part of the work is in ``core``."""
        if name == "core":
            raise AttributeError(name)
        return getattr(self.core, name)

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        self._is_observed = True
        _ProcessGroup.register_pre_hook(self, hook_id, hook)

    def register_post_hook(self, hook_id: int, hook: Any) -> None:
        self._is_observed = True
        _ProcessGroup.register_post_hook(self, hook_id, hook)

    def allreduce(self, *arguments: Any, **named: Any) -> dist.Work:
        if (
            not self._is_observed
            and len(arguments) == 2
            and type(arguments[1]) is _AllreduceOptions
        ):
            try:
                work = self.core.short_sum(*arguments)
            except BaseException:
                self.core.report_failure()
                raise
            if work is not None:
                return work
        return _allreduce(self, *arguments, **named)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> SmlGroup | None:
        """Return a group of these ranks of this one, with the same settings; None on others."""
        devices = {device.type for device in device_types or self._device_types}
        if opts is not None or devices != self.core.devices or self.core.others._device_types:
            raise UnsupportedError(_NO_OPTIONS)
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}:split:{new_ranks}"
        timeout_s = self.core.timeout_s if timeout is None else timeout.total_seconds()
        store = dist.PrefixStore(f"{name}/", self.core.store)
        core = self.core.split_off(self.core, new_ranks, store, timeout_s)
        group = SmlGroup(core, core)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group


# Those of torch 2.13 on; it passes the former names on to them.
_NAMES = {name for name, *_ in METHODS} - {"allreduce", *NEW_NAMES.values()} | NEW_NAMES.keys()
_OTHERS = ("all_to_all_single", "barrier", "send", "recv", "recv_anysource", "_end_coalescing")
for _name in (*_NAMES, *_OTHERS):
    setattr(SmlGroup, _name, _method(_name))
