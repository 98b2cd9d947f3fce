"""What this installation and this system have: the native core, and calls that only some systems
have.

Components ask here for a capability, never for the name of a system. Each is looked for by itself,
so a sandbox that denies a call is like a system that lacks it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import importlib.util
import mmap
import os
import resource
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from torchrelay.errors import UnsupportedError

__all__ = [
    "CAPABILITIES",
    "CLOSE_RECEIVED",
    "Capability",
    "anonymous_file",
    "boot_id",
    "exchange",
    "flush",
    "has_core",
    "initial_environment",
    "loopback",
    "need_core",
    "path_inside",
    "peak_memory_bytes",
    "populate",
    "seconds_since_boot",
    "socket_pair",
    "start_writeback",
    "usable_cores",
    "user_at_other_end",
]

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2
_MADV_POPULATE_READ = 22
_ZEROS = bytes(1 << 20)
_PEER_CREDENTIALS = int(getattr(socket, "SO_PEERCRED", 0))  # of Linux
_UCRED = struct.Struct("3i")  # pid, user, group

_writes_back = hasattr(_libc, "sync_file_range")
_reads_mapped = hasattr(mmap, "MADV_DONTFORK")  # of Linux, as the advice by number is

_found = importlib.util.find_spec("torchrelay._native")
has_core = _found is not None and not str(_found.origin).endswith(".py")
"""Whether the native core is installed; where it is not, ``_native.py`` is imported instead."""


_CORE_REMEDY = (
    "on Linux, install a wheel that was built for this machine, or run 'pip install .' in a clone; "
    "elsewhere, use a Linux container or virtual machine"
)


def need_core(what: str, instead: str = "") -> None:
    """Refuse ``what`` where there is no native core.

    Args:
        instead: another remedy.

    Raises:
        UnsupportedError: there is none.
    """
    if not has_core:
        raise UnsupportedError(
            f"{what} needs TorchRelay's native core, which this pure-Python installation lacks: "
            f"{_CORE_REMEDY}{instead and f'; or {instead}'}"
        )


def usable_cores() -> int:
    """Return how many cores this process may use; those of the machine if that is not known."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def boot_id() -> str:
    """Return what the kernel draws at each boot.

    Raises:
        OSError: it is not known.
    """
    if hasattr(_libc, "sysctlbyname"):
        text = ctypes.create_string_buffer(64)
        size = ctypes.c_size_t(len(text))
        if not _libc.sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, 0):
            return text.value.decode()
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def initial_environment() -> list[bytes]:
    """Return the variables that this process was started with; none if they are not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/environ").read_bytes().split(b"\0")
    return []


def loopback() -> str:
    """Return the name of the loopback device."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def seconds_since_boot() -> float:
    """Return the time of a clock that also runs while the machine is suspended."""
    return time.clock_gettime(int(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)))


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10  # the unit is the system's


class _Exchange(NamedTuple):
    """A function that exchanges two paths in one step, and its arguments."""

    name: str
    here: int  # AT_FDCWD: paths are relative to the current directory
    flags: int


_EXCHANGES = (_Exchange("renameat2", -100, 2), _Exchange("renameatx_np", -2, 2))
_exchange = next((one for one in _EXCHANGES if hasattr(_libc, one.name)), None)


def exchange(one: bytes, other: bytes) -> None:
    """Give each of two existing paths the name of the other, in one step.

    Raises:
        OSError: the system or the file system cannot (ENOSYS, EINVAL, ENOTSUP), or another error.
    """
    if _exchange is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    here = _exchange.here
    if getattr(_libc, _exchange.name)(here, one, here, other, _exchange.flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def flush(fd: int) -> None:
    """Return once a file or folder is on the disk, also where fsync leaves it in the disk's
    cache.
    """
    with contextlib.suppress(AttributeError, OSError):  # not of every file system
        fcntl.fcntl(fd, getattr(fcntl, "F_FULLFSYNC"))  # noqa: B009 - not of every system
        return
    os.fsync(fd)


def start_writeback(fd: int, offset: int, size_bytes: int) -> None:
    """Ask the kernel to start writing a range to the disk, so that :func:`flush` waits less."""
    if _writes_back:
        _libc.sync_file_range(
            fd, ctypes.c_int64(offset), ctypes.c_int64(size_bytes), _SYNC_FILE_RANGE_WRITE
        )


def populate(mapped: mmap.mmap) -> bool:
    """Read all pages of a mapped file; False if the kernel cannot report an error of the disk other
    than by SIGBUS.
    """
    if not _reads_mapped:
        return False
    try:
        mapped.madvise(_MADV_POPULATE_READ)
    except OSError:  # also of kernels before 5.14
        return False
    return True


def anonymous_file(label: str, size_bytes: int = 0) -> int:
    """Return the descriptor of a new file of zeros without a name: in memory if possible, else in
    TMPDIR, and there with all its space.

    Raises:
        OSError: there is no space, or no descriptor is left.
    """
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(PermissionError):  # a sandbox denies it
            fd: int = os.memfd_create(label)
            os.ftruncate(fd, size_bytes)
            return fd
    with tempfile.TemporaryFile(prefix=f"{label}-", buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            if size_bytes:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        else:
            while (left := size_bytes - file.tell()) > 0:
                file.write(_ZEROS[:left])
        return os.dup(file.fileno())


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return connected Unix sockets that keep messages apart or, where there are none, streams."""
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def path_inside(folder: int, name: str) -> str:
    """Return a short path of a file in an open folder, for a socket: the kernel takes 108 bytes."""
    return f"/proc/self/fd/{folder}/{name}"


def user_at_other_end(connection: socket.socket) -> int:
    """Return the user of the process that a Unix socket is connected to, as the kernel knows it."""
    found = connection.getsockopt(socket.SOL_SOCKET, _PEER_CREDENTIALS, _UCRED.size)
    _, user, _ = _UCRED.unpack(found)
    return int(user)


CLOSE_RECEIVED = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
"""Flag of recvmsg by which programs started later do not inherit received descriptors."""


class Capability(NamedTuple):
    """Something that this installation or system may lack.

    Attributes:
        name: what it is.
        is_present: whether it is here.
        without: what is different where it is missing.
        remedy: how to get it.
    """

    name: str
    is_present: bool
    without: str
    remedy: str = ""


def _has_boot_id() -> bool:
    try:
        return bool(boot_id())
    except OSError:
        return False


CAPABILITIES = (
    Capability(
        "native core",
        has_core,
        "`sml`, tables, `switching`, the switch, and `mpi` over process groups are refused",
        _CORE_REMEDY,
    ),
    Capability(
        "exchange of two folders",
        _exchange is not None,
        "a save to the path of a checkpoint is refused; save under another name",
    ),
    Capability(
        "files in memory",
        hasattr(os, "memfd_create"),
        "asynchronous saves stage in an unlinked file in `TMPDIR`, which needs the space",
    ),
    Capability(
        "identity of the boot",
        _has_boot_id(),
        "each rank verifies all blocks that it reads, also those that another rank has verified",
    ),
    Capability(
        "reading of mapped pages",
        _reads_mapped,
        "parts of rows are read through a buffer, with one more copy",
    ),
    Capability("early write-back", _writes_back, "the end of a save takes longer"),
    Capability(
        "cores of a process",
        hasattr(os, "sched_getaffinity"),
        "default numbers of threads count all cores of the machine",
    ),
)
