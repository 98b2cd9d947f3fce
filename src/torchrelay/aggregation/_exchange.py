"""Messages that one collective sends and receives between hosts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from torchrelay._native import Failure, Messenger, Transfer
from torchrelay.errors import OperationTimeoutError, PeerLostError

__all__ = ["GRACE_S", "Call", "Exchange", "Lost", "error_of", "failure_of"]

# The cause of a delay is named by whoever waits for it directly; those behind it wait this much
# longer each.
GRACE_S = 2.0

Lost = PeerLostError | OperationTimeoutError


def failure_of(error: Lost) -> Failure:
    """Return an error that breaks a group as the native core knows it."""
    return Failure(str(error), error.ranks, isinstance(error, OperationTimeoutError))


def error_of(failure: Failure) -> Lost:
    """Return the error of a group that is broken."""
    kind = OperationTimeoutError if failure.timed_out else PeerLostError
    return kind(failure.message, ranks=failure.ranks)


@dataclass
class Call:
    """A collective in progress."""

    name: str
    deadline_s: float  # of the monotonic clock

    def left_s(self, grace: int = 0) -> float:
        """Return the remaining seconds, plus ``grace`` margins for others to report a cause
        first.
        """
        return max(0.0, self.deadline_s - time.monotonic()) + grace * GRACE_S


class Exchange:
    """Messages in progress. Tensors without elements are not sent.

    If a call of :meth:`finish` fails, its group is broken before the tensors are dropped.
    """

    def __init__(self, messages: Messenger) -> None:
        self._messages = messages
        self._transfers: list[Transfer] = []
        self._tensors: list[torch.Tensor] = []

    def send(self, to: int, tag: int, tensor: torch.Tensor) -> None:
        """Send ``tensor``, which must not change until :meth:`finish` returns."""
        if tensor.numel():
            self._tensors.append(tensor)
            self._transfers.append(
                self._messages.send(tensor.data_ptr(), tensor.nbytes, to, tag, 0, 0.0)
            )

    def receive(self, source: int, tag: int, tensor: torch.Tensor) -> None:
        """Receive into ``tensor``, which is complete when :meth:`finish` returns."""
        if tensor.numel():
            self._tensors.append(tensor)
            self._transfers.append(
                self._messages.receive(tensor.data_ptr(), tensor.nbytes, source, tag, 0, 0.0)
            )

    def finish(self, call: Call) -> None:
        """Wait for all of them.

        Raises:
            OperationTimeoutError: one is not done shortly after the call's deadline.
            PeerLostError: a peer was lost, or the group is broken.
        """
        self._messages.complete(self._transfers, call.name, call.deadline_s + GRACE_S)
