"""Shared by all tests: test bodies that run in several processes at once, and a check that nothing
is left.

A test marked ``@pytest.mark.processes(n)`` runs in n fresh processes, as ranks 0 to n-1. It asks
for the fixture ``world`` (a :class:`torchrelay.world.World` whose ``connect()`` gives the store)
like any other fixture. It fails if any rank fails, and the report shows each failing rank's
traceback. Tests of a file that are marked ``@pytest.mark.processes(n, together=True)`` run one
after the other in the same n processes, which are started again only after a failure. The fixture
``run_processes`` runs a function of the test file, and tells how each rank ended: for tests that
kill some of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import namespaces
from ranks import Job, RankResult, RunProcesses, run_job, run_together
from torchrelay.world import World

# Examples are the same in every run, and may take as long as a busy machine makes them.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # which depends on what else runs
)
hypothesis.settings.load_profile("tests")

_OUTER_MOUNTS = pytest.StashKey[int]()
_IS_PRIVATE = pytest.StashKey[bool]()


@pytest.fixture
def run_processes(request: pytest.FixtureRequest) -> RunProcesses:
    """``run_processes(function, size, timeout_s=100, environ={}, **kwargs)`` tells how each rank
    ended.
    """

    def run(
        function: Callable[..., Any],
        size: int,
        timeout_s: float = 100,
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
    if marker.kwargs.get("together"):
        errors = _outcome_together(pyfuncitem, marker)
    else:
        (size,) = marker.args
        names = pyfuncitem._fixtureinfo.argnames
        kwargs = {name: pyfuncitem.funcargs[name] for name in names if name != "world"}
        job = Job(str(pyfuncitem.path), pyfuncitem.originalname, kwargs)
        errors = [
            None if result.ok else f"(exit code {result.exitcode})\n{result.error}"
            for result in run_job(job, size, marker.kwargs.get("timeout_s", 100))
        ]
    failures = [f"--- rank {rank} {error}" for rank, error in enumerate(errors) if error]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return True


_TOGETHER = pytest.StashKey[dict[str, list[str | None]]]()


def _outcome_together(pyfuncitem: pytest.Function, marker: pytest.Mark) -> list[str | None]:
    """Return each rank's error, after running all tests of the file that share the ranks."""
    outcomes = pyfuncitem.session.stash.setdefault(_TOGETHER, {})
    if pyfuncitem.nodeid not in outcomes:
        items = [
            item
            for item in pyfuncitem.session.items
            if isinstance(item, pytest.Function)
            and item.path == pyfuncitem.path
            and item.get_closest_marker("processes") == marker
        ]
        jobs = [
            Job(str(item.path), item.originalname, item.callspec.params)
            if hasattr(item, "callspec")
            else Job(str(item.path), item.originalname, {})
            for item in items
        ]
        errors = run_together(jobs, marker.args[0], marker.kwargs.get("timeout_s", 100))
        outcomes.update(zip([item.nodeid for item in items], errors, strict=True))
    return outcomes[pyfuncitem.nodeid]


_PRIVATE_FOLDERS = ("/dev/shm", "/run/netns")


# Seconds that each group of tests took where they were recorded, by ``--record``.
_DURATIONS = Path(__file__).parent / "durations.json"


def _group(nodeid: str) -> str:
    """Return what a test shares its worker with: tests whose ranks start together, or its file."""
    launch = re.search(r"\[(openmpi|mpich|gloo|sml|threads)-\d+", nodeid)
    return f"{launch.group()}]" if launch else nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sanitize", action="store_true", help="build the native tests with sanitizers"
    )
    parser.addoption(
        "--record", action="store_true", help=f"write what tests took to {_DURATIONS.name}"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sanitizer" in metafunc.fixturenames:
        sanitizers = (
            ["address,undefined", "thread"] if metafunc.config.option.sanitize else ["none"]
        )
        metafunc.parametrize("sanitizer", sanitizers, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest come first, so that no worker has one left at the end.
    seconds = json.loads(_DURATIONS.read_text()) if _DURATIONS.exists() else {}
    items.sort(key=lambda item: -seconds.get(_group(item.nodeid), 0))
    for item in items:
        # Ranks have a limit of their own, and the first test of those that share ranks runs all.
        if item.get_closest_marker("processes") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Return a scheduler that keeps a file in one worker, and tests whose ranks start together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


class _Recorder:
    """Adds up the seconds of each group, and writes those that matter for the order."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_group(report.nodeid)] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        recorded = {group: round(s) for group, s in self._seconds.most_common() if s >= 1}
        _DURATIONS.write_text(json.dumps(recorded, indent=1) + "\n")


def _take_share_of_cores() -> None:
    """Keep this worker's processes off the cores of others.

    Ranks wait for each other actively, which would delay those of other workers.
    """
    cores = sorted(os.sched_getaffinity(0))
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    shares = min(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), len(cores))
    os.sched_setaffinity(0, cores[worker % shares :: shares])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give this process and its children private copies of the folders that the leak check looks
    at.

    They are in a mount namespace of their own, so what other programs do there is not seen, and
    what a killed test run leaves there ends with it. It takes root; without it, see
    :func:`_left_behind`.
    """
    if config.option.record and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Recorder())
    if "PYTEST_XDIST_WORKER" in os.environ:
        # It ignores interrupts, which processes of the tests would inherit.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _take_share_of_cores()
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
