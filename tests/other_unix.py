"""Makes Python like that of another Unix, as far as torchrelay can notice: what only Linux has is
missing, and what macOS has instead is there.

The environment of ``.ci/pure`` imports it when Python starts, also in processes that tests start.
Python, torch and the tests themselves go on as before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import signal
import socket
import sys
import time
from types import FrameType, ModuleType
from typing import Any

_MODULES = (mmap, os, select, signal, socket, time)
_ATTRIBUTES = (
    " CLOCK_BOOTTIME MADV_DONTFORK MADV_HUGEPAGE MADV_POPULATE_READ MFD_CLOEXEC MSG_CMSG_CLOEXEC "
    "O_DIRECT O_PATH O_TMPFILE SO_PASSCRED SO_PEERCRED copy_file_range epoll eventfd fdatasync "
    "memfd_create pidfd_open pidfd_send_signal pipe2 posix_fadvise posix_fallocate "
    "sched_getaffinity sched_setaffinity setns sigtimedwait sigwaitinfo splice unshare "
)
_CALLS = " eventfd fallocate memfd_create posix_fadvise prctl renameat2 sync_file_range unshare "
_FOLDERS = ("/proc", "/sys", "/dev/shm")
_LIBRARY = os.path.dirname(os.__file__)
_PACKAGE = f"site-packages{os.sep}torchrelay{os.sep}"

_libc = ctypes.CDLL(None, use_errno=True)
_find = ctypes.CDLL.__getattr__
_stat, _socketpair = os.stat, socket.socketpair


class _Module(ModuleType):
    """A module that lacks what only Linux has, for torchrelay."""

    def __getattribute__(self, name: str) -> Any:
        if f" {name} " in _ATTRIBUTES and _PACKAGE in sys._getframe(1).f_code.co_filename:
            raise AttributeError(f"only Linux has {name}")
        return super().__getattribute__(name)


def _is_of_torchrelay(frame: FrameType | None) -> bool:
    """Return whether torchrelay called, also through the standard library."""
    while frame is not None:
        name = frame.f_code.co_filename
        is_library = name.startswith((_LIBRARY, "<frozen")) and "site-packages" not in name
        if not is_library and name != __file__:
            return _PACKAGE in name
        frame = frame.f_back
    return False


def _check_path(path: object) -> None:
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    if text.startswith(_FOLDERS) and _is_of_torchrelay(sys._getframe()):
        raise FileNotFoundError(errno.ENOENT, "only Linux has it", text)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        _check_path(arguments[0])
    elif event in ("socket.bind", "socket.connect"):
        address = arguments[1]
        is_abstract = isinstance(address, (str, bytes)) and address[:1] in ("\0", b"\0")
        if is_abstract and _is_of_torchrelay(sys._getframe()):
            raise OSError(errno.EINVAL, "only Linux has abstract sockets")


def _checked_stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
    _check_path(path)
    return _stat(path, *args, **kwargs)


def _renameatx_np(here: int, one: bytes, there: int, other: bytes, flags: int) -> int:
    assert (here, there, flags) == (-2, -2, 2)
    result: int = _find(_libc, "renameat2")(-100, one, -100, other, 2)
    return result


def _sysctlbyname(name: bytes, into: Any, size: Any, new: None, new_size: int) -> int:
    assert name == b"kern.bootsessionuuid" and (new, new_size) == (None, 0)
    into.value = b"FEE1DEAD-0000-4000-8000-0123456789AB"
    return 0


_OF_MACOS = {"renameatx_np": _renameatx_np, "sysctlbyname": _sysctlbyname}


def _called(library: ctypes.CDLL, name: str) -> Any:
    if _is_of_torchrelay(sys._getframe()):
        if name in _OF_MACOS:
            return _OF_MACOS[name]
        if f" {name} " in _CALLS:
            raise AttributeError(f"only Linux has {name}")
    return _find(library, name)


def _connected(family: int = socket.AF_UNIX, kind: int = socket.SOCK_STREAM, *rest: int) -> Any:
    if kind == socket.SOCK_SEQPACKET and _is_of_torchrelay(sys._getframe()):
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
    return _socketpair(family, kind, *rest)


for _module in _MODULES:
    _module.__class__ = _Module
ctypes.CDLL.__getattr__ = _called  # type: ignore[method-assign]
socket.socketpair = _connected  # type: ignore[assignment]
for _known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
    if _stat in _known:
        _known.add(_checked_stat)
os.stat = _checked_stat
sys.addaudithook(_audit)
# An editable install of this checkout would be found before the wheel.
sys.meta_path[:] = [
    one for one in sys.meta_path if not type(one).__module__.startswith("_editable_")
]
