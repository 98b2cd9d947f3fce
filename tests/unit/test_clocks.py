"""A clock that is set while a job runs changes no wait: deadlines are on monotonic clocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchrelay

PACKAGE = Path(torchrelay.__file__).parent
NATIVE = PACKAGE.parent.parent / "native"

# What is dated for people and other programs, by file, and how often.
DATED = {
    "checkpoint/storage/_catalog.py": 1,  # a commit, which is dated after those before it
    "checkpoint/_checkpointer.py": 1,  # a checkpoint in memory
    "switching/daemon/_daemon.py": 1,  # a snapshot of the status
    "switching/daemon/_dispatcher.py": 1,  # a request in the history
    "switching/http/_endpoints.py": 1,  # a model's last inference
    "switching/http/_openai.py": 1,  # an answer, as its clients expect
}


def test_the_wall_clock_only_dates_things() -> None:
    wall = re.compile(r"\btime\.time(_ns)?\(|datetime\.(utc)?now\(|date\.today\(")
    found = {
        path.relative_to(PACKAGE).as_posix(): len(wall.findall(path.read_text()))
        for path in PACKAGE.rglob("*.py")
    }
    assert {name: count for name, count in found.items() if count} == DATED


@pytest.mark.skipif(not NATIVE.exists(), reason="needs the sources")
def test_the_native_core_has_no_wall_clock() -> None:
    wall = re.compile(
        r"system_clock|CLOCK_REALTIME|gettimeofday|high_resolution_clock|\btime\(nullptr"
    )
    sources = [path for path in NATIVE.rglob("*") if path.suffix in (".cc", ".h", ".c")]
    assert len(sources) > 50
    assert not [str(path) for path in sources if wall.search(path.read_text())]
