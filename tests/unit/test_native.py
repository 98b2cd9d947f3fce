"""Builds the native core's own tests, plain and under sanitizers, and runs each."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from torchrelay.transport import zmq_library_path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "native" / "tests").glob("*_test.cc"))


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    folder = ROOT / "build" / f"native-{request.param.replace(',', '-')}"
    configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DTORCHRELAY_SANITIZE={request.param}"]
    subprocess.run(
        [*configure, "-DTORCHRELAY_PYTHON=OFF", "-DTORCHRELAY_TESTS=ON"], check=True, capture_output=True
    )
    result = subprocess.run(["cmake", "--build", folder], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_native(build: Path, source: Path) -> None:
    environ = {
        **os.environ,
        "TORCHRELAY_LIBZMQ": zmq_library_path(),
        "TSAN_OPTIONS": f"suppressions={ROOT / 'native' / 'tests' / 'tsan.supp'}",
    }
    result = subprocess.run(
        [build / source.stem], check=False, capture_output=True, text=True, timeout=600, env=environ
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 failed" in result.stdout
