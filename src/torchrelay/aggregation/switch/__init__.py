"""In-network aggregation: a switch that sums what hosts send it, and the hosts' side.

It speaks SwitchML's UDP protocol. A switch sums the packets of all workers slot by slot and sends
each sum to all of them, so that each worker sends and receives the size of its data, whatever the
number of workers.

- :class:`SwitchServer` over a data plane (:class:`UdpDataPlane`, :class:`XdpDataPlane`) is a
  switch; ``torchrelay switch`` runs one.
- :class:`SwitchClient` is one worker.
- :class:`Controller` serves SwitchML's own workers, which form a session over gRPC.
"""

from __future__ import annotations

from torchrelay._native import SwitchWorkerStats
from torchrelay.aggregation.switch._client import SwitchClient, Uplink
from torchrelay.aggregation.switch._controller import Controller
from torchrelay.aggregation.switch._data_plane import (
    DataPlane,
    SessionShape,
    SessionStats,
    SessionWorkerStats,
    SwitchStats,
)
from torchrelay.aggregation.switch._server import SwitchServer
from torchrelay.aggregation.switch._udp import UdpDataPlane
from torchrelay.aggregation.switch._xdp import XdpDataPlane

__all__ = [
    "Controller",
    "DataPlane",
    "SessionShape",
    "SessionStats",
    "SessionWorkerStats",
    "SwitchClient",
    "SwitchServer",
    "SwitchStats",
    "SwitchWorkerStats",
    "UdpDataPlane",
    "Uplink",
    "XdpDataPlane",
]


def __dir__() -> list[str]:
    return __all__
