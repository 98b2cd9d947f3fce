"""The demo on a small graph, as a user runs it: what it learns, and when results are
reproducible.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from demo_job import started
from facts import write_facts
from namespaces import missing
from torchrelay.demo.code_graph import split_facts

# A process that imports torch starts slowly where many others run.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """Addition of 1 to 6 modulo 40, which rotations in the complex plane express exactly."""
    facts = [(f"n{n}", f"plus {k}", f"n{(n + k) % 40}") for n in range(40) for k in range(1, 7)]
    for split, part in split_facts(facts, 0.1, seed=0).items():
        write_facts(tmp_path / f"{split}.txt", part)
    return tmp_path


_SMALL = ("--epochs", "40", "--dim", "16", "--batch-size", "100", "--regularisation", "0.001")


def run_demo(sums: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    paths = ["--data", str(sums), "--report", str(sums / "report.html")]
    with started(*paths, *_SMALL, *arguments, **{"COLUMNS": "120", **environ}) as job:
        output, errors = job.communicate(timeout=360)
    return subprocess.CompletedProcess(job.args, job.returncode, output, errors)


def figures(output: str) -> dict[str, list[float]]:
    """The lines of the table of metrics: questions, MRR, Hits@1, 3, 10."""
    lines = (re.findall(r"[^│]+", line) for line in output.splitlines() if line.startswith("│"))
    rows = {cells[0].strip(): cells[1:] for cells in lines if len(cells) == 6}
    return {
        name: [float(cell.replace(",", "")) for cell in rows[name]]
        for name in rows
        if name.startswith(("valid", "test"))
    }


_FRAME = """<!doctype html><title></title>
<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{page}"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const root = frame.contentDocument.documentElement;
  document.title = root.scrollWidth + " " + root.scrollHeight;
}};
</script>
"""


def test_two_processes_learn_addition(sums: Path, tmp_path: Path) -> None:
    """Their updates of the table arrive in any order, so two runs differ in the last digits and
    what follows.
    """
    result = run_demo(sums, TMPDIR=str(tmp_path), COLUMNS="80")
    assert result.returncode == 0, result.stderr
    assert "epoch 40 of 40" in result.stdout
    assert "NOT EQUAL" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    words = set(result.stdout.split())  # none is broken
    for text in ("load it, the model not initialised", "torch.load; equal bit for bit"):
        assert set(text.split()) <= words
    assert {"serve:", "switch", "nn.Embedding,", "nn.all_reduce,"} <= words
    assert not list(tmp_path.glob("torchrelay-demo-*"))
    found = figures(result.stdout)
    assert found["test"][1] > 0.9
    assert found["test"][1] > 3 * found["test, most frequent answer"][1]
    calibrated = re.search(
        r"likelihood on valid ([\d.]+), then ([\d.]+)", " ".join(result.stdout.split())
    )
    assert calibrated is not None and float(calibrated[2]) <= float(calibrated[1])
    check_page(sums / "report.html")


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_gradients_of_two_hosts_are_summed_by_a_switch(sums: Path) -> None:
    result = run_demo(sums, "--hosts", "2", "--nproc", "1", "--no-serve")
    assert result.returncode == 0, result.stdout + result.stderr
    switch = re.search(r"^switch: ([\d,]+) packets in, ([\d,]+) sums", result.stdout, re.MULTILINE)
    assert switch is not None and int(switch[2].replace(",", "")) > 100
    assert figures(result.stdout)["test"][1] > 0.7  # rows arrive in another order each time
    page = (sums / "report.html").read_text()
    assert "sent through switch" in page and "sent through tcp" in page


_WITHOUT_BRIDGES = """
from torchrelay.demo import hosts
from torchrelay.errors import UnavailableError
hosts._BRIDGE = "echo Operation not supported >&2; exit 2"
try:
    hosts.run_on_hosts(2, [], [], {})
except UnavailableError as error:
    print(error)
"""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_namespaces_without_bridges_are_refused() -> None:
    command = [sys.executable, "-c", _WITHOUT_BRIDGES]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "no bridge can be made" in said and "Operation not supported" in said


def check_page(path: Path) -> None:
    """Look at the page as a desktop and a phone show it: nothing is wider than the window."""
    page = path.read_text()
    for text in ("Mean loss", "MRR", "calibrate by mpi", "torch.load", "peak memory", "computes"):
        assert text in page
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    for width in (1280, 390) if browser else ():
        # In a frame, because a window cannot be narrower than 500 pixels.
        frame = path.with_name("frame.html")
        frame.write_text(_FRAME.format(width=width, page=html.escape(page)))
        shown = subprocess.run(
            [
                str(browser), "--headless", "--no-sandbox", "--disable-gpu",
                f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", frame.as_uri(),
            ],
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        found = re.search(r"<title>(\d+) (\d+)</title>", shown.stdout)
        assert found is not None and int(found[1]) <= width and int(found[2]) > 500, shown.stdout


def test_one_process_runs_the_same_code_and_says_the_same_twice(sums: Path) -> None:
    results = [run_demo(sums, "--nproc", "1", "--no-serve") for _ in range(2)]
    for result in results:
        assert result.returncode == 0, result.stderr
        assert "save a checkpoint" in result.stdout and "serve" not in result.stdout
        assert figures(result.stdout)["test"][1] > 0.9
    first, second = (
        [line for line in result.stdout.splitlines() if line.startswith("epoch")]
        for result in results
    )
    assert first and first == second
    assert figures(results[0].stdout) == figures(results[1].stdout)
