"""The group for torch before 2.14, where Python can make no Backend.

It is a ProcessGroup that runs every call itself: by c10d's operators if a profiler or a mode must
see it, else directly. What the operators and C++ call of a group reaches it by ``_route``. Backends
of other devices are in a plain group beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay._torch import (
    TimeoutOnly,
    dispatches_itself,
    fake_mode_active,
    group_operators_router,
    is_setting_timeout,
    lowest_mode,
    operator_results,
    span,
    watched,
)
from torchrelay.aggregation import _calls as calls
from torchrelay.aggregation._core import Core
from torchrelay.errors import ArgumentError

__all__ = ["SmlGroup"]

_AllreduceOptions = dist.AllreduceOptions
_ProcessGroup: Any = dist.ProcessGroup
_route = group_operators_router()  # an import, for which descriptors may be scarce later


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


class SmlGroup(Core, _ProcessGroup):  # type: ignore[misc]
    """Ranks that communicate over one data plane, for the devices whose backend is ``sml``.

    It is also the backend of its devices that c10d asks for what it supports.
    """

    supports_shrinking = supports_splitting = False

    def __init__(self, plane: Any, store: dist.Store, rank: int, size: int, *rest: Any) -> None:
        _ProcessGroup.__init__(self, rank, size)
        self._name = self._desc = ""
        super().__init__(plane, store, rank, size, *rest)
        _route(SmlGroup)

    core = property(lambda self: self)

    # --- names; those that c10d sets reach the other backends too

    def _set_others(self, others: Any) -> None:
        super()._set_others(others)
        self.setGroupName(self._name)
        self.setGroupDesc(self._desc)

    def setGroupName(self, name: str) -> None:
        self._name = name
        self.others._set_group_name(name)

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc
        self.others._set_group_desc(desc)

    def getGroupDesc(self) -> str:
        return self._desc

    def get_group_store(self) -> dist.Store:
        return self.store

    # --- the backends of devices

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: ranks are connected once the group exists."""

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self.others.set_timeout(timeout)

    def shutdown(self) -> None:
        if not self.is_closed:
            super().shutdown()
            self.others.shutdown()

    @property
    def _device_types(self) -> list[torch.device]:
        return [*map(torch.device, sorted(self.devices)), *self.others._device_types]

    def _get_backend(self, device: torch.device | str) -> Any:
        """Return the backend for tensors on ``device``. Raises RuntimeError, as c10d does, if there
        is none.
        """
        if torch.device(device).type in self.devices:
            return TimeoutOnly(self.set_timeout) if is_setting_timeout() else self
        return self.others._get_backend(torch.device(device))

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type in self.devices:
            self.start_coalescing()
        else:
            self.others._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type in self.devices:
            return self.end_coalescing()
        return self.others._end_coalescing(device)

    # --- calls

    def allreduce(self, *arguments: Any, **named: Any) -> dist.Work:
        if len(arguments) == 2 and type(arguments[1]) is _AllreduceOptions:
            work = self.short_sum(*arguments)
            if work is not None:
                return work
        return super().allreduce(*arguments, **named)  # type: ignore[no-any-return]

    def _call(
        self, method: str, run: Callable[..., dist.Work], tensors: tuple[Any, ...], *rest: Any
    ) -> dist.Work:
        tensor = calls.first_tensor(tensors)
        if tensor is not None and tensor.device.type not in self.devices:
            if torch.device(tensor.device.type) not in self.others._device_types:
                raise ArgumentError(
                    f"{method}: this group has no backend for a tensor on {tensor.device}, only "
                    f"for {', '.join(device.type for device in self._device_types)}"
                )
            return cast("dist.Work", getattr(self.others, method)(*tensors, *rest))
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
            work: dist.Work = getattr(self.others, method)(*tensors, *rest)
        return work if kernel.work is None else kernel.work

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        device = getattr(opts, "device", None)
        if device is not None and device.type not in self.devices:
            return cast("dist.Work", self.others.barrier(opts))
        if device is not None and watched():
            opts.device = torch.device("cpu")  # the operator takes a tensor of this device
        return super().barrier(opts, timeout)
