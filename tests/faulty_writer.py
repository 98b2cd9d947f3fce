"""A writer process in which a system call fails; as a program, ``CALL NAME CODE FD``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from torchrelay.checkpoint.engine import _writer_process

__all__ = ["fail_in"]


def fail_in(call: str, name: str, code: int | None) -> None:
    """Let a system call fail in this process, on files with ``name`` in their names, with an
    error code; without one, the process is killed.
    """
    real = getattr(os, call)

    def failing(target: Any, *args: Any, **options: Any) -> Any:
        place = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if name in os.path.basename(place):
            if code is None:
                signal.raise_signal(signal.SIGKILL)
                raise AssertionError
            raise OSError(code, os.strerror(code))
        return real(target, *args, **options)

    setattr(os, call, failing)


if __name__ == "__main__":
    _call, _name, _code, _fd = sys.argv[1:]
    fail_in(_call, _name, int(_code) or None)
    _writer_process.main(int(_fd))
