"""Threads that read or write files. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

__all__ = ["run_tasks", "usable_threads"]


def usable_threads(threads: int | None) -> int:
    """Return ``threads`` or, by default, the number of cores that this process may use, at most 4:
    more do not help a disk.
    """
    return threads or min(4, len(os.sched_getaffinity(0)))


def run_tasks(tasks: Sequence[Callable[[], None]], threads: int) -> None:
    """Run all tasks; the first error, in their order, cancels the rest."""
    if len(tasks) == 1:
        tasks[0]()
        return
    with ThreadPoolExecutor(threads, "torchrelay-checkpoint") as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
