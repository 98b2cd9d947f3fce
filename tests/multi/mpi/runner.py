"""Tests that run on the ranks of MPI and of process groups, and look like any other test.

A function marked ``@mpi_test(sizes=(1, 2, 3))`` takes a communicator and runs on all ranks. It
becomes one pytest test for each backend (an MPI library, by mpirun; Gloo or ``sml``, by forked
ranks; threads of one process), number of ranks and case. Starting ranks takes longer than most
tests, so they start once for each backend and number of ranks: the first test to need them runs all
those of the session, and each test reports its own outcome. A test that ends the ranks is followed
by another start for those after it.

Open MPI is the one beside this Python. MPICH has an environment of its own, since both wheels
install an ``mpirun``: the one named by ``TORCHRELAY_TEST_MPICH``, or ``build/mpich`` in the
repository.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
LIBRARIES = ("openmpi", "mpich")
GROUPS = ("gloo", "sml")
REAL = (*LIBRARIES, *GROUPS)
THREADS = ("threads",)  # in memory: for derivatives and their order
SIZES = {
    "openmpi": (3,),
    "mpich": (2,),
    "gloo": (2,),
    "sml": (1, 2, 3, 5),
    "threads": (1, 2, 3, 5),
}
LAUNCH_S = 900  # for all tests of a number of ranks, with more ranks than cores
SCRIPT_S = 300  # for one script
LAUNCHES = 5  # of one library and number of ranks, when tests end the ranks
TIMEOUT_S = "400"
STARTED = "started "
Body = Callable[..., None]


@dataclass
class Finished:
    """How a job ended: its exit code, and all its output."""

    code: int
    output: str


@dataclass(frozen=True)
class Launch:
    """A library of MPI or a backend of c10d, and a number of ranks."""

    library: str
    size: int


@dataclass(frozen=True)
class Call:
    """A test function of a file with one of its cases, by name."""

    path: str
    function: str
    case: str


@dataclass
class MpiTest:
    """What the ranks need to know of a test function."""

    body: Body
    launches: list[Launch]
    cases: dict[str, dict[str, Any]]


Outcomes = dict[Call, list[str]]  # each rank's traceback, or ""

_outcomes = pytest.StashKey[dict[Launch, Outcomes]]()


def prefix(library: str) -> Path:
    """Return the environment of a backend; skip the test where there is none."""
    if library in (*GROUPS, *THREADS):
        return Path(sys.prefix)
    if library == "openmpi":
        found = Path(sys.prefix)
    else:
        found = Path(os.environ.get("TORCHRELAY_TEST_MPICH", REPOSITORY / "build" / "mpich"))
    if not (found / "bin" / "mpirun").exists():
        pytest.skip(
            f"no {library} in {found}; TORCHRELAY_TEST_MPICH names an environment that has mpich"
        )
    return found


def mpirun(
    library: str,
    size: int,
    *command: str,
    timeout_s: float = SCRIPT_S,
    **environ: str,
) -> Finished:
    """Run ``python command...`` as ``size`` ranks; ranks that outlive ``timeout_s`` are killed."""
    if library in GROUPS:
        return _run_group(library, size, *command, timeout_s=timeout_s, **environ)
    import preloaded

    where = prefix(library)
    scratch = tempfile.mkdtemp(prefix="mpi", dir="/tmp")  # short: it holds sockets
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": scratch,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # not /dev/shm, where killed ranks would leave it
        "OMPI_MCA_btl_sm_backing_directory": scratch,
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # also where two ranks share a core with others
        **environ,
    }
    arguments = [
        str(where / "bin" / "mpirun"),
        "-n",
        str(size),
        preloaded.python(str(where / "bin" / "python")),
        *command,
    ]
    segments = set(Path("/dev/shm").glob("mpich_shm_*"))
    process = subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 15)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
        output += f"\n(killed after {timeout_s:g} s)"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if process.returncode and library == "mpich":
            # Killed ranks leave theirs, and MPICH knows no other place.
            for segment in set(Path("/dev/shm").glob("mpich_shm_*")) - segments:
                segment.unlink(missing_ok=True)
    return Finished(process.returncode, output)


def _run_group(
    backend: str, size: int, *command: str, timeout_s: float, **environ: str
) -> Finished:
    """Run ``python command...`` as the ranks of a group, as torchrun would."""
    import preloaded
    from ranks import free_port

    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TEST_BACKEND": backend,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **environ,
    }
    with tempfile.NamedTemporaryFile("r+") as output:
        codes, is_late = _wait_for(
            [
                subprocess.Popen(
                    [preloaded.python(), *command],
                    env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(size)
            ],
            timeout_s,
        )
        late = f"\n(killed after {timeout_s:g} s)" if is_late else ""
        return Finished(max(codes), Path(output.name).read_text() + late)


def _wait_for(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> tuple[list[int], bool]:
    """Return the exit codes, and whether some were killed after ``timeout_s``."""
    deadline, is_late = time.monotonic() + timeout_s, False
    try:
        for process in ranks:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [abs(process.returncode) for process in ranks], is_late


SCRIPT_HEAD = """
import os, sys, time
import torch
from torchrelay import mpi
if "TEST_HOSTS" in os.environ:  # the name of each rank's
    os.environ["TORCHRELAY_HOST_ID"] = os.environ["TEST_HOSTS"][int(os.environ["RANK"])]
if "TEST_BACKEND" in os.environ:
    import torch.distributed as dist
    import torchrelay.aggregation
    dist.init_process_group(os.environ["TEST_BACKEND"])
comm = mpi.COMM_WORLD
x = torch.ones(3, requires_grad=True)

def say(text):
    print(f"rank {comm.rank}: {text}", flush=True)

def tell(what):
    open(f"{sys.argv[0]}.{what}", "w").close()

def wait_until_told(what):
    while not os.path.exists(f"{sys.argv[0]}.{what}"):
        time.sleep(0.05)

def end_together():  # of two ranks: mpirun kills the other when the first fails
    tell(comm.rank)
    wait_until_told(1 - comm.rank)
"""


def run_script(
    library: str,
    folder: Path,
    body: str,
    size: int = 3,
    timeout_s: str = "4",
    **environ: str,
) -> Finished:
    """Run a script as ``size`` ranks. It starts with ``SCRIPT_HEAD`` and must end by itself."""
    script = folder / "script.py"
    script.write_text(SCRIPT_HEAD + textwrap.dedent(body))
    environ["TORCHRELAY_MPI_TIMEOUT_S"] = timeout_s
    job = mpirun(library, size, str(script), timeout_s=SCRIPT_S, **environ)
    assert "killed after" not in job.output, job.output
    return job


def mpi_test(
    sizes: tuple[int, ...] = (1, 2, 3), on: Iterable[str] = REAL, **cases: Iterable[Any]
) -> Callable[[Body], Callable[..., None]]:
    """Return a decorator; see the module.

    Each backend of ``on`` runs those ``sizes`` that it has in ``SIZES``. A further argument, such
    as ``dtype=(torch.int8, torch.int16)``, makes one test for each of its values.
    """
    launches = [Launch(name, size) for name in on for size in sizes if size in SIZES[name]]
    assert launches, f"no backend of {on} runs any of {sizes} ranks"
    assert len(cases) <= 1, "one argument with cases"
    named = {
        str(value).removeprefix("torch."): {argument: value}
        for argument, values in cases.items()
        for value in values
    } or {"": {}}

    def decorate(body: Body) -> Callable[..., None]:
        parameters = [
            pytest.param(launch, case, id=f"{launch.library}-{launch.size}-{case}".strip("-"))
            for launch in launches
            for case in named
        ]

        @pytest.mark.timeout(LAUNCH_S + 60)
        @pytest.mark.parametrize(("launch", "case"), parameters)
        def test(launch: Launch, case: str, request: pytest.FixtureRequest) -> None:
            prefix(launch.library)
            every = request.session.stash.setdefault(_outcomes, {})
            if launch not in every:
                every[launch] = run(launch, calls(request.session.items, launch))
            errors = every[launch][Call(str(request.path), body.__name__, case)]
            failures = [f"--- rank {rank}\n{text}" for rank, text in enumerate(errors) if text]
            if failures:
                pytest.fail("\n".join(failures), pytrace=False)

        test.__doc__ = body.__doc__
        test.mpi_test = MpiTest(body, launches, named)  # type: ignore[attr-defined]
        return test

    return decorate


def calls(items: Iterable[pytest.Item], launch: Launch) -> list[Call]:
    """Return the tests of a session that run in a launch, file by file."""
    found = [
        Call(str(item.path), item.originalname, str(item.callspec.params["case"]))
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item.function, "mpi_test")
        and item.callspec.params["launch"] == launch
        and item.get_closest_marker("skip") is None
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    ]
    return sorted(found, key=lambda call: call.path)  # functions stay in the order of the file


def run(launch: Launch, todo: list[Call]) -> Outcomes:
    """Run tests as the ranks of one launch, or of a few if some end the ranks."""
    outcomes: Outcomes = {}
    for _ in range(LAUNCHES):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "calls.json").write_text(json.dumps([vars(call) for call in todo]))
            job = _start(launch, folder)
            ranks = [_read(Path(folder, f"{rank}.json"), job) for rank in range(launch.size)]
        left = "did not get there: " + job.output[-3000:]
        for position, call in enumerate(todo):
            outcomes[call] = [errs[position] if position < len(errs) else left for errs in ranks]
        todo = todo[max(1, *map(len, ranks)) :]
        if not todo or "killed after" in job.output or "did not end within" in job.output:
            break
    return outcomes


def _start(launch: Launch, folder: str) -> Finished:
    if launch.library in LIBRARIES:
        return mpirun(
            launch.library,
            launch.size,
            __file__,
            folder,
            timeout_s=LAUNCH_S,
            TORCHRELAY_MPI_TIMEOUT_S=TIMEOUT_S,
        )
    from ranks import Job, run_job

    environ = {"TORCHRELAY_MPI_TIMEOUT_S": TIMEOUT_S}
    if launch.library in THREADS:
        job = Job(__file__, "run_in_threads", {"folder": folder, "size": launch.size}, environ)
        results = run_job(job, 1, LAUNCH_S)
    else:
        arguments = {"folder": folder, "backend": launch.library}
        results = run_job(Job(__file__, "run_in_group", arguments, environ), launch.size, LAUNCH_S)
    errors = [result.error for result in results if result.error]
    return Finished(len(errors), "\n".join(errors))


def run_in_group(world: Any, folder: str, backend: str) -> None:
    """Run the tests as a rank of a process group."""
    import torch.distributed as dist

    import torchrelay.aggregation  # noqa: F401 - registers sml

    dist.init_process_group(backend, store=world.connect(), rank=world.rank, world_size=world.size)
    _main(folder, __name__)


def run_in_threads(world: Any, folder: str, size: int) -> None:
    """Run the tests as ranks that are threads."""
    modules = _prepare(folder, __name__)
    from multi.mpi.thread_transport import run_ranks
    from multi.mpi.threads import prepare_threads, start_rank

    def run_rank(comm: Any) -> None:
        start_rank(comm)
        _run_calls(folder, comm, modules)

    prepare_threads()
    for error in run_ranks(size, run_rank):
        if error is not None:
            raise error


def _read(file: Path, job: Finished) -> list[str]:
    """Return a rank's errors, the last of a test that ended the rank."""
    ended = json.dumps("the rank ended in it: " + job.output[-3000:])
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line.removeprefix(STARTED) or ended) for line in lines]


def _load(path: str) -> ModuleType:
    import importlib.util

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _prepare(folder: str, me: str) -> dict[str, ModuleType]:
    """Import the files of the tests, whose warnings are errors."""
    import warnings

    warnings.simplefilter("error")
    # torch's own use of it.
    warnings.filterwarnings("ignore", "`torch.jit.script")
    warnings.filterwarnings("ignore", "Guards may run slower")  # Python 3.13.0
    # torch.compile's own look.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(REPOSITORY / "tests"))
    sys.modules["multi.mpi.runner"] = sys.modules[me]
    calls = json.loads(Path(folder, "calls.json").read_text())
    return {path: _load(path) for path in dict.fromkeys(call["path"] for call in calls)}


def _main(folder: str, me: str) -> None:
    """Run the tests as one of the ranks."""
    modules = _prepare(folder, me)
    from torchrelay import mpi

    _run_calls(folder, mpi.COMM_WORLD, modules)


def _run_calls(folder: str, comm: Any, modules: dict[str, ModuleType]) -> None:
    from torchrelay import mpi
    from torchrelay.errors import PeerLostError

    with open(Path(folder) / f"{comm.rank}.json", "a", buffering=1) as results:
        for call in json.loads(Path(folder, "calls.json").read_text()):
            test: MpiTest = getattr(modules[call["path"]], call["function"]).mpi_test
            error = ""
            results.write(STARTED)
            results.flush()
            try:
                test.body(comm, **test.cases[call["case"]])
            except BaseException:
                error = traceback.format_exc()
            mpi.reset()
            results.write(json.dumps(error) + "\n")
            try:
                comm.Barrier()
            except PeerLostError:
                return  # another rank failed inside a communication; what follows cannot match


if __name__ == "__main__":
    _main(sys.argv[1], __name__)
