"""Shared by all tests: test bodies that run in several processes at once, and a check that nothing
is left.

A test marked ``@pytest.mark.processes(n)`` runs in n fresh processes, as ranks 0 to n-1. It asks
for the fixture ``world`` (a :class:`torchrelay.world.World` whose ``connect()`` gives the store)
like any other fixture. It fails if any rank fails, and the report shows each failing rank's
traceback. The fixture ``run_processes`` does the same for a function of the test file, and tells
how each rank ended: for tests that kill some of them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib.util
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import namespaces
from torchrelay.world import World

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# One clean process imports torch once; each rank is forked from it in milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torchrelay.buffers"])

_OUTER_MOUNTS = pytest.StashKey[int]()
_IS_PRIVATE = pytest.StashKey[bool]()


@dataclass
class RankResult:
    """How one rank ended: its function's value, or its traceback, or the signal that killed it."""

    value: Any = None
    error: str | None = None
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0


@dataclass
class Job:
    """A function of a test file, and what it is called with on every rank."""

    path: str
    function: str
    kwargs: dict[str, Any]
    environ: dict[str, str] = field(default_factory=dict)


def _load_function(path: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


class _HeldWorld(World):
    """Keeps the stores it connects until the rank ends: rank 0 serves them to those that are not
    done yet.
    """

    stores: ClassVar[list[Store]] = []

    def connect(self, timeout_s: float = 300.0) -> Store:
        self.stores.append(super().connect(timeout_s))
        return self.stores[-1]


def _rank_main(job: Job, world: World, results: Connection) -> None:
    import torch

    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.update(job.environ)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.rank),
        LOCAL_WORLD_SIZE=str(world.size),
        MASTER_ADDR=world.master_addr,
        MASTER_PORT=str(world.master_port),
    )
    try:
        value = _load_function(job.path, job.function)(world=world, **job.kwargs)
        results.send((value, None))
        if world.rank == 0:  # it may serve the store, which the others need until they end
            results.poll(None)
    except BaseException:
        results.send((None, traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


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


def run_job(job: Job, size: int, timeout_s: float) -> list[RankResult]:
    """Runs ``job`` as ``size`` ranks and waits; ranks that outlive ``timeout_s`` are killed and say
    so.
    """
    port = free_port()
    processes, pipes = [], []
    for rank in range(size):
        ours, theirs = _context.Pipe()
        world = _HeldWorld(rank, size, rank, "tests", "127.0.0.1", port)
        process = _context.Process(target=_rank_main, args=(job, world, theirs), daemon=False)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
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


@pytest.fixture
def run_processes(request: pytest.FixtureRequest) -> Callable[..., list[RankResult]]:
    """``run_processes(function, size, timeout_s=60, environ={}, **kwargs)`` tells how each rank
    ended.
    """

    def run(
        function: Callable[..., Any],
        size: int,
        timeout_s: float = 60,
        environ: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[RankResult]:
        job = Job(str(request.path), function.__name__, kwargs, environ or {})
        return run_job(job, size, timeout_s)

    return run


@pytest.fixture
def world() -> World:
    """This rank's place. Outside a ``processes`` test, the world of one process."""
    return World()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    marker = pyfuncitem.get_closest_marker("processes")
    if marker is None:
        return None
    (size,) = marker.args
    names = pyfuncitem._fixtureinfo.argnames
    kwargs = {name: pyfuncitem.funcargs[name] for name in names if name != "world"}
    job = Job(str(pyfuncitem.path), pyfuncitem.originalname, kwargs)
    timeout_s = marker.kwargs.get("timeout_s", 100)
    failures = [
        f"--- rank {rank} (exit code {result.exitcode})\n{result.error}"
        for rank, result in enumerate(run_job(job, size, timeout_s))
        if not result.ok
    ]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return True


_PRIVATE_FOLDERS = ("/dev/shm", "/run/netns")


# What takes longest comes first, so that no worker of pytest-xdist has it left at the end.
_LONGEST = (
    "unit/test_native.py",
    "multi/mpi/test_gradients.py",
    "multi/mpi/test_compiled.py",
    "multi/mpi/test_compositions.py",
    "multi/mpi/test_collectives.py",
    "multi/mpi/test_order.py",
    "multi/training/test_slowmo.py",
    "multi/demo/test_demo.py",
    "multi/checkpoint/test_layouts.py",
    "multi/aggregation/test_torch.py",
    "multi/aggregation/test_hosts.py",
    "unit/deferred/test_zoo.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give this process and its children private copies of the folders that the leak check looks
    at.

    They are in a mount namespace of their own, so what other programs do there is not seen, and
    what a killed test run leaves there ends with it. It takes root; without it, see
    :func:`_left_behind`.
    """
    if (
        "PYTEST_XDIST_WORKER" in os.environ
    ):  # it ignores interrupts, which processes of the tests would inherit
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_OUTER_MOUNTS] = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if os.geteuid() == 0:
        config.stash[_IS_PRIVATE] = namespaces.hide(_PRIVATE_FOLDERS)


def _left_behind(config: pytest.Config) -> set[str]:
    """Return what a test could leave on the machine: shared memory files and network namespaces.

    Nothing if other programs use the same folders, because a file does not tell whose it is.
    """
    if not config.stash.get(_IS_PRIVATE, False):
        return set()
    return {str(path) for folder in _PRIVATE_FOLDERS for path in Path(folder).glob("*")}


@pytest.fixture
def outer_mounts(request: pytest.FixtureRequest) -> int:
    """A file descriptor of the mount namespace in which the test run was started."""
    return request.config.stash[_OUTER_MOUNTS]


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a file in /dev/shm, a network namespace or a process of
    multiprocessing.
    """
    before = _left_behind(request.config)
    yield
    left = _left_behind(request.config) - before
    assert not left, f"the test left {sorted(left)}"
    children = multiprocessing.active_children()
    assert not children, f"the test left the processes {children}"
