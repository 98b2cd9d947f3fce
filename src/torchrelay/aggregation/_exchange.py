"""Messages that one collective sends and receives between hosts."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchrelay.aggregation._executor import Completion
from torchrelay.aggregation._messages import Messages

__all__ = ["GRACE_S", "Call", "Exchange", "bytes_of"]

# The cause of a delay is named by whoever waits for it directly; those behind it wait this much
# longer each.
GRACE_S = 2.0

_PyBUF_WRITE = 0x200
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous CPU tensor, which it does not keep alive.

    ``Tensor.numpy()`` would make the tensor's storage one that cannot be resized, as FSDP does.
    """
    if not tensor.nbytes:
        return memoryview(bytearray())  # it has no address
    view: memoryview = _memory_view(tensor.data_ptr(), tensor.nbytes, _PyBUF_WRITE)
    return view


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

    Args:
        check: called while waiting; raises to stop.
    """

    def __init__(self, messages: Messages, check: Callable[[], None]) -> None:
        self._messages = messages
        self._check = check
        self._transfers: list[tuple[Completion, int]] = []

    def send(self, to: int, tag: int, tensor: torch.Tensor) -> None:
        """Send ``tensor``, which must not change until :meth:`finish` returns."""
        if tensor.numel():
            self._add(self._messages.send(to, tag, bytes_of(tensor)), to, tensor)

    def receive(self, source: int, tag: int, tensor: torch.Tensor) -> None:
        """Receive into ``tensor``, which is complete when :meth:`finish` returns."""
        if tensor.numel():
            receive = self._messages.receive(source, tag, bytes_of(tensor))
            self._add(receive.completion, source, tensor)

    def _add(self, completion: Completion, peer: int, tensor: torch.Tensor) -> None:
        """Keep the tensor until it is done, also if :meth:`finish` raises before."""
        completion.holds = tensor
        self._transfers.append((completion, peer))

    def finish(self, call: Call) -> None:
        """Wait for all of them; raises as :meth:`_messages.Messages.wait`."""
        for completion, peer in self._transfers:
            self._messages.wait(completion, peer, call.name, call.deadline_s + GRACE_S, self._check)
