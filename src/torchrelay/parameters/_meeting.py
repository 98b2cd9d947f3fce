"""Waits for other processes, which report after some seconds who has not come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchrelay.errors import OperationTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Marks", "nothing_to_check", "wait_for_others"]

_logger = logging.getLogger("torchrelay.parameters")
_POLL_FIRST_S, _POLL_LAST_S = 0.0005, 0.01
# When a wait is looked at: each look costs messages to the store, so the later, the fewer.
_FIRST_LOOK_S, _FIRST_REPORT_S = 1.0, 4.0


def nothing_to_check() -> None:
    """For waits in which nobody can be lost yet."""


def wait_for_others(
    is_complete: Callable[[], bool],
    missing: Callable[[], Sequence[int] | None],
    sentence: Callable[[Sequence[int], float], str],
    check: Callable[[], None],
    timeout_s: float,
) -> None:
    """Wait until ``is_complete``; log a warning that names who is missing after some seconds.

    Args:
        missing: called now and then, if not complete: who has not come; ``None``: that cannot be
            told yet. May raise.
        sentence: what to say of those who are missing, after so many seconds.
        check: called often; raises if a process was lost.

    Raises:
        OperationTimeoutError: some did not come within ``timeout_s``; ``ranks`` names them.
    """
    started_s = time.monotonic()
    next_look_s, next_report_s, pause_s = _FIRST_LOOK_S, _FIRST_REPORT_S, _POLL_FIRST_S
    while not is_complete():
        check()
        elapsed_s = time.monotonic() - started_s
        if elapsed_s > timeout_s:
            late = list(missing() or ())
            raise OperationTimeoutError(sentence(late, elapsed_s), ranks=late)
        if elapsed_s > next_look_s:
            absent = missing()
            next_look_s = elapsed_s + max(_FIRST_LOOK_S, elapsed_s / 2)
            if absent and elapsed_s > next_report_s:
                _logger.warning("%s", sentence(absent, elapsed_s))
                next_report_s = 4 * elapsed_s
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_LAST_S)


class Marks:
    """Which of ``count`` participants wait at ``place``, as far as they have waited long enough to
    say so.

    A barrier costs one message to the store, and this only where it takes long.

    Args:
        index: this participant; others see its mark once it has called :meth:`missing`.
    """

    def __init__(self, store: Store, place: str, index: int, count: int) -> None:
        self._store, self._place, self._index, self._count = store, place, index, count
        self._is_set = False

    def missing(self) -> list[int]:
        """Those without a mark; sets this participant's."""
        if not self._is_set:
            self._store.set(f"{self._place}/at/{self._index}", "")
            self._is_set = True
        everyone = range(self._count)
        return [i for i in everyone if not self._store.check([f"{self._place}/at/{i}"])]

    def clear(self) -> None:
        """Take this participant's mark back."""
        if self._is_set:
            self._store.delete_key(f"{self._place}/at/{self._index}")
