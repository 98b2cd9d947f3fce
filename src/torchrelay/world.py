"""Ranks, world size, rendezvous store, and which ranks share a host.

:meth:`World.from_environment` reads the variables of torchrun, Open MPI, MPICH or Slurm; without
any of them the world has one process. Importing this module does not import ``torch.distributed``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from torchrelay import _native, config
from torchrelay._addresses import boot_id
from torchrelay._waiting import duration, listed, nothing_to_check, wait_for_others
from torchrelay.errors import (
    ConfigError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    TorchRelayError,
    UnavailableError,
)

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Meeting", "Process", "Ranks", "World", "host_identity", "remedy_of"]

_LONGEST_LOOK_S = 1.0  # interval at which a waiting rank looks who has come
_FIRST_LOOK_S = 0.02  # how long a rank waits for others that were there before to come again

_LEAVING_POLL_S = 0.01
_LONGEST_LEAVING_S = 5.0
_NEWS_S = 0.5  # for the cause of a rank that left while the group was made

_JOIN = "join the group"
_SAME_GROUPS = "are they running, and do they make the same groups in the same order?"
_TWO_JOBS = "do two jobs use one MASTER_ADDR and MASTER_PORT, or was a rank started twice?"

# Equal for all ranks of one job. torchrun sets "none" without --rdzv-id.
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)

# launcher, rank, size, other variables that it sets
_LAUNCHERS: tuple[tuple[str, ...], ...] = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    # The script of sbatch has no step: it runs only once, with the other variables.
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"),
)

# Beginnings of the names of all variables that make a process a rank, here or of an MPI library.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "SLURM_")


@dataclass(frozen=True)
class World:
    """Position of this process among all. Default: the world of one process."""

    rank: int = 0
    size: int = 1
    launcher: str = "none"
    master_addr: str = "127.0.0.1"
    master_port: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """Return the world of the launcher: torchrun, Open MPI, MPICH or Slurm, in this order.

        Raises:
            ConfigError: a variable is not a number, or rank and size contradict each other.
        """
        environ = os.environ if environ is None else environ
        are_set = ({*names[1:]} <= environ.keys() for names in _LAUNCHERS)
        found = next(itertools.compress(_LAUNCHERS, are_set), None)
        if found is None:
            return cls()
        launcher, rank_key, size_key = found[:3]
        rank, size = _number(environ, rank_key), _number(environ, size_key)
        if not 0 <= rank < size:
            raise ConfigError(
                f"{rank_key}={rank} and {size_key}={size}: the rank must be from 0 to size - 1"
            )
        return cls(
            rank=rank,
            size=size,
            launcher=launcher,
            master_addr=environ.get("MASTER_ADDR", cls.master_addr),
            master_port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        )

    def connect(self, timeout_s: float = 300.0) -> Store:
        """Return the store that all processes share; one process gets its own.

        Under torchrun its agent serves the store, also to the processes that it starts after a
        failure: this store is one of this attempt alone, and the first call waits for all ranks.
        Else rank 0 serves it at ``MASTER_ADDR:MASTER_PORT``, and the call waits until it answers.

        Raises:
            ConfigError: there are several processes and no ``MASTER_PORT``.
            OperationTimeoutError: the store did not answer within ``timeout_s``, or a rank is
                missing.
            PeerLostError: a rank has died.
        """
        import torch.distributed as dist  # noqa: PLC0415 - importing it takes longer than all of torchrelay

        if self.size == 1:
            return dist.HashStore()
        if self.master_port is None:
            raise ConfigError(
                f"{self.size} processes were started by {self.launcher}, but MASTER_PORT is not "
                "set: give all of them the address of rank 0's host and a free port, e.g. mpirun "
                "-x MASTER_ADDR=host -x MASTER_PORT=29500"
            )
        try:
            served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            store = dist.TCPStore(
                self.master_addr,
                self.master_port,
                self.size,
                is_master=self.rank == 0 and not served_by_agent,
                timeout=duration(timeout_s),
                multi_tenant=True,
            )
        except dist.DistNetworkError as error:
            raise OperationTimeoutError(
                f"rank {self.rank}: the store at {self.master_addr}:{self.master_port} did not "
                f"answer within {timeout_s:g} s; is rank 0 running, and do MASTER_ADDR and "
                f"MASTER_PORT name its host? ({error})",
                ranks=(0,),
            ) from error
        except dist.DistStoreError as error:  # of rank 0, which waits for the others
            raise OperationTimeoutError(
                f"rank {self.rank}: not all {self.size} ranks connected to the store at "
                f"{self.master_addr}:{self.master_port} within {timeout_s:g} s; are all running, "
                f"with this MASTER_ADDR and MASTER_PORT? ({error})"
            ) from error
        if not served_by_agent:
            return store
        place = self.master_addr, self.master_port, self.rank, self.size
        if place not in _attempts:
            _attempts[place] = Meeting(store, self.rank, self.size, timeout_s).attempt
        return dist.PrefixStore(_attempts[place], store)


# Those of this process, which takes part in one attempt only.
_attempts: dict[tuple[str, int, int, int], str] = {}


def _number(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise ConfigError(f"{key}={environ[key]!r} is not a whole number") from None


def host_identity() -> str:
    """Return a string that is equal for processes that can attach each other's segments.

    Made of kernel, PID and user namespaces, and user; ``TORCHRELAY_HOST_ID`` distinguishes further.
    """
    with _proc_errors():
        namespaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "user")]
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
    return _native.remedy(error.errno or 0) or "is it forbidden here?"


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
        """
        names = (v for v in _JOB_VARIABLES if os.environ.get(v, "none") != "none")
        return cls(
            rank=rank,
            host=host_identity(),
            pid=os.getpid(),
            start_ticks=_own_start_ticks(),
            joined_ticks=int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")),
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


class Ranks:
    """The ranks of a group, which exchange small values through a store.

    A value belongs to a step, whose name is used once. All methods raise ``PeerLostError`` if the
    process that serves the store has exited.

    Args:
        store: used by the group's ranks only; None for a group of one.
        names: the ranks as users know them, for messages; default: the group's own ranks.
    """

    def __init__(
        self, store: Store | None = None, rank: int = 0, size: int = 1, names: Sequence[int] = ()
    ) -> None:
        self.store: Any = store
        self.rank = rank
        self.size = size
        self.names = list(names) or list(range(size))

    def gather(self, step: str, mine: Any, timeout_s: float, **waiting: Any) -> list[Any]:
        """Return what each rank passes for ``step``; anything that JSON can hold. Blocks.

        Args:
            waiting: ``call``, ``hint`` and ``check``, as for :meth:`wait`.

        Raises:
            OperationTimeoutError: ranks are missing after ``timeout_s``; ``ranks`` names them.
        """
        if self.size == 1:
            return [mine]
        self.announce(step, json.dumps(mine))
        return [json.loads(text) for text in self.wait(step, timeout_s, **waiting)]

    def agree(
        self, step: str, mine: Mapping[str, str], timeout_s: float, what: str, **waiting: Any
    ) -> None:
        """Compare the description ``mine`` of ``what`` the ranks make with that of each rank.

        Raises:
            MismatchError: one differs; on every rank.
            OperationTimeoutError: as :meth:`gather`.
        """
        for name, other in zip(
            self.names, self.gather(step, dict(mine), timeout_s, **waiting), strict=True
        ):
            different = [
                f"{field} is {value} here, {other.get(field)} there"
                for field, value in mine.items()
                if value != other.get(field)
            ]
            if different:
                self.leave(f"{step}/refused")
                raise MismatchError(
                    f"{self.name} and rank {name} made different {what}: {'; '.join(different)}"
                )

    def barrier(
        self, step: str, timeout_s: float, *, part: tuple[int, int] = (0, 1), **waiting: Any
    ) -> None:
        """Wait for all ranks. The name ``step`` can be used again.

        A process that replaces one of a rank takes part where that one would have.

        Args:
            part: the index of the calling thread among the threads of each rank that take part,
                and their number.
            waiting: ``call``, ``hint``, ``check`` and ``check_missing``, as for :meth:`wait`.

        Raises:
            OperationTimeoutError: as :meth:`gather`.
        """
        index, parts = part
        if self.size * parts == 1:
            return
        mine = self.rank * parts + index
        passed = f"{step}/passed/{mine}"
        with self._store_errors():
            number = self.store.add(passed, 0)
        self.announce(f"{step}/{number}", index=mine)
        self.wait(f"{step}/{number}", timeout_s, parts=parts, **waiting)
        with self._store_errors():
            self.store.add(passed, 1)
            if number:  # all have left the one before
                self.store.delete_key(f"{step}/{number - 1}/{mine}")

    def leave(self, step: str) -> None:
        """Leave for good. Rank 0, which may serve the store, waits some seconds for the others."""
        if self.size == 1:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone: no rank waits any more
            left = self.store.add(step, 1)
            deadline_s = time.monotonic() + _LONGEST_LEAVING_S
            while self.rank == 0 and left < self.size and time.monotonic() < deadline_s:
                time.sleep(_LEAVING_POLL_S)
                left = self.store.add(step, 0)

    def announce(self, step: str, text: str = "", *, index: int | None = None) -> None:
        """Notify the others that this rank (or thread ``index``) has reached ``step``."""
        if self.store is not None:
            with self._store_errors():
                self.store.set(f"{step}/{self.rank if index is None else index}", text)

    def missing(self, step: str, indices: Iterable[int] | None = None) -> list[int]:
        """Return the ranks (or threads ``indices``) that have not announced ``step``."""
        awaited = range(self.size) if indices is None else indices
        return [index for index in awaited if not self.store.check([f"{step}/{index}"])]

    def wait(
        self,
        step: str,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        *,
        parts: int = 1,
        call: str = _JOIN,
        hint: str = _SAME_GROUPS,
        check: Callable[[], None] = nothing_to_check,
        check_missing: Callable[[Sequence[int]], None] = lambda _: None,
        news_s: float = 0.0,
    ) -> list[str]:
        """Wait until ``ranks`` (default: all) announced ``step``; return their texts.

        Args:
            parts: threads of each rank that announce it.
            call: what missing ranks did not do, for messages; ``hint``: what to look at.
            check: called often; raises if a rank was lost.
            check_missing: called rarely, with the missing ranks (or threads); may raise.
            news_s: if the store is lost, ``check`` may give the cause for so long.

        Raises:
            OperationTimeoutError: ranks are missing after ``timeout_s``; ``ranks`` names them.
        """
        awaited = range(self.size * parts) if ranks is None else ranks
        values = [f"{step}/{index}" for index in awaited]
        keys = list(values)
        missing = partial(self.missing, step, awaited)

        def absent() -> list[int]:
            late = missing()
            check_missing(late)
            return list(dict.fromkeys(self.names[index // parts] for index in late))

        def check_all() -> None:
            check()
            self._check_processes(missing)

        with self._store_errors(check, news_s):
            wait_for_others(
                lambda: _are_there(self.store, keys),
                absent,
                partial(self._late, call=call, hint=hint),
                check_all,
                timeout_s,
            )
            return [text.decode() for text in _values(self.store, values)]

    def _check_processes(self, missing: Callable[[], Sequence[int]]) -> None:
        """Raise if one of the ranks ``missing`` can no longer come."""

    def _late(
        self,
        names: Sequence[int],
        elapsed_s: float,
        call: str = _JOIN,
        hint: str = _SAME_GROUPS,
    ) -> str:
        return (
            f"{self.name}: {listed('rank', names)} did not {call} within {elapsed_s:.1f} s; {hint}"
        )

    @contextlib.contextmanager
    def _store_errors(
        self, check: Callable[[], None] = nothing_to_check, news_s: float = 0.0
    ) -> Iterator[None]:
        """Raise :class:`PeerLostError` if the store is lost; for ``news_s``, ``check`` may give the
        cause.
        """
        import torch.distributed as dist  # noqa: PLC0415 - as above

        try:
            yield
        except dist.DistNetworkError as error:
            deadline_s = time.monotonic() + news_s
            while time.monotonic() < deadline_s:
                check()
                time.sleep(_LEAVING_POLL_S)
            raise PeerLostError(
                f"{self.name}: the store through which the ranks meet is gone: the process that "
                f"serves it, rank 0 or torchrun's agent, has exited ({error})",
                ranks=(0,),
            ) from error

    def among(self, ranks: Sequence[int]) -> Self:
        """Return the group of ``ranks``, for groups that have no rank in common. Does not block."""
        import torch.distributed as dist  # noqa: PLC0415 - as above

        part = copy.copy(self)
        part.rank, part.size = ranks.index(self.rank), len(ranks)
        part.names = [self.names[rank] for rank in ranks]
        if self.store is not None:
            part.store = dist.PrefixStore(f"among/{ranks[0]}", self.store)
        return part

    @property
    def name(self) -> str:
        """This rank, for messages."""
        return f"rank {self.names[self.rank]}"


class Meeting(Ranks):
    """Rendezvous of the ranks of a group through a store, which may outlive processes.

    Creation is collective over all ranks, and may be repeated over the same store.

    torchrun's agent keeps its store when it restarts the ranks, so there may be keys of processes
    that have exited. Each rank draws a random name, registers under it, and is done once all ranks
    have seen the same names: what an earlier process saw lacks the name of a later one.

    Args:
        store: used by the group's ranks only.
        names: the ranks as users know them, for messages; default: the group's own ranks.
        known: processes of other ranks from earlier rendezvous, by name.

    Attributes:
        processes: of the ranks, in their order.
        attempt: equal on all ranks, and different for every other rendezvous.
        store: for this rendezvous only: no key is there at first.

    Raises:
        OperationTimeoutError: ranks are missing after ``timeout_s``; ``ranks`` names them.
        PeerLostError: a rank, or the process that serves the store, has died.
        MismatchError: processes of two jobs claim to be ranks of this group.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        names: Sequence[int] = (),
        known: Mapping[int, Process] | None = None,
    ) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - as above

        self._whole: Store = dist.PrefixStore("torchrelay", store)
        super().__init__(self._whole, rank, size, names)
        self._known = dict(known or {})
        self._agreed = False
        self.processes: list[Process] = []
        self.attempt = ""
        with self._store_errors():
            self._me = self._register()
            self._settle(timeout_s)
        self.store = dist.PrefixStore(self.attempt, self._whole)
        self._check_jobs()

    def among(self, ranks: Sequence[int]) -> Self:
        part = super().among(ranks)
        part.processes = [self.processes[rank] for rank in ranks]
        return part

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Notify the others of an error of this rank alone in this block, and raise theirs.

        Raises:
            UnavailableError: this rank or another one lacks what it needs.
        """
        try:
            yield
        except (MismatchError, OperationTimeoutError):  # which all ranks have
            raise
        except PeerLostError as error:
            if self.names[self.rank] in error.ranks:
                self.refuse(error)
            deadline_s = time.monotonic() + _NEWS_S
            with self._store_errors():
                while time.monotonic() < deadline_s:  # a rank that has left may have said why
                    self._check_trouble()
                    time.sleep(_LEAVING_POLL_S)
            raise
        except TorchRelayError as error:
            self.refuse(error)
            raise
        except Exception as error:
            remedy = f"; {remedy_of(error)}" if isinstance(error, OSError) else ""
            lacking = UnavailableError(f"making a group: {error or type(error).__name__}{remedy}")
            self.refuse(lacking)
            raise lacking from error

    def refuse(self, error: Exception) -> None:
        """Notify the others that this rank lacks what it needs: they need not wait for it."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and they know
            text = f"{self.name} cannot be in the group: {error}"
            self._whole.set("trouble", json.dumps(asdict(replace(self._me, trouble=text))))

    # --- the rendezvous

    def _register(self) -> Process:
        """Take this rank's place in the store.

        Raises:
            MismatchError: a running process of this host has it.
        """
        key = f"rank/{self.rank}"
        try:
            me = Process.current(self.rank)
        except UnavailableError as error:
            draw = secrets.token_hex(8)
            self._me = Process(self.rank, "", os.getpid(), 0, 0, "", draw)
            self.refuse(error)
            raise
        if self._whole.check([key]):
            before = Process.parse(self._whole.get(key))
            if before.pid != me.pid and before.is_alive_here():
                message = (
                    f"rank {self.names[self.rank]} is already claimed by process {before.pid}, and "
                    f"process {me.pid} claims it too: {_TWO_JOBS}"
                )
                self._whole.set("refused", json.dumps({"draw": before.draw, "message": message}))
                raise MismatchError(message)
        if self._whole.check(["trouble"]):
            trouble = self._whole.get("trouble")
            if trouble and Process.parse(trouble).rank == self.rank:  # of an earlier attempt
                self._whole.set("trouble", "")
        self._whole.set(key, json.dumps(asdict(me)))
        return me

    def _settle(self, timeout_s: float) -> None:
        """Wait until all ranks have seen the same registrations."""
        keys = [f"rank/{rank}" for rank in range(self.size)]
        awaited = list(keys)
        next_look_s, interval_s = 0.0, _FIRST_LOOK_S

        def is_complete() -> bool:
            nonlocal next_look_s, interval_s
            now_s = time.monotonic()
            if not self.processes and not _are_there(self._whole, awaited):
                return False
            if now_s >= next_look_s:
                present = [Process.parse(text) for text in _values(self._whole, keys)]
                # If it is complete, another rank may be at its next rendezvous over this store.
                if present != self.processes and not self._is_complete():
                    self._see(present)
                    interval_s = _FIRST_LOOK_S
                next_look_s, interval_s = now_s + interval_s, min(2 * interval_s, _LONGEST_LOOK_S)
            return self._is_complete()

        def missing() -> list[int]:
            return self.missing(f"{self.attempt}/seen" if self.processes else "rank")

        wait_for_others(
            is_complete,
            lambda: [self.names[rank] for rank in missing()],
            self._late,
            lambda: self._check_processes(missing),
            timeout_s,
        )
        self._agreed = True

    def _is_complete(self) -> bool:
        return bool(self.attempt) and self._whole.check([f"{self.attempt}/complete"])

    def _see(self, present: list[Process]) -> None:
        """Publish which processes this rank has seen."""
        other = present[self.rank]
        if other != self._me:
            raise MismatchError(
                f"rank {self.names[self.rank]} is claimed by process {self._me.pid}, and "
                f"process {other.pid}{'' if other.is_alive_here() else ' of another host'} claims "
                f"it too: {_TWO_JOBS}"
            )
        draws = " ".join(process.draw for process in present)
        self.attempt = hashlib.blake2b(draws.encode(), digest_size=8).hexdigest()
        self.processes = present
        self._whole.set(f"{self.attempt}/seen/{self.rank}", "")
        if self._whole.add(f"{self.attempt}/count", 1) == self.size:
            self._whole.set(f"{self.attempt}/complete", "")

    def _check_jobs(self) -> None:
        named = zip(self.names, self.processes, strict=True)
        jobs = {process.job: name for name, process in named if process.job}
        if len(jobs) > 1:
            found = ", ".join(f"rank {name} to {job}" for job, name in jobs.items())
            raise MismatchError(
                f"{self.name}: the ranks belong to different jobs ({found}); give each job a "
                "MASTER_PORT of its own"
            )

    def _check_processes(self, missing: Callable[[], Sequence[int]]) -> None:
        """Raise if a rank was refused, or one of the ranks ``missing`` can no longer join."""
        if self._whole.check(["refused"]):
            refused = json.loads(self._whole.get("refused"))
            if any(each.draw == refused["draw"] for each in self.processes):
                raise MismatchError(f"{self.name}: {refused['message']}")
        self._check_trouble()
        for rank in missing():
            process, cause = self._lost(rank)
            if process is not None and rank in missing():
                raise PeerLostError(
                    f"{self.name}: rank {self.names[rank]} (process {process.pid}) {cause} before "
                    "it joined the group; look at its own output for the cause",
                    ranks=(self.names[rank],),
                )

    def _check_trouble(self) -> None:
        """Raise if a process of this attempt cannot be in the group, once for each."""
        text = self._whole.get("trouble") if self._whole.check(["trouble"]) else b""
        process = Process.parse(text) if text else self._me
        is_older = process.host == self._me.host and process.joined_ticks < self._me.start_ticks
        if process.draw not in {self._me.draw, *_troubles} and not is_older:
            _troubles.add(process.draw)
            raise UnavailableError(f"{self.name}: {process.trouble}")

    def _lost(self, rank: int) -> tuple[Process | None, str]:
        """Return the process of a rank and what happened to it if it is lost in this attempt."""
        seen = self.processes[rank] if self.processes else self._known.get(self.names[rank])
        if seen is None:
            return None, ""
        if seen.has_died():
            # A rank that registered before this process started may be of an earlier attempt.
            is_of_this_attempt = (
                not self.processes or self._agreed or seen.joined_ticks >= self._me.start_ticks
            )
            return (seen if is_of_this_attempt else None), "died"
        if self._agreed and Process.parse(self._whole.get(f"rank/{seen.rank}")) != seen:
            return seen, "was started again"
        return None, ""


# The draws of processes whose troubles were reported: their ranks may try again.
_troubles: set[str] = set()


def _values(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of ``keys``, which exist, from a torch store."""
    return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]


def _are_there(store: Any, keys: list[str]) -> bool:
    """Return whether all ``keys`` are in the store, and remove those that have been seen from the
    list. Does not block, because threads of a process take turns with the store.
    """
    while keys:
        if not store.check(keys[-1:]):
            return False
        if store.check(keys):
            return True
        keys.pop()
    return True
