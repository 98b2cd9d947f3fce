"""The command as a user runs it: in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchrelay import __version__


def torchrelay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from torchrelay.cli import main; main()", *arguments]
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
        "MPI",
        "CUDA",
        "XDP",
        "huge pages",
        "limits",
    ):
        assert subject in done.stdout


def test_doctor_survives_a_broken_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrelay.cli import doctor as command  # type: ignore[attr-defined]

    module = sys.modules[command.__module__]

    def _broken() -> object:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(module, "_CHECKS", (_broken, module._cores))
    findings = list(module.examine())
    assert findings[0].status == "missing"
    assert "ZeroDivisionError: oops" in findings[0].found
    assert findings[1].subject == "cores"
