"""Building elsewhere than on Linux, and running without the packages of an extra."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.errors import UnavailableError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "absent"),
    [("cli", "typer"), ("cli", "rich"), ("demo.options", "typer")],
)
def test_the_command_and_the_demo_name_their_extra(module: str, absent: str) -> None:
    code = (
        "import sys, importlib.abc\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {absent!r}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"import torchrelay.{module}\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert f"needs {absent}: pip install typer rich (extra [cli])" in result.stderr


def test_metrics_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # its import fails
    monkeypatch.delitem(sys.modules, "torchrelay.metrics", raising=False)
    with pytest.raises(
        UnavailableError, match=r"pip install prometheus-client \(extra \[metrics\]"
    ):
        importlib.import_module("torchrelay.metrics")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_other_systems_than_linux_are_refused_in_a_sentence(tmp_path: Path) -> None:
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DCMAKE_SYSTEM_NAME=FreeBSD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    text = " ".join(result.stderr.split())
    assert "The native core of TorchRelay runs on Linux only" in text and "On FreeBSD" in text
    assert "-C wheel.cmake=false" in text
