"""Jobs that keep checkpoints in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memory_jobs import end_servers


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The variables of jobs, whose memory servers have sockets in a folder; none is left there."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield {"TMPDIR": str(folder), "TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S": "2"}
    end_servers()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ckpt")
