"""Waiting for other processes, with a timeout that names who is missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torchrelay.errors import OperationTimeoutError

__all__ = ["FOREVER_S", "duration", "listed", "nothing_to_check", "wait_for_others"]

FOREVER_S = 1e9  # for torch, which takes no infinite timeout

_logger = logging.getLogger("torchrelay")
_POLL_FIRST_S, _POLL_LAST_S = 0.0005, 0.01
# To see who is missing costs messages to the store: the longer a wait, the rarer.
_FIRST_LOOK_S, _FIRST_REPORT_S = 1.0, 4.0


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def duration(timeout_s: float) -> timedelta:
    """Return a timeout, which may be infinite, for torch."""
    return timedelta(seconds=min(timeout_s, FOREVER_S))


def nothing_to_check() -> None:
    """Do nothing, in waits in which no process can be lost yet."""


def wait_for_others(
    is_complete: Callable[[], bool],
    missing: Callable[[], Sequence[int] | None],
    sentence: Callable[[Sequence[int], float], str],
    check: Callable[[], None],
    timeout_s: float,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until ``is_complete``; log a warning that names who is missing after some seconds.

    Args:
        is_complete: may block for up to a second.
        missing: called rarely: those missing; ``None``: not known yet. May raise.
        sentence: the message about those who are missing after so many seconds.
        check: called often; raises if a process was lost.
        pause: waits for up to so many seconds; it may return when something has happened.

    Raises:
        OperationTimeoutError: some did not arrive within ``timeout_s``; ``ranks`` names them.
    """
    started_s = time.monotonic()
    next_look_s, next_report_s, pause_s = _FIRST_LOOK_S, _FIRST_REPORT_S, _POLL_FIRST_S
    while not is_complete():
        check()
        elapsed_s = time.monotonic() - started_s
        if elapsed_s > timeout_s:
            late = list(missing() or ())
            if is_complete():
                return
            raise OperationTimeoutError(sentence(late, elapsed_s), ranks=late)
        if elapsed_s > next_look_s:
            absent = missing()
            next_look_s = elapsed_s + max(_FIRST_LOOK_S, elapsed_s / 2)
            if absent and elapsed_s > next_report_s:
                _logger.warning("%s", sentence(absent, elapsed_s))
                next_report_s = 4 * elapsed_s
        pause(pause_s)
        pause_s = min(2 * pause_s, _POLL_LAST_S)
