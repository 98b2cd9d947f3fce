"""A switch as the transport between hosts, seen from one leader."""

import threading
from typing import cast

import torch

from torchrelay._group import Op
from torchrelay._native import Failure, Group
from torchrelay.aggregation._switch_transport import SwitchTransport
from torchrelay.aggregation.switch import SwitchClient
from torchrelay.config import Aggregation
from torchrelay.errors import OperationTimeoutError, PeerLostError


class _Client:
    """A switch that sends no result; after ``answer_s`` it waits for worker 1."""

    switch = "127.0.0.1:1"

    def __init__(self, answer_s: float) -> None:
        self._answer_s = answer_s
        self.closed = threading.Event()

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float) -> None:
        if self.closed.wait(self._answer_s):
            raise PeerLostError("the session was closed")
        raise OperationTimeoutError("it waits for worker 1", ranks=[1])

    def close(self) -> None:
        self.closed.set()


class _Messages:
    def lost(self, ranks: tuple[int, ...]) -> None:
        return None

    def with_host(self, failure: Failure, peer: int) -> Failure:
        assert peer == 2
        return failure


def _fail(client: _Client, group_error: OperationTimeoutError | None) -> Failure:
    """How a sum through ``client`` fails on rank 0 of two hosts with two ranks each."""

    def check() -> None:
        if group_error is not None:
            raise group_error

    transport = SwitchTransport(
        [0, 2],
        range(4),
        Aggregation(),
        cast(SwitchClient, client),
        cast(Group, _Messages()),
        check,
    )
    start, finish = transport.calls(torch.ones(8), Op.SUM, 1)
    start(0, 8, 60.0)
    failure = finish()
    assert client.closed.is_set() and failure is not None and failure.timed_out
    return failure


def test_the_switch_names_workers_and_the_transport_their_ranks() -> None:
    failure = _fail(_Client(answer_s=0), None)
    assert failure.ranks == [2] and "it waits for worker 1: rank 2" in failure.message


def test_what_broke_the_group_is_raised_as_it_is() -> None:
    """It names ranks already, not workers of the switch."""
    broken = OperationTimeoutError("rank 0 waited for worker 1: rank 2", ranks=[2])
    failure = _fail(_Client(answer_s=60), broken)
    assert failure.message == str(broken) and failure.ranks == [2]
