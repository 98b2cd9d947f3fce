"""PipeSwitch's six functions over :class:`torchrelay.switching.SharedCache`.

``torchrelay.compat.install("pipeswitch")`` puts them on `torch.cuda`, where PipeSwitch's patch had
them. As there, they take no arguments, and a process has one shared cache. Sizes, device and
address come from the settings ``TORCHRELAY_SWITCHING_DEVICE``,
``TORCHRELAY_SWITCHING_ARENA_BYTES`` and ``TORCHRELAY_PIPESWITCH_*``.

Unlike the patch, this does not change torch's allocator: the two insert functions return a
:class:`~torchrelay.switching.Region`, into which ``region.put(model)`` places a model.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from torchrelay import config
from torchrelay.errors import ArgumentError
from torchrelay.switching import Region, SharedCache

__all__ = [
    "allocate_shared_cache",
    "clear_shared_cache",
    "insert_shared_cache_for_computation",
    "insert_shared_cache_for_parameter",
    "install_functions",
    "recv_shared_cache",
    "send_shared_cache",
]


class _Process:
    """The shared cache of this process."""

    cache: SharedCache | None = None


def allocate_shared_cache() -> SharedCache:
    """Allocate this process's shared cache: of the setting ``arena_bytes``, on ``device``.

    Raises:
        ArgumentError: this process has one already.
    """
    _check_none()
    settings = config.load(config.Switching)
    _Process.cache = SharedCache.allocate(settings.arena_bytes, settings.device)
    return _Process.cache


def send_shared_cache() -> None:
    """Send the cache to one process that calls :func:`recv_shared_cache`; blocks until it has
    it.
    """
    _cache("send").send(_address(), timeout_s=config.load(config.PipeSwitch).timeout_s)


def recv_shared_cache() -> SharedCache:
    """Map the cache that another process sends; blocks until it does."""
    _check_none()
    timeout_s = config.load(config.PipeSwitch).timeout_s
    _Process.cache = SharedCache.recv(_address(), timeout_s=timeout_s)
    return _Process.cache


def insert_shared_cache_for_parameter() -> Region:
    """Use the start of the cache for parameters; its size is the setting ``parameter_bytes``."""
    cache = _cache("insert")
    return cache.insert_for_parameter(_parameter_bytes(cache))


def insert_shared_cache_for_computation() -> Region:
    """Use the rest of the cache, behind the parameters, for intermediate results."""
    cache = _cache("insert")
    start = _parameter_bytes(cache)
    return cache.insert_for_computation(cache.size_bytes - start, start)


def clear_shared_cache() -> None:
    """Forget the regions, so that the next model can be inserted. The cache itself stays."""
    _cache("clear").clear()


def install_functions() -> None:
    """Put the six functions on `torch.cuda`.

    Raises:
        ArgumentError: torch.cuda has other functions of these names: a torch that PipeSwitch
            patched.
    """
    for name in __all__:
        if name.endswith("shared_cache") or "_shared_cache_for_" in name:
            ours = globals()[name]
            if getattr(torch.cuda, name, ours) is not ours:
                raise ArgumentError(f"torch.cuda.{name} exists already; is this torch patched?")
            setattr(torch.cuda, name, ours)


def _cache(verb: str) -> SharedCache:
    if _Process.cache is None:
        raise ArgumentError(
            f"no shared cache to {verb}: call allocate_shared_cache() or recv_shared_cache() first"
        )
    return _Process.cache


def _check_none() -> None:
    if _Process.cache is not None:
        raise ArgumentError(
            f"this process has a shared cache of {_Process.cache.size_bytes} bytes already; it can "
            "have one"
        )


def _parameter_bytes(cache: SharedCache) -> int:
    """Return the setting, or a quarter of a cache that is too small for it; whole granules of 512
    bytes.
    """
    wanted = config.load(config.PipeSwitch).parameter_bytes
    return wanted if wanted < cache.size_bytes else cache.size_bytes // 4 // 512 * 512


def _address() -> Path:
    configured = config.load(config.PipeSwitch).socket
    if configured:
        return Path(configured)
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder) / f"torchrelay-pipeswitch-{os.geteuid()}.sock"
