"""The processes of a job: which share a host, and which have exited."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from torchrelay import config
from torchrelay._platform import boot_id, has_core, need_core, seconds_since_boot
from torchrelay.errors import UnavailableError

__all__ = ["Process", "closed_in_children", "host_identity", "remedy_of"]


class _Closes(Protocol):
    def close(self) -> object: ...


C = TypeVar("C", bound=_Closes)

# Equal for all ranks of one job. torchrun sets "none" without --rdzv-id.
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)


_REMEDIES = {
    errno.EADDRINUSE: "another socket has this port: end its process, or choose another port",
    errno.EADDRNOTAVAIL: "it is not an address of this host",
}

_closed_in_children: weakref.WeakSet[_Closes] = weakref.WeakSet()


def _close_in_child() -> None:
    for one in [*_closed_in_children]:
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


def closed_in_children(one: C) -> C:
    """Close ``one``, such as a socket, in each process that is forked from now on, such as a worker
    of a data loader: it must not hold a port, or what others watch to see the end of this process.
    """
    _closed_in_children.add(one)
    return one


def host_identity() -> str:
    """Return a string that is equal for processes that can attach each other's segments.

    Made of kernel, PID and user namespaces, and user; ``TORCHRELAY_HOST_ID`` distinguishes further.
    """
    with _proc_errors():
        kinds = ("pid", "user") if has_core else ()  # without it, nothing is attached
        namespaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in kinds]
        return "/".join([boot_id(), *namespaces, str(os.geteuid()), config.load(config.Host).id])


@contextlib.contextmanager
def _proc_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = (
            "torchrelay finds the processes of a host there: mount it (mount -t proc proc /proc), "
            "in this process's PID namespace"
            if isinstance(error, FileNotFoundError)
            else remedy_of(error)
        )
        raise UnavailableError(f"reading /proc: {error}; {remedy}") from error


def remedy_of(error: OSError) -> str:
    """Return what to do where this process or the system lacks something."""
    from torchrelay import _native  # noqa: PLC0415 - `doctor` reports where it is missing

    known = _native.remedy(error.errno or 0) or _REMEDIES.get(error.errno or 0)
    return known or "is it forbidden here?"


@dataclass(frozen=True)
class Process:
    """A process of a job, as it registers at one rendezvous."""

    rank: int
    host: str
    pid: int
    start_ticks: int  # since boot; the kernel uses process ids again
    joined_ticks: int  # since boot
    job: str  # the launcher's name for the job, empty if it has none
    draw: str  # random; different at each rendezvous
    trouble: str = ""  # why it cannot be in the group

    @classmethod
    def current(cls, rank: int) -> Process:
        """Return this process, of a rank, at a new rendezvous.

        Raises:
            UnavailableError: ``/proc`` cannot be read.
            UnsupportedError: there is no native core, which those that meet need.
        """
        need_core("the rendezvous of sml, tables and mpi over process groups")
        names = (v for v in _JOB_VARIABLES if os.environ.get(v, "none") != "none")
        return cls(
            rank=rank,
            host=host_identity(),
            pid=os.getpid(),
            start_ticks=_own_start_ticks(),
            joined_ticks=int(seconds_since_boot() * os.sysconf("SC_CLK_TCK")),
            job=next((f"{name}={os.environ[name]}" for name in names), ""),
            draw=secrets.token_hex(8),
        )

    @classmethod
    def parse(cls, text: str | bytes) -> Process:
        return cls(**json.loads(text))

    def is_alive_here(self) -> bool:
        """Return whether it is running on this host; False for other hosts."""
        return self.host == host_identity() and not self.has_died()

    def has_died(self) -> bool:
        """Return whether it ran on this host and has exited; False for other hosts."""
        if self.host != host_identity():
            return False
        try:
            return _start_ticks(str(self.pid)) != self.start_ticks
        except OSError:  # not known
            return False


def _own_start_ticks() -> int:
    with _proc_errors():
        return _start_ticks("self") or 0


def _start_ticks(pid: str) -> int | None:
    """Return when the process started, or None if it has exited (proc(5): state and start time
    follow the name).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in b"ZX" else int(fields[19])
