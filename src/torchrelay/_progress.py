"""Progress of a save or load: a bar in the terminal, or a callback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchrelay.errors import UnavailableError

__all__ = ["Progress", "no_progress", "tracking"]

Progress = bool | Callable[[int, int], None]


@contextmanager
def tracking(
    progress: Progress, total_bytes: int, what: str, *, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Return a function to call with each number of bytes done, from any thread.

    Args:
        progress: True for a bar, False for nothing, or a function (bytes done, bytes in all).
        total_bytes: what this rank does in all.
        what: the bar's label.
        shown: whether this rank shows a bar; one of them does.
    """
    if progress is False or (progress is True and not shown):
        yield no_progress
    elif progress is True:
        try:
            from rich import progress as bars  # noqa: PLC0415 - takes a while, and few ask for it
        except ModuleNotFoundError as error:
            raise UnavailableError(
                "a progress bar needs rich: pip install rich (extra [cli])"
            ) from error

        columns = bars.Progress.get_default_columns()
        sizes = bars.DownloadColumn(), bars.TransferSpeedColumn()
        with bars.Progress(*columns, *sizes, transient=True) as bar:
            task = bar.add_task(what, total=total_bytes)
            yield lambda size_bytes: bar.advance(task, size_bytes)
    else:
        yield _counted(progress, total_bytes)


def no_progress(size_bytes: int) -> None:
    """Do nothing with the number of bytes done."""


def _counted(report: Callable[[int, int], None], total_bytes: int) -> Callable[[int], None]:
    lock, done = threading.Lock(), 0

    def advance(size_bytes: int) -> None:
        nonlocal done
        with lock:
            done += size_bytes
            report(done, total_bytes)

    return advance
