"""Trees of switches: the link from a rack's switch to the one above it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from dataclasses import dataclass

from torchrelay.aggregation.switch._client import ask_missing, connect, join_session, leave
from torchrelay.aggregation.switch._data_plane import SessionShape
from torchrelay.errors import ArgumentError, ConfigError, UnavailableError

__all__ = ["Uplink"]

_ANSWER_S = 0.5  # of the switch above; less than workers wait until they ask again


@dataclass(frozen=True)
class Uplink:
    """The place of a leaf switch below another one, of which it is a worker.

    Of a session's n workers, rack ``i`` has the ``i``-th n / num_racks. The leaf adds what they
    send, and joins the session above it as worker ``rack`` of ``num_racks``, so any switch can be
    above it, also another leaf.

    Args:
        switch: above; ``host`` or ``host:port``.
        rack: index of this leaf.
        num_racks: below that switch.

    Raises:
        ConfigError: ``rack`` is not below ``num_racks``.
    """

    switch: str
    rack: int
    num_racks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rack < self.num_racks:
            raise ConfigError(
                f"rack {self.rack} of {self.num_racks}: racks have numbers from 0 to "
                f"{self.num_racks - 1}"
            )

    def ranks(self, shape: SessionShape) -> range:
        """Return the ranks of this rack's workers.

        Raises:
            ArgumentError: the racks cannot have equally many.
        """
        size, rest = divmod(shape.num_workers, self.num_racks)
        if rest or not size:
            raise ArgumentError(
                f"a session of {shape.num_workers} workers cannot be divided among "
                f"{self.num_racks} racks"
            )
        return range(self.rack * size, (self.rack + 1) * size)

    def join(self, session_id: int, shape: SessionShape) -> socket.socket:
        """Return a socket that the switch above knows as this rack's.

        Raises:
            UnavailableError: it does not admit this rack within half a second. Try again.
        """
        above = dataclasses.replace(shape, num_workers=self.num_racks)
        sock = connect(self.switch)
        try:
            join_session(
                [sock], self.switch, _above(session_id, shape), self.rack, above, _ANSWER_S
            )
        except BaseException:
            sock.close()
            raise
        return sock

    def leave(self, session_id: int, shape: SessionShape) -> None:
        """Notify the switch above that this rack's workers have left."""
        with contextlib.suppress(UnavailableError), connect(self.switch) as sock:
            leave(sock, _above(session_id, shape), self.rack)

    def missing(self, session_id: int, shape: SessionShape) -> list[int] | None:
        """Return all ranks of the racks that the switch above waits for; None if it does not
        answer.
        """
        with connect(self.switch) as sock:
            racks = ask_missing(sock, _above(session_id, shape), _ANSWER_S)
        if racks is None:
            return None
        return [
            rank for rack in racks for rank in dataclasses.replace(self, rack=rack).ranks(shape)
        ]


def _above(session_id: int, shape: SessionShape) -> int:
    """Return the session's id above, where racks that expect different numbers of workers must not
    meet: their float32 sums would have different scales.
    """
    return (session_id + shape.num_workers) % (1 << 64)
