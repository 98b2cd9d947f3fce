"""What replaces the native core where it is not built: the same results, and refusals for the
rest.
"""

from __future__ import annotations

import ast
import ctypes
import enum
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tomli
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import torchrelay
import without_core
from torchrelay import _native, _platform
from torchrelay._pure import checksums, rows, twister
from torchrelay._pure.memory import SharedMemory
from torchrelay.errors import UnsupportedError

TESTS = Path(__file__).parents[1]
PACKAGE = Path(torchrelay.__file__).parent
STUB = ast.parse((PACKAGE / "_native.pyi").read_text())
needs_core = pytest.mark.skipif(not _platform.has_core, reason="needs the native core")


@pytest.fixture(scope="module")
def pure() -> ModuleType:
    """The module that is imported as ``_native`` where there is no extension module."""
    spec = importlib.util.spec_from_file_location("torchrelay_pure", PACKAGE / "_native.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_core
@pytest.mark.parametrize("by", [checksums._by_numpy, checksums._by_package])
def test_checksums_are_the_cores(by: Callable[[int, Any], int]) -> None:
    if by is checksums._by_package:
        pytest.importorskip("google_crc32c")
    random = np.random.default_rng(0)
    around = (256 << power for power in range(9))
    sizes = {*range(10), *(size + more for size in around for more in (-1, 0, 1)), (2 << 20) + 5}
    for size in sorted(sizes):
        data = random.integers(0, 256, size, dtype=np.uint8)
        begun = int(random.integers(0, 1 << 32))
        assert by(0, data) == _native.crc32c(data), size
        assert by(begun, data) == _native.crc32c(data, begun), size


@needs_core
def test_checksums_of_ranges_are_the_cores(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    file = tmp_path / "data"
    file.write_bytes(data.tobytes())
    starts = np.array([0, 64, 1000, 4990], np.uint64)
    addresses = starts + np.uint64(data.ctypes.data)
    for sizes in ([64, 900, 0, 10], [5, 1, 3990, 200]):  # the last is cut short by the file's end
        wanted = np.array(sizes, np.uint64)
        with file.open("rb") as opened:
            fd = opened.fileno()
            found = checksums.crc32c_of_file(fd, starts, wanted)
            assert found == _native.crc32c_of_file(fd, starts, wanted)
            parts = np.array([(3, 70, 500, 4995), (2, 30, 400, 5)], np.uint64)
            for of_file in (checksums.crc32c_of_file, _native.crc32c_of_file):
                target = np.zeros(5000, np.uint8)
                into = np.vstack([parts, parts[:1] + np.uint64(target.ctypes.data)])
                assert of_file(fd, starts, np.array([64, 936, 3990, 200], np.uint64), into)
                kept = np.concatenate(
                    [np.arange(one, one + size) for one, size in parts.T.tolist()]
                )
                assert np.array_equal(np.flatnonzero(target != 0), kept[data[kept] != 0])
                assert np.array_equal(target[kept], data[kept])
        inside = wanted[:3]
        assert checksums.crc32c_of_memory(addresses[:3], inside) == _native.crc32c_of_memory(
            addresses[:3], inside
        )
    for block in (1, 7, 4096, 9999):
        assert checksums.crc32c_blocks(data, block) == _native.crc32c_blocks(data, block)


@needs_core
@pytest.mark.parametrize("distance", [0, 1, 623, 624, 19936, 19937, 40000, 123456789, 2**40 + 5])
def test_the_twister_jumps_as_the_cores(distance: int) -> None:
    polynomial = twister.twister_polynomial(distance)
    assert polynomial == _native.twister_polynomial(distance)
    ours = np.random.default_rng(distance).integers(0, 1 << 32, 624, dtype=np.uint32)
    theirs = ours.copy()
    twister.twister_jump(ours, polynomial)
    _native.twister_jump(theirs, polynomial)
    assert np.array_equal(ours, theirs)


@needs_core
@pytest.mark.parametrize("payload_bytes", [0, 4, 248, 1024])
def test_rows_are_the_cores(payload_bytes: int) -> None:
    ours, theirs = rows.CallRows(3, payload_bytes), _native.CallRows(3, payload_bytes)
    assert ours.row_bytes == theirs.row_bytes
    content = np.random.default_rng(2).integers(0, 256, 3 * ours.row_bytes, dtype=np.uint8)
    numbers = [-1, 2**62, 5][: payload_bytes // 8]
    for one in (ours, theirs):
        ctypes.memmove(one.received, content.ctypes.data, content.nbytes)
        one.write_numbers(2**63 + 1, numbers)
        one.write_bytes(2**64 - 1, content.ctypes.data, payload_bytes)
    assert ctypes.string_at(ours.sent, ours.row_bytes) == ctypes.string_at(
        theirs.sent, theirs.row_bytes
    )
    assert ours.numbers(len(numbers)) == theirs.numbers(len(numbers))
    assert [ours.digest(rank) for rank in range(3)] == [theirs.digest(rank) for rank in range(3)]
    assert ours.first_difference() == theirs.first_difference() == 0
    for one in (ours, theirs):
        for rank in range(3):
            ctypes.memmove(one.received + rank * one.row_bytes, one.sent, one.row_bytes)
    assert ours.first_difference() == theirs.first_difference() == -1
    with pytest.raises(ValueError, match="a row holds"):
        ours.write_numbers(0, [0] * 200)


def test_shared_memory_is_mapped_from_its_descriptor() -> None:
    memory = SharedMemory.create(5000, "test")
    other = SharedMemory.from_fd(memory.fd, True)
    written = torch.frombuffer(memory, dtype=torch.uint8)
    written[:] = 7
    assert np.frombuffer(other, "u1").tolist() == [7] * 5000
    assert (other.size_bytes, other.read_only) == (5000, True)
    with pytest.raises(TypeError):
        other[0] = 1


def _declared() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and methods that the stub declares."""
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        for one in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(one, ast.FunctionDef) and not one.name.startswith("__"):
                assert isinstance(node, ast.ClassDef)
                yield f"{node.name}.{one.name}", one


def test_what_replaces_the_core_is_called_as_the_core(pure: ModuleType) -> None:
    compared = 0
    for name, node in _declared():
        owner, _, method = name.rpartition(".")
        found: Any = getattr(getattr(pure, owner) if owner else pure, method, None)
        is_ours = found is not None and (owner or name) in pure.__all__
        if is_ours and not isinstance(found, property) and hasattr(found, "__code__"):
            parameters = [one for one in inspect.signature(found).parameters if one != "self"]
            assert parameters == [one.arg for one in node.args.args if one.arg != "self"], name
            compared += 1
    assert compared > 15


def test_the_cores_enumerations_are_there_without_it(pure: ModuleType) -> None:
    enumerations = [
        (name, kind)
        for name, kind in vars(_native).items()
        if isinstance(kind, type) and issubclass(kind, enum.Enum)
    ]
    assert len(enumerations) > 5
    for name, kind in enumerations:
        found = getattr(pure, name)
        assert {one.name: one.value for one in found} == {one.name: one.value for one in kind}
    assert pure.SWITCH_UDP_PORT == _native.SWITCH_UDP_PORT


def test_all_else_is_refused_by_name(pure: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "has_core", False)
    refused = 0
    for name, _ in _declared():
        owner, _, method = name.rpartition(".")
        if (owner or name) not in pure.__all__:
            call = getattr(getattr(pure, owner) if owner else pure, method)
            with pytest.raises(UnsupportedError, match=rf"{re.escape(name)} needs .* native core"):
                call(1, key=2)
            refused += 1
    assert refused > 100
    with pytest.raises(UnsupportedError, match="TcpNetwork needs TorchRelay's native core"):
        pure.TcpNetwork(token=b"")


# Of the system's name, and of what only Linux has: asked for in _platform.py only.
NAMES = {"platform", "uname"}
COMPONENTS = ("checkpoint", "deferred", "training", "mpi", "compat", "_pure")
LINUX = re.compile(
    r"memfd|/proc/|/dev/shm|sched_getaffinity|posix_fallocate|renameat|O_TMPFILE|MADV_|madvise|"
    r"pidfd|eventfd|prctl|SO_PEERCRED|sync_file_range|CDLL"
)


def test_only_one_module_asks_what_the_system_is() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "_platform.py":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                asked = ast.unparse(node)
                # Text of reports is no decision.
                if asked in ("sys.platform", "os.uname", "os.name", "platform.system"):
                    inside = [one for one in ast.walk(tree) if isinstance(one, ast.FormattedValue)]
                    values = [one for each in inside for one in ast.walk(each)]
                    assert node in values, f"{path}:{node.lineno}: {asked}"
        if path.relative_to(PACKAGE).parts[0] in COMPONENTS:
            found = LINUX.search(path.read_text())
            assert found is None, f"{path}: {found}"


def test_the_documentation_says_what_is_different_without_a_capability() -> None:
    page = (TESTS.parent / "docs" / "compatibility.md").read_text()
    for one in _platform.CAPABILITIES:
        assert f"| {one.name} | {one.without} |" in page


def test_windows_is_refused_when_it_is_installed() -> None:
    with (TESTS.parent / "pyproject.toml").open("rb") as file:
        needed = [Requirement(text) for text in tomli.load(file)["project"]["dependencies"]]
    for system, is_supported in (("linux", True), ("darwin", True), ("win32", False)):
        chosen = SpecifierSet()
        for one in needed:
            applies = one.marker is None or one.marker.evaluate(
                {"sys_platform": system, "extra": ""}
            )
            if one.name == "torch" and applies:
                chosen &= one.specifier
        assert any(f"2.{minor}.0" in chosen for minor in range(11, 16)) == is_supported


@pytest.fixture(scope="module")
def without_core_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Run ``without_core.py`` in a copy of the package without the extension module, where what
    only Linux has is missing.
    """
    copied = tmp_path_factory.mktemp("copy") / "site-packages" / "torchrelay"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("*.so", "__pycache__"))

    def run(*arguments: str) -> None:
        command = [sys.executable, without_core.__file__, str(copied.parent), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr

    return run


@needs_core
def test_checkpoints_move_between_the_two_bit_for_bit(
    tmp_path: Path, without_core_run: Callable[..., None]
) -> None:
    ours, theirs = tmp_path / "native", tmp_path / "pure"
    without_core_run("write", str(theirs))
    without_core.write(ours)
    assert without_core.content(ours) == without_core.content(theirs)
    without_core.read(theirs)
    without_core_run("read", str(ours))


def test_what_needs_the_core_is_refused_when_it_is_used_not_when_it_is_imported(
    without_core_run: Callable[..., None],
) -> None:
    without_core_run("refused")
