"""How reading and writing is run: in pieces, in threads, on memory by its address, without the
garbage collector. Imports no torch.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torchrelay._platform import usable_cores
from torchrelay.checkpoint._types import Sizes

__all__ = [
    "divided",
    "in_threads",
    "memory_at",
    "no_collection",
    "run_tasks",
    "usable_threads",
]

A = TypeVar("A")
R = TypeVar("R")


def usable_threads(threads: int | None) -> int:
    """Return ``threads`` or, by default, the number of cores that this process may use, at most 4:
    more do not help a disk.
    """
    return threads or min(4, usable_cores())


def run_tasks(tasks: Sequence[Callable[[], None]], threads: int) -> None:
    """Run all tasks; raise the error of the first that fails, and start no more then."""
    in_threads(lambda task: task(), tasks, threads)


def in_threads(function: Callable[[A], R], items: Sequence[A], threads: int) -> list[R]:
    """Return the result for each item, computed in threads; by the caller where the interpreter is
    ending, as in functions of ``atexit``, and starts none.
    """
    with ThreadPoolExecutor(threads, "torchrelay-checkpoint") as pool:
        try:
            apply = pool.map if len(items) > 1 and pool.submit(bool) else map
        except RuntimeError:
            apply = map
        return [*apply(function, items)]  # after an error, the pool cancels the rest


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would visit every object of the process again and again.

    Planning makes many objects, and none with cycles. Also a decorator.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return a writable view of memory of this process, which the caller keeps alive."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def divided(sizes: Sizes, limit_bytes: int) -> tuple[NDArray[np.intp], Sizes, Sizes]:
    """Divide ranges into pieces of ``limit_bytes``; return the range, offset in it, and size of
    each piece.
    """
    limit = np.uint64(limit_bytes)
    counts = ((sizes + limit - np.uint64(1)) // limit).astype(np.intp)
    index = np.repeat(np.arange(len(counts)), counts)
    in_range = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
    offsets = in_range.astype(np.uint64) * limit
    return index, offsets, np.minimum(sizes[index] - offsets, limit)
