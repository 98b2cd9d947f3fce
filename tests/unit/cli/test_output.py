"""Each command where its output cannot be written: a full disk, a reader that has left, nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import preloaded
from ranks import free_port
from torchrelay.checkpoint import save
from waiting import eventually

COMMANDS = [
    "--version",
    "--help",
    "doctor",
    "checkpoint",
    "checkpoint ls {steps}",
    "checkpoint inspect {steps}/step-1",
    "checkpoint verify {steps}/step-1",
    "checkpoint convert {steps}/step-1 {new}",
    "checkpoint memory ls",
    "key create {new}",
]
SERVICES = {
    "serve --models {models} --workers 1 --port {port}": "v2/health/live",
    "switch --port 0 --metrics-port {port}": "metrics",
    "switch --port 0 --metrics-port {port} --json": "metrics",
}
# By the kind of the output: the exit code of a command, and a part of what it writes about it.
OUTPUTS = {"full": (1, "No space left on device"), "left": (141, ""), "closed": (0, "")}


@contextlib.contextmanager
def running(
    command: list[str], output: str, folder: Path, program: str = ""
) -> Iterator[subprocess.Popen[str]]:
    program = program or "from torchrelay.cli import main; main()"
    if output == "closed":
        program = f"import os, sys; sys.stdout = sys.__stdout__ = os.close(1); {program}"
    reader, writer = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    process = subprocess.Popen(
        [preloaded.python(), "-c", program, *command],
        stdout=full if output == "full" else writer,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
    )
    os.close(full)
    os.close(writer)
    if output == "left" and set(command) & {"serve", "switch"}:
        os.read(reader, 1)  # as `head -1`
    os.close(reader)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    save({"x": torch.ones(2)}, folder / "step-1", no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("command", "output"),
    [("demo", "full"), ("--version", "closed"), ("checkpoint ls {steps}", "closed")]
    + [(command, output) for command in COMMANDS for output in ("full", "left")],
)
def test_a_command_ends_without_a_traceback(
    command: str, output: str, steps: Path, tmp_path: Path
) -> None:
    words = command.format(steps=steps, new=tmp_path / "new").split()
    with running(words, output, tmp_path) as process:
        _, errors = process.communicate(timeout=100)
    code, reason = OUTPUTS[output]
    assert process.returncode == code, errors
    assert (errors.count("\n"), reason in errors) == (bool(reason), True), errors


@pytest.mark.parametrize("output", ["full", "left"])
@pytest.mark.parametrize("command", SERVICES)
def test_a_service_goes_on(command: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    port = free_port()

    def answers() -> bool:
        assert process.poll() is None
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{SERVICES[command]}", timeout=10)
        except OSError:
            return False
        return True

    with running(command.format(port=port, models=tmp_path).split(), output, tmp_path) as process:
        if output == "full":
            assert process.stderr is not None
            assert "No space left on device" in process.stderr.readline()
        eventually(answers)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors and "it goes on without" not in errors  # twice


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_demo_goes_on(output: str, tmp_path: Path) -> None:
    program = (
        "from torchrelay._output import guarded_stdout as guarded\n"
        "from torchrelay.demo.report import Report\n"
        "with guarded():\n"
        "    report = Report()\n"
        "    report.line('one'), report.stage('two', 1.0), report.print_stages()\n"
    )
    program = program if output != "closed" else f"exec({program!r})"
    with running([], output, tmp_path, program) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert errors.count("\n") == bool(OUTPUTS[output][1]), errors
