"""Handling of open tables when their process ends without closing them."""

from __future__ import annotations

import contextlib
import json
import sys
import weakref
from multiprocessing import util
from typing import TYPE_CHECKING

from torchrelay import _native

if TYPE_CHECKING:
    from torchrelay.parameters._server import Server

__all__ = ["CLOSES", "Ending", "end_with_process"]

CLOSES, ENDED = "is closing the table", "has ended without closing the table"


class Ending:
    """How this process's part in a table ended, for processes that wait for it.

    It outlives its server, and holds neither the server nor its network.

    Args:
        key: in the store, where others find it.
    """

    def __init__(self, server: Server, key: str) -> None:
        topology = server.topology
        self._server = weakref.ref(server)
        self._serves = topology.member == 0
        self._store = topology.store if topology.num_nodes * topology.members > 1 else None
        self._key = key
        self._origin = _native.Origin()
        self.is_over = False

    def publish(self, how: str) -> None:
        """Notify those that wait for this process that it will not arrive."""
        if self._store is not None:
            self._store.set(self._key, json.dumps(how))

    def forget(self) -> None:
        """Handle the loss of the server, which was dropped without being closed."""
        if self.is_over or self._origin.is_forked:
            return
        self.is_over = True
        _open.discard(self)
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.publish(ENDED)

    def end_with(self, error: BaseException | None) -> None:
        """Handle the exit of the process.

        After an ``error``, or if it serves others, all processes of the table raise.
        """
        server = self._server()
        if self.is_over:
            return
        if server is not None and (error is not None or self._serves):
            server.abort()
        self.is_over = True
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.publish(ENDED)


_open: set[Ending] = set()
_origin: _native.Origin | None = None


def end_with_process(server: Server, ending: Ending) -> None:
    """Call ``ending.end_with`` when this process exits, or ``forget`` when the server is dropped.

    Neither is called if a signal kills the process, nor after ``os._exit``. A ``sys.exit(1)`` of a
    main process shows no exception.
    """
    global _origin  # noqa: PLW0603 - of the process that registered; a forked child is another
    if _origin is None or _origin.is_forked:
        _origin = _native.Origin()
        _open.clear()
        # Unlike atexit's, these run in the children of multiprocessing too.
        util.Finalize(None, _end_all, exitpriority=0)
    _open.difference_update([other for other in _open if other.is_over])
    _open.add(ending)
    weakref.finalize(server, ending.forget).atexit = False  # end_with runs earlier


def _end_all() -> None:
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        error = None
    for ending in list(_open):
        ending.end_with(error)
