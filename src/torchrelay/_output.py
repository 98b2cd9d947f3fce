"""Standard output of commands, which may be a full disk, or a pipe that nobody reads any more."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["OutputError", "guarded_stdout", "optional_output"]


class OutputError(Exception):
    """Standard output could not be written; what follows is dropped. Not an `OSError`, which rich
    and typer handle in their own ways.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"standard output cannot be written: {error.strerror}; make space, or redirect it "
            "elsewhere"
        )
        self.is_broken_pipe = isinstance(error, BrokenPipeError)

    @property
    def exit_code(self) -> int:
        """As of a program that the signal ended, as most are; else 1."""
        return 128 + signal.SIGPIPE if self.is_broken_pipe else 1

    def report(self, command: str, outcome: str = "") -> None:
        """Write one sentence to standard error, unless the reader has left, who knows."""
        if not self.is_broken_pipe:
            sys.stderr.write(f"{command}: {self}{outcome}\n")


class _Stdout(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            raise OutputError(error) from error


@contextlib.contextmanager
def guarded_stdout() -> Iterator[None]:
    """Let `sys.stdout` raise :class:`OutputError`, once, in the block or at its end."""
    old = sys.__stdout__
    if old is None or old is not sys.stdout:  # closed, or a test's
        yield
        return
    raw = _Stdout(old.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), old.encoding, old.errors, line_buffering=old.line_buffering
    )
    try:
        yield
    finally:
        guarded, sys.stdout = sys.stdout, old
        guarded.flush()


@contextlib.contextmanager
def optional_output(command: str) -> Iterator[None]:
    """Go on after the block if it could not write to standard output: report that once."""
    try:
        yield
    except OutputError as error:
        error.report(command, "; it goes on without")
