"""How the processes and workers of a table end, for those that wait for them.

Closing a table is announced in the store, and so is the end of a process that did not close it.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Sequence
from multiprocessing import util
from typing import TYPE_CHECKING

from torchrelay import _native
from torchrelay.errors import PeerLostError

if TYPE_CHECKING:
    from torchrelay.parameters._server import Server

__all__ = ["Ending", "end_with_process"]

_CLOSES, _ENDED = "is closing the table", "has ended without closing the table"


class Ending:
    """How this process's part in a table ended, and how that of others did.

    It outlives its server, and holds neither the server nor its network.
    """

    def __init__(self, server: Server, table: str) -> None:
        topology = server.topology
        self._server = weakref.ref(server)
        self._serves = topology.member == 0
        self._ranks, self._nodes = topology.ranks, topology.nodes
        self._per_process = topology.workers_per_process
        self._processes, self._workers = f"{table}/ends", f"{table}/ended"
        self._ended_workers: set[int] = set()
        self._origin = _native.Origin()
        self.is_over = False

    def close(self) -> None:
        """Announce that this process is closing the table."""
        self.is_over = True
        self._ranks.announce(self._processes, _CLOSES)

    def forget(self) -> None:
        """Handle the loss of the server, which was dropped without being closed."""
        if not self.is_over and not self._origin.is_forked:
            _open.discard(self)
            self._announce_end()

    def end_with(self, error: BaseException | None) -> None:
        """Handle the exit of the process.

        After an ``error``, or if it serves others, all processes of the table raise.
        """
        server = self._server()
        if self.is_over:
            return
        if server is not None and (error is not None or self._serves):
            server.abort()
        self._announce_end()

    def _announce_end(self) -> None:
        self.is_over = True
        with contextlib.suppress(RuntimeError, PeerLostError):  # the store is gone
            self._ranks.announce(self._processes, _ENDED)

    def worker_begins(self, worker_id: int) -> None:
        """Register a worker with this id."""
        if worker_id in self._ended_workers and self._ranks.store is not None:
            self._ended_workers.discard(worker_id)
            self._ranks.store.delete_key(f"{self._workers}/{self._index(worker_id)}")

    def worker_ends(self, worker_id: int) -> None:
        """Announce that a worker has ended without ``close()``."""
        self._ended_workers.add(worker_id)
        if not self.is_over and not self._origin.is_forked:
            with contextlib.suppress(RuntimeError, PeerLostError):  # the store is gone
                self._ranks.announce(self._workers, index=self._index(worker_id))

    def _index(self, worker_id: int) -> int:
        """Return the index of a worker of this process among those of all processes."""
        return self._ranks.rank * self._per_process + worker_id % self._per_process

    def check_workers(self, workers: Sequence[int]) -> None:
        """Raise PeerLostError if one of the workers with these indices, or its process, has
        ended.
        """
        for index in set(workers).difference(self._ranks.missing(self._workers, workers)):
            node, member = self._place(index // self._per_process)
            worker_id = member * self._per_process + index % self._per_process
            raise PeerLostError(
                f"{self._ranks.name}: worker {worker_id} of node {node} has ended without close(), "
                "while this process waits for it; look at the output of that node for the cause",
                ranks=[node],
            )
        self.check_processes(list(dict.fromkeys(index // self._per_process for index in workers)))

    def check_processes(self, processes: Sequence[int], *, or_closing: bool = True) -> None:
        """Raise PeerLostError if one of the processes has ended, or is closing the table."""
        for rank in set(processes).difference(self._ranks.missing(self._processes, processes)):
            how = self._ranks.store.get(f"{self._processes}/{rank}").decode()
            if or_closing or how != _CLOSES:
                raise PeerLostError(
                    f"{self._ranks.name}: rank {self._ranks.names[rank]} {how}, while this process "
                    "waits for it; all processes must make the same collective calls",
                    ranks=[self._place(rank)[0]],
                )

    def _place(self, rank: int) -> tuple[int, int]:
        """Return the index of a process's node, and its index in it."""
        return next((i, ranks.index(rank)) for i, ranks in enumerate(self._nodes) if rank in ranks)


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
