"""Builds the native core's own tests and runs each; with ``--sanitize``, under sanitizers."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchrelay.transport import libssl_path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "native" / "tests").glob("*_test.cc"))
# cmake and ninja come with the environment's packages, which need not be activated.
TOOLS_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def is_of_this(cache: Path) -> bool:
    """Whether the editable install of this environment wrote it, not a build by pip in one of its
    own, which is gone.
    """
    return f"CMAKE_PREFIX_PATH:PATH={sys.prefix}/" in cache.read_text()


@pytest.fixture(scope="module")
def build(sanitizer: str) -> Path:
    """Return the folder with the programs, built without Python for a sanitizer, or else beside the
    module, with the same library. Of the test workers that share the folder, one builds at a time.
    """
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    cmake, ninja = (shutil.which(name, path=TOOLS_PATH) for name in ("cmake", "ninja"))
    assert cmake and ninja, (
        "cmake and ninja are packages of the dev environment: pip install -e .[dev]"
    )
    folder = ROOT / "build" / f"native-{sanitizer.replace(',', '-')}"
    options = ["-DTORCHRELAY_PYTHON=OFF"]
    if sanitizer != "none":
        options.append(f"-DTORCHRELAY_SANITIZE={sanitizer}")
    elif caches := [path for path in ROOT.glob("build/cp*/CMakeCache.txt") if is_of_this(path)]:
        folder, options = max(caches, key=lambda path: path.stat().st_mtime).parent, []
    configure = [cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    commands: tuple[list[Any], ...] = (
        [*configure, *options],
        [cmake, "--build", folder, "--target", "native_tests"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in commands:
            result = subprocess.run(command, check=False, capture_output=True, text=True)
            assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_includes_point_down() -> None:
    below = {
        "core": {"core"},
        "net": {"core", "net"},
        "group": {"core", "net", "group"},
        "parameters": {"core", "net", "parameters"},
        "switch": {"core", "switch"},
    }
    found: dict[str, set[str]] = {folder: set() for folder in below}
    for folder, included in found.items():
        for path in (ROOT / "native" / folder).iterdir():
            included.update(re.findall(r'#include "(?:(\w+)/)?', path.read_text()))
    assert found == below


@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_native(build: Path, source: Path) -> None:
    environ = {
        **os.environ,
        "TORCHRELAY_LIBSSL": libssl_path(),
        "TSAN_OPTIONS": f"suppressions={ROOT / 'native' / 'tests' / 'tsan.supp'}",
    }
    result = subprocess.run(
        [build / "native_tests", source.stem],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env=environ,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 failed" in result.stdout
