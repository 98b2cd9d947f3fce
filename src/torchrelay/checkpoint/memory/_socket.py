"""How processes of a host find the memory server of their job, start it, and know it for theirs.

Its socket is in a folder that only its user may enter, whose name is made of user, host, path and,
where there is one, the key of the job. Both ends ask the kernel for the user of the other. Imports
no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import socket
import stat
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torchrelay import config
from torchrelay._helper import Channel, environment, module_command
from torchrelay._platform import path_inside, user_at_other_end
from torchrelay._processes import closed_in_children, host_identity
from torchrelay.checkpoint.storage._contract import Path, local_path, storage_errors, text_of
from torchrelay.errors import PeerLostError, UnavailableError, from_json
from torchrelay.transport import read_key

__all__ = ["SOCKET", "MemoryClient", "folder_of", "job_of", "jobs", "remove", "remove_dead"]

_logger = logging.getLogger("torchrelay.checkpoint")

SOCKET, _LOCK = "socket", "lock"
_TIMEOUT_S = 60.0  # of a start, and of an answer
_POLL_S = 0.01
_SHOWN = 1000  # characters of its output in an error


def job_of(path: Path) -> str:
    """Return the name of the job that saves to ``path``: its last part, and a digest of the path
    and the key.
    """
    local = local_path(path)
    text = text_of(path).rstrip("/") if local is None else os.path.realpath(local)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text.rpartition("/")[2])[:40]
    key = read_key(config.load(config.TransportSettings)) or b""
    return f"{name}-{hashlib.blake2b(text.encode(), digest_size=6, key=key).hexdigest()}"


def _prefix() -> str:
    host = hashlib.blake2b(host_identity().encode(), digest_size=4).hexdigest()
    return f"torchrelay-memory-{os.geteuid()}-{host}-"


def _parent() -> str:
    return os.environ.get("TMPDIR") or "/tmp"


def folder_of(job: str) -> str:
    return os.path.join(_parent(), _prefix() + job)


def jobs() -> list[str]:
    """Return the jobs of this user that have, or had, a memory server on this host."""
    prefix = _prefix()
    names = os.listdir(_parent())
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def remove(folder: str) -> None:
    """Remove the folder of a server that has ended."""
    for name in (SOCKET, _LOCK):
        with suppress(OSError):
            os.unlink(os.path.join(folder, name))
    with suppress(OSError):
        os.rmdir(folder)


def remove_dead(folder: str) -> None:
    """Remove the folder of a server that was killed; not of one that is just starting."""
    with suppress(OSError):
        lock = _locked(folder)
        if lock is not None:
            with os.fdopen(lock):
                remove(folder)


def _own_folder(folder: str, *, create: bool) -> int:
    """Open a folder that only this user may enter.

    Raises:
        FileNotFoundError: there is none.
        UnavailableError: it is another user's, or others may enter it.
    """
    if create:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise UnavailableError(
            f"{folder}: it would hold the socket of this job's checkpoints in memory, but it is of "
            "another user, or others may enter it; remove it, or set TMPDIR to a folder of yours"
        )
    return fd


class MemoryClient:
    """A connection to the memory server of a job on this host. One thread at a time uses it."""

    def __init__(self, job: str) -> None:
        """Connect to a server that runs.

        Raises:
            OSError: there is none.
            UnavailableError: it is another user's.
        """
        self.job, self.folder = job, folder_of(job)
        here = _own_folder(self.folder, create=False)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path_inside(here, SOCKET))
            if user_at_other_end(connection) != os.geteuid():
                raise UnavailableError(f"{self.folder}: the memory server is another user's")
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(here)
        self._channel = Channel(connection)
        closed_in_children(self)
        try:
            self.server = str(self.ask("status")["id"])
        except OSError:  # one that is ending
            self.close()
            raise

    @classmethod
    def started(cls, job: str) -> MemoryClient:
        """Connect; start the server if none runs.

        Raises:
            UnavailableError: it cannot be started.
        """
        folder, deadline = folder_of(job), time.monotonic() + _TIMEOUT_S
        while True:
            try:
                return cls(job)
            except OSError as error:
                with storage_errors(f"starting the memory server of this job in {folder}"):
                    lock = _locked(folder)
                if lock is not None:
                    with os.fdopen(lock):
                        if os.path.exists(os.path.join(folder, SOCKET)):
                            _logger.warning(
                                "the memory server of %s was killed; what only it had is lost", job
                            )
                        _start(folder, lock)
                elif time.monotonic() > deadline:
                    raise UnavailableError(
                        f"{folder}: the memory server of this job does not answer ({error})"
                    ) from error
                else:
                    time.sleep(_POLL_S)

    def ask(self, name: str, *arguments: Any, fds: Sequence[int] = (), waits_s: float = 0.0) -> Any:
        """Return the answer of the server: a value, or a descriptor that the caller closes.

        Args:
            waits_s: how long the server may wait before it answers.

        Raises:
            TorchRelayError: what it raised.
            PeerLostError: it has ended, or does not answer; this connection is closed.
        """
        received = None
        what = f"the process that keeps the checkpoints of {self.job} in this host's memory"
        try:
            self._channel.send((name, arguments), fds)
            received = self._channel.receive(_TIMEOUT_S + waits_s)
        except PeerLostError as error:
            raise PeerLostError(
                f"{what} cannot be reached; if it has ended, what it had is lost: see "
                "'what is lost' in docs/checkpoint.md"
            ) from error
        finally:
            if received is None:  # a late answer would be taken for that of the next question
                self.close()
        if received is None:
            raise PeerLostError(
                f"{what} has not answered for {_TIMEOUT_S + waits_s:g} s; it is stopped, or the "
                "host is overloaded"
            )
        (value, failure), files = received
        if failure is not None:
            raise from_json(failure)
        return files[0] if files else value

    def close(self) -> None:
        self._channel.close()


def _locked(folder: str) -> int | None:
    """Take the lock that a server holds while it runs; None if another process has it."""
    here = _own_folder(folder, create=True)
    try:
        fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=here)
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(_LOCK, dir_fd=here)):
                return fd
        os.close(fd)  # its owner runs, or has removed it meanwhile
        return None
    finally:
        os.close(here)


def _start(folder: str, lock: int) -> None:
    """Start a server, and return when it listens. Trainers do not wait for its end."""
    command = [*module_command("torchrelay.checkpoint.memory._server"), folder, str(lock)]
    try:
        subprocess.run(
            command,
            check=True,
            pass_fds=[lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd="/",
            start_new_session=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.SubprocessError as error:
        remove(folder)
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")[-_SHOWN:].strip()
        raise UnavailableError(
            f"the memory server of this job cannot be started: {said or error}"
        ) from error
