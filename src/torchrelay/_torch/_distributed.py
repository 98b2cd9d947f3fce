"""``torch.distributed``: process groups, their backends and stores; DDP and FSDP."""

from __future__ import annotations

import datetime
import functools
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchrelay._torch._callers import frame_of
from torchrelay.errors import UnsupportedError

__all__ = [
    "TimeoutOnly",
    "backends_asked",
    "backends_of_init",
    "callback_error",
    "compared_backend",
    "find_torchdistx",
    "group_named",
    "group_operators_router",
    "group_store",
    "has_fsdp2",
    "has_python_backends",
    "premul_factor",
    "private_nccl",
    "store_host",
    "tensor_list_future",
]


def callback_error(error: RuntimeError) -> tuple[str, str] | None:
    """Return type name and message of the exception of a future's callback.

    None if ``error`` wraps none. DistributedDataParallel waits in C++, which keeps only the text.
    """
    wrapped = r"when running the callback: (?:[\w.]+\.)?(\w+): (.*?)\s*(?:\n\nAt:|$)"
    found = re.search(wrapped, str(error), re.DOTALL)
    return (found[1], found[2]) if found else None


def find_torchdistx() -> None:
    """Let FSDP1 find ``torchdistx`` if there was none when it was imported."""
    fsdp1: Any = sys.modules.get("torch.distributed.fsdp._init_utils")
    if fsdp1 is None or fsdp1._TORCHDISTX_AVAIL:
        return
    for name in ("deferred_init", "fake"):
        setattr(fsdp1, name, importlib.import_module(f"torchdistx.{name}"))
    fsdp1._TORCHDISTX_AVAIL = True


def has_fsdp2(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to ``module`` or to a part of it."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    return any(isinstance(one, FSDPModule) for one in module.modules())


def backends_asked() -> tuple[dict[str, str], Any] | None:
    """Return the backends of the group that c10d is making, if it is the caller's caller, or calls
    that: by device type, in c10d's order; and the plain ProcessGroup that has those made so far.

    Raises:
        UnsupportedError: this torch creates groups in an unknown way.
    """
    frame = frame_of(("new_group",), 2, 2)
    if frame is None:
        return None
    try:
        backends = frame.f_locals["backend_config"].get_device_backend_map()
        return dict(backends), frame.f_locals["pg"]
    except KeyError as error:
        raise UnsupportedError(
            f"torch {torch.__version__} makes process groups in an unknown way"
        ) from error


def backends_of_init() -> list[str]:
    """Return the backends in the string given to the ``init_process_group`` that runs."""
    frame = frame_of(("init",), 2, sys.getrecursionlimit())
    return [] if frame is None else re.split("[:,]", str(frame.f_locals["backend"]))


def group_store(group: Any) -> Any:
    """Return the store over which a process group was made."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    return distributed_c10d._get_process_group_store(group)


def store_host(store: Any) -> str | None:
    """Return the host that serves ``store``, if it is a TCP store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def group_operators_router() -> Callable[[Any], object]:
    """Return the function that lets torch's C++ code reach the methods of all groups of a kind."""
    # Importing it imports torch.distributed.
    from torchrelay._torch._group_operators import route  # noqa: PLC0415

    return route


@functools.cache
def _futures() -> Any:
    return torch.jit.CompilationUnit("""
def result(done: Future[Tensor], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def later(done: Future[Tensor], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(result, done, tensors)
""")


def tensor_list_future(done: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a future of ``tensors``, complete once the future ``done`` is, whose value C++ gets as
    a TensorList. The futures that Python makes give it a Python object.
    """
    return _futures().later(done, tensors)


class TimeoutOnly:
    """Stands for a backend where c10d sets a timeout, which it does for Gloo and NCCL only."""

    __class__ = property(lambda _: torch.distributed.ProcessGroupGloo)  # what isinstance asks

    def __init__(self, set_timeout: Callable[[datetime.timedelta], None]) -> None:
        self._set_default_timeout = set_timeout


def has_python_backends() -> bool:
    """Return whether Python can make a Backend: since torch 2.14."""
    return hasattr(torch._C._distributed_c10d, "FlightRecorderHook")


def compared_backend(backend: Any, given: Any) -> Any:
    """Return the backend of the group that c10d is making, wrapped as c10d does where
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: it compares the ranks' calls over a group of Gloo, which
    keeps its members. Collective then.
    """
    c10d: Any = torch.distributed.distributed_c10d
    if (
        torch.distributed.get_debug_level() != torch.distributed.DebugLevel.DETAIL
        or not torch.distributed.is_gloo_available()
        or getattr(given, "enable_reconfigure", False)
    ):
        return backend
    return c10d._create_process_group_wrapper(
        backend, given.group_id, given.store, given.group_rank, given.group_size, given.timeout
    )


def group_named(name: str) -> Any:
    """Return this process's group of that name, None if it has none."""
    c10d: Any = torch.distributed.distributed_c10d
    try:
        return c10d._resolve_process_group(name)
    except RuntimeError:
        return None


def premul_factor(op: Any) -> float:
    """Return the factor of a PREMUL_SUM; torch has an attribute for it only since 2.13."""
    return float(op.__getstate__()[1])


def private_nccl(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Return a backend of NCCL that belongs to no group of c10d. Collective over the ranks of
    ``store``.
    """
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=min(timeout_s, 1e9))  # as _waiting.duration
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
