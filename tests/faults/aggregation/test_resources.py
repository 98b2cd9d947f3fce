"""A rank that lacks descriptors, memory or threads reports which, and the others do not wait for
their timeout of 30 minutes: these ranks would be killed long before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - what is imported late needs descriptors too
from torchrelay import config
from torchrelay._communicators import open_group
from torchrelay._group import Collective, Kind
from torchrelay._torch import has_python_backends
from torchrelay.buffers import Segment
from torchrelay.errors import SegmentError, TorchRelayError
from torchrelay.parameters import Table
from torchrelay.world import Ranks, World

if TYPE_CHECKING:
    from ranks import RunProcesses

FOREVER_S = 1800.0
USER = 54321  # one without processes
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}


def report(call: Callable[[], Any]) -> str:
    try:
        call()
    except TorchRelayError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextlib.contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Leave this process so many descriptors."""
    held = []
    with limited(resource.RLIMIT_NOFILE, min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0])):
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(min(count, len(held))):
            os.close(held.pop())
        try:
            yield
        finally:
            for each in held:
                os.close(each)


def memory_left(kind: int, size_bytes: int) -> Any:
    """Leave this process so much of its address space, or of its private memory."""
    field = 0 if kind == resource.RLIMIT_AS else 5
    pages = int(Path("/proc/self/statm").read_text().split()[field])
    return limited(kind, pages * resource.getpagesize() + size_bytes)


def deny(call: int) -> None:
    """Deny this process a system call, as sandboxes do."""
    steps = [
        (0x20, 0, 0, 0),  # load its number
        (0x15, 0, 1, call),
        (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def start(store: Any, world: World, prefix: str) -> None:
    dist.init_process_group(
        "sml",
        store=dist.PrefixStore(prefix, store),
        rank=world.rank,
        world_size=world.size,
    )


def use(world: World) -> None:
    """The first calls, for which no other resources may be needed."""
    tensor = torch.ones(70_000)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.eq(world.size).all()
    if world.rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)


def scarcities() -> Iterator[Callable[[], Any]]:
    for count in range(12):
        yield functools.partial(descriptors_left, count)
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        for mib in (0, 1, 4, 7, 12):
            yield functools.partial(memory_left, kind, mib << 20)


def _create(world: World, poor: int, hosts: str) -> list[tuple[str, str]]:
    """Return what a rank reports of the creation of groups and of their first calls."""
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    torch.ones(70_000).eq(1).all()  # which takes memory once
    store = world.connect(60)
    if has_python_backends():  # c10d's operators and its recorder take memory once
        start(store, world, "first")
        use(world)
        dist.destroy_process_group()
    heard = []
    for index, scarce in enumerate(scarcities()):
        with scarce() if world.rank == poor else contextlib.nullcontext():
            created = report(lambda: start(store, world, f"try{index}"))  # noqa: B023
            used = report(lambda: use(world)) if dist.is_initialized() else "nothing"
        if dist.is_initialized():
            dist.destroy_process_group()
        heard.append((created, used))
    start(store, world, "last")  # with all that it needs
    use(world)
    return heard


def _open(world: World, poor: int, hosts: str) -> list[tuple[str, str]]:
    """The same of the groups that tables and MPI communicators open."""
    store = world.connect(60)
    sockets, settings = config.load(config.TransportSettings), config.load(config.Aggregation)
    heard = []
    for index, scarce in enumerate(scarcities()):
        ranks = Ranks(dist.PrefixStore(f"try{index}", store), world.rank, world.size)

        def open_and_use(ranks: Ranks = ranks) -> None:
            group = open_group(ranks, hosts, sockets, "127.0.0.1", FOREVER_S, settings)
            with contextlib.closing(group):
                group.run([Collective(Kind.barrier)], FOREVER_S, True)

        with scarce() if world.rank == poor else contextlib.nullcontext():
            heard.append((report(open_and_use), "nothing"))
    return heard


def _create_table(world: World, poor: int, hosts: str) -> list[tuple[str, str]]:
    """The same of tables of one node or two."""
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    start(world.connect(60), world, "first")
    heard = []
    for index, scarce in enumerate(scarcities()):
        made: list[Table] = []

        def create(made: list[Table] = made, name: str = f"try{index}") -> None:
            made.append(Table.create(8, 2, name=name))

        with scarce() if world.rank == poor else contextlib.nullcontext():
            heard.append((report(create), "nothing"))
        for table in made:
            table.close()
    with Table.create(8, 2) as table:
        table.push([0], [[1, 1]])
        table.sync()
        assert table.pull([0]).eq(world.size).all()
    return heard


LACKS = ("Too many open files", "Cannot allocate memory", "no memory", "Resource temporarily")


@pytest.mark.parametrize("make", [_create, _open, _create_table])
@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("poor", [0, 1])
def test_scarce_at_the_creation(
    run_processes: RunProcesses, poor: int, hosts: str, make: Callable[..., Any]
) -> None:
    results = run_processes(make, 2, poor=poor, hosts=hosts)
    assert all(result.ok for result in results), results
    failed = 0
    for case in zip(results[poor].value, results[1 - poor].value, strict=True):
        for ours, theirs in zip(*case, strict=True):
            assert (ours == "nothing") == (theirs == "nothing"), case
            if ours != "nothing":
                failed += 1
                assert any(lack in ours for lack in LACKS), case
                assert "mounted" not in ours, case
                if "the segment" not in theirs and "that segment" not in theirs:  # closed already
                    assert f"rank {poor}" in theirs, case
                    assert any(lack in theirs for lack in LACKS), case
    assert failed >= 3, results[poor].value


def _create_without_threads(world: World, poor: int, hosts: str) -> str:
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    store = world.connect(60)
    "localhost".encode("idna")  # which imports, and the user may not read the code
    os.setresuid(USER, USER, USER)
    assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE, as after an execve
    with limited(resource.RLIMIT_NPROC, 1) if world.rank == poor else contextlib.nullcontext():
        return report(lambda: start(store, world, "group"))


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without processes")
def test_no_threads_at_the_creation(run_processes: RunProcesses, hosts: str) -> None:
    results = run_processes(_create_without_threads, 2, poor=1, hosts=hosts)
    assert all(result.ok for result in results), results
    for result in results:
        assert "starting a thread: Resource temporarily unavailable" in result.value, results
        assert "ulimit -u" in result.value, results
    assert "rank 1 cannot be in the group" in results[0].value, results


def _create_without_memfd(world: World, hosts: str) -> None:
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    deny(MEMFD_CREATE[os.uname().machine])
    with pytest.raises(PermissionError):
        os.memfd_create("test")
    before = set(os.listdir("/dev/shm"))
    start(world.connect(60), world, "group")
    use(world)
    segment = Segment.create(1 << 20)
    assert Segment.attach(segment.address).size_bytes == 1 << 20
    with pytest.raises(SegmentError, match=r"memfd_create: .*/dev/shm.*or set TMPDIR"):
        Segment.create(1 << 50)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_without_memfd(run_processes: RunProcesses, hosts: str) -> None:
    results = run_processes(_create_without_memfd, 2, hosts=hosts)
    assert all(result.ok for result in results), results
