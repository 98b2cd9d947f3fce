"""Runs functions of test files as the ranks of fresh processes."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib.util
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import preloaded
from torchrelay.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

_context = multiprocessing.get_context("forkserver")


@functools.cache
def _start_fork_server() -> None:
    """Start the process that ranks are forked from, in milliseconds: it is forked itself from one
    that has imported what most tests use.
    """
    interpreter = multiprocessing.spawn.get_executable()
    _context.set_executable(preloaded.python())
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        _context.set_executable(interpreter)


@dataclass
class RankResult:
    """How one rank ended: its function's value, or its traceback, or the signal that killed it."""

    value: Any = None
    error: str | None = None
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0


class RunProcesses(Protocol):
    """The fixture ``run_processes``."""

    def __call__(
        self,
        function: Callable[..., Any],
        size: int,
        timeout_s: float = 100,
        environ: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[RankResult]: ...


@dataclass
class Job:
    """A function of a test file, and what it is called with on every rank."""

    path: str
    function: str
    kwargs: dict[str, Any]
    environ: dict[str, str] = field(default_factory=dict)


@functools.cache
def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class _HeldWorld(World):
    """Keeps the stores it connects until the rank ends: rank 0 serves them to those that are not
    done yet.
    """

    prefix: str = ""  # of a test's keys in the store of a rank that runs several
    stores: ClassVar[list[Store]] = []

    def connect(self, timeout_s: float = 300.0) -> Store:
        if not (self.prefix and self.stores):
            self.stores.append(super().connect(timeout_s))
        if not self.prefix:
            return self.stores[-1]
        from torch.distributed import PrefixStore

        return PrefixStore(self.prefix, self.stores[0])


def _set_up(world: World) -> None:
    import torch

    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.rank),
        LOCAL_WORLD_SIZE=str(world.size),
        MASTER_ADDR=world.master_addr,
        MASTER_PORT=str(world.master_port),
    )


def _destroy_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _rank_main(job: Job, world: World, results: Connection) -> None:
    os.environ.update(job.environ)
    _set_up(world)
    try:
        value = getattr(_load(job.path), job.function)(world=world, **job.kwargs)
        results.send((value, None))
        if world.rank == 0:  # it may serve the store, which the others need until they end
            results.poll(None)
    except BaseException:
        results.send((None, traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        _destroy_groups()


def _together_main(jobs: list[Job], world: _HeldWorld, parent: Connection) -> None:
    """Run jobs in turn, each when the parent says so, until one fails."""
    _set_up(world)
    for index, job in enumerate(jobs):
        try:
            parent.recv()
        except EOFError:
            return
        own = replace(world, prefix=f"{index}/")
        try:
            getattr(_load(job.path), job.function)(world=own, **job.kwargs)
            _destroy_groups()
        except BaseException:
            parent.send(traceback.format_exc())
            raise SystemExit(1) from None
        parent.send(None)
    parent.poll(None)


@functools.cache
def _ports() -> Iterator[int]:
    """Ports that the system gives to nobody who asks for any, and no other test run uses.

    A range belongs to the process that holds its first port, until that process ends.
    """
    for first in range(16000, 32000, 500):
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", first))
        except OSError:
            holder.close()
            continue
        atexit.register(holder.close)
        return itertools.cycle(range(first + 1, first + 500))
    raise RuntimeError("every range of ports from 16000 to 32000 is held by another test run")


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    while True:
        port = next(_ports())
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def python(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process with one thread of torch; its output and errors are one stream."""
    with subprocess.Popen(
        [preloaded.python(), *arguments],
        env=preloaded.environment(OMP_NUM_THREADS="1", **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def _start(
    main: Callable[[Any, _HeldWorld, Connection], None], work: object, size: int
) -> tuple[list[ForkServerProcess], list[Connection]]:
    """Start ``main`` as ``size`` ranks."""
    _start_fork_server()
    port = free_port()
    processes, pipes = [], []
    for rank in range(size):
        ours, theirs = _context.Pipe()
        world = _HeldWorld(rank, size, "tests", "127.0.0.1", port)
        process = _context.Process(target=main, args=(work, world, theirs), daemon=False)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return processes, pipes


def run_together(jobs: list[Job], size: int, timeout_s: float) -> list[list[str | None]]:
    """Run jobs in turn in the same ranks, or in new ones after a failure.

    Returns:
        For each job, each rank's error.
    """
    outcomes: list[list[str | None]] = []
    while left := jobs[len(outcomes) :]:
        processes, pipes = _start(_together_main, left, size)
        try:
            for _ in left:
                for pipe in pipes:
                    with contextlib.suppress(OSError):
                        pipe.send("go")
                deadline = time.monotonic() + timeout_s
                outcomes.append([_error(pipe, deadline, timeout_s) for pipe in pipes])
                if any(outcomes[-1]):
                    break
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                pipe.close()
                process.join(20)
                process.kill()
                process.join()
                process.close()
    return outcomes


def _error(pipe: Connection, deadline: float, timeout_s: float) -> str | None:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return f"did not end within {timeout_s:g} s"
    try:
        return cast("str | None", pipe.recv())
    except (EOFError, OSError):
        return "ended without a result"


def run_job(job: Job, size: int, timeout_s: float) -> list[RankResult]:
    """Runs ``job`` as ``size`` ranks and waits; ranks that outlive ``timeout_s`` are killed and say
    so.
    """
    processes, pipes = _start(_rank_main, job, size)
    results = [RankResult() for _ in range(size)]
    deadline = time.monotonic() + timeout_s
    waiting = dict(zip(pipes, range(size), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                results[rank].value, results[rank].error = pipe.recv()
            except EOFError:
                results[rank].error = "ended without a result"
    pipes[0].close()
    for rank, process in enumerate(processes):
        process.join(
            timeout=max(2.0, deadline - time.monotonic()) if pipes[rank] not in waiting else 0
        )
        if process.is_alive():
            process.kill()
            process.join()
            results[rank].error = results[rank].error or f"did not end within {timeout_s:g} s"
        results[rank].exitcode = process.exitcode
        pipes[rank].close()
        process.close()
    return results
