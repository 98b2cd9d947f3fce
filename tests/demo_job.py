"""The command ``torchrelay demo`` for tests, whose processes all end with the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["started"]

_COMMAND = [sys.executable, "-c", "from torchrelay.cli import main; main()", "demo"]


@contextmanager
def started(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Run the demo; end it with the block. Its ranks are in sessions of their own, so it is
    torchrun that must end them: within 30 s.
    """
    with subprocess.Popen(
        [*_COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    ) as job:
        try:
            yield job
        finally:
            job.terminate()
            try:
                job.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                job.kill()
