"""Runs a call as one of c10d's operators, so that profilers and dispatch modes see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay._torch import fake_mode_active, lowest_mode, operator_results, span

__all__ = ["through_dispatcher"]


class _Kernel(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in the place of a device's kernel: runs the call after all other modes."""

    def __init__(
        self, name: str, run: Callable[..., dist.Work], tensors: int, rest: tuple[Any, ...]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: dist.Work | None = None
        self._name = name
        self._run = run
        self._tensors = tensors
        self._rest = rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fake_mode_active() or self.work is not None or func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        if types:
            return NotImplemented  # a tensor subclass unwraps itself, and calls the operator again
        with span(self._name):
            self.work = self._run(*args[: self._tensors], *self._rest)
        return operator_results(func, args, self.work)


def through_dispatcher(
    group: dist.ProcessGroup,
    method: str,
    run: Callable[..., dist.Work],
    tensors: tuple[Any, ...],
    *rest: Any,
) -> dist.Work:
    """Return ``run(*tensors, *rest)``, called through c10d's operator for ``method``.

    Args:
        group: a plain ProcessGroup; its C++ methods call the operators.
        tensors: come first in the method's and in the operator's arguments.
    """
    kernel = _Kernel(f"sml:{run.__name__}", run, len(tensors), rest)
    with lowest_mode(kernel):
        work = getattr(group, method)(*tensors, *rest)
    return work if kernel.work is None else kernel.work
