"""Handling of open tables when their process ends without closing them."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from multiprocessing import util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrelay.parameters._server import Server

__all__ = ["CLOSES", "Ending", "end_with_process"]

CLOSES, ENDED = "is closing the table", "has ended without closing the table"


class Ending:
    """How this process's part in a table ended, for processes that wait for it.

    It outlives its server: a table that is forgotten is not closed.

    Args:
        key: in the store, where others find it.
    """

    def __init__(self, server: Server, key: str) -> None:
        self._server = weakref.ref(server)
        self._topology = server.topology
        self._key = key
        self.is_over = False

    def publish(self, how: str) -> None:
        """Notify those that wait for this process that it will not arrive."""
        if self._topology.num_nodes * self._topology.members > 1:
            self._topology.publish(self._key, how)

    def end_with(self, error: BaseException | None) -> None:
        """Handle the exit of the process.

        After an ``error``, or if it serves others, all processes of the table raise.
        """
        server = self._server()
        if self.is_over:
            return
        if server is not None and (error is not None or self._topology.member == 0):
            server.abort()
        self.is_over = True
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.publish(ENDED)


_open: set[Ending] = set()
_process = 0


def end_with_process(ending: Ending) -> None:
    """Call ``ending.end_with`` when this process exits.

    Not if a signal kills it, nor after ``os._exit``. A ``sys.exit(1)`` of a main process shows no
    exception.
    """
    global _process  # noqa: PLW0603 - of the process whose exit is waited for: a forked child is another
    if _process != os.getpid():
        _process = os.getpid()
        _open.clear()
        # Unlike atexit's, these run in the children of multiprocessing too.
        util.Finalize(None, _end_all, exitpriority=0)
    _open.difference_update([other for other in _open if other.is_over])
    _open.add(ending)


def _end_all() -> None:
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        error = None
    for ending in list(_open):
        ending.end_with(error)
