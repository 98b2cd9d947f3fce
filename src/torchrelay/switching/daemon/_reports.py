"""What takes seconds says so, in the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from torchrelay.errors import OperationTimeoutError

__all__ = ["REPORT_S", "wait_reporting"]

T = TypeVar("T")

#: Between two lines.
REPORT_S = 5.0
_log = logging.getLogger("torchrelay.switching")


def wait_reporting(future: Future[T], timeout_s: float | None, state: Callable[[], str]) -> T:
    """Return the result of `future`; meanwhile, log its `state` every few seconds.

    Raises:
        OperationTimeoutError: there is none after `timeout_s`.
    """
    start = time.monotonic()
    end = math.inf if timeout_s is None else start + timeout_s
    while True:
        left_s = end - time.monotonic()
        try:
            return future.result(max(0.0, min(REPORT_S, left_s)))
        except futures.TimeoutError:  # not the builtin one before Python 3.11
            if future.done():
                raise
            if left_s <= REPORT_S:
                raise OperationTimeoutError(
                    f"{state()}; it was not done after {timeout_s:g} s"
                ) from None
            _log.info("%s, after %.0f s", state(), time.monotonic() - start)
