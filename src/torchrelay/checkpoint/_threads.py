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
    """Run all tasks; after an error, start no more, and raise the first in the order of tasks."""
    if len(tasks) == 1:
        tasks[0]()
        return
    todo = iter(enumerate(tasks))  # which all threads take from
    errors: dict[int, BaseException] = {}

    def work() -> None:
        for index, task in todo:
            if errors:
                return
            try:
                task()
            except BaseException as error:
                errors[index] = error

    with ThreadPoolExecutor(threads, "torchrelay-checkpoint") as pool:
        futures = [pool.submit(work) for _ in tasks[:threads]]
        try:
            for future in futures:
                future.result()
        except BaseException as error:  # of this thread, such as KeyboardInterrupt
            errors[-1] = error
    if errors:
        first = errors[min(errors)]
        errors.clear()  # whose tracebacks refer to the frames that have `errors`
        raise first
