"""Native objects with threads, in processes that were forked from the one that made them."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from torchrelay import _native


def _waiting_endpoint() -> Any:
    """An endpoint whose network has a thread, since its peer does not answer, and the network."""
    network = _native.TcpNetwork(token=bytes(16), local_sockets=False)
    endpoint = network.open("one")
    endpoint.connect(1, "tcp://127.0.0.1:1")
    endpoint.send(1, b"message")
    return endpoint, network


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [_waiting_endpoint, lambda: _native.UdpSwitch("127.0.0.1", 0)],
    ids=["endpoint", "switch"],
)
def test_a_forked_child_drops_what_has_threads_in_its_parent(make: Callable[[], Any]) -> None:
    held = [make(), _native.Origin()]
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        is_forked = held[1].is_forked
        held.clear()
        gc.collect()
        os._exit(0 if is_forked else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not held[1].is_forked and held[1].pid == os.getpid()
