"""Builds the native core's own tests, plain and under sanitizers, and runs each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.transport import zmq_library_path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "native" / "tests").glob("*_test.cc"))
# cmake and ninja come with the environment's packages, which need not be activated.
TOOLS_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    cmake, ninja = (shutil.which(name, path=TOOLS_PATH) for name in ("cmake", "ninja"))
    assert cmake and ninja, (
        "cmake and ninja are packages of the dev environment: pip install -e .[dev]"
    )
    folder = ROOT / "build" / f"native-{request.param.replace(',', '-')}"
    configure = [cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    options = [
        f"-DTORCHRELAY_SANITIZE={request.param}",
        "-DTORCHRELAY_PYTHON=OFF",
        "-DTORCHRELAY_TESTS=ON",
    ]
    for command in ([*configure, *options], [cmake, "--build", folder]):
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
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
