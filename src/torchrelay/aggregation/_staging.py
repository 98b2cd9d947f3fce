"""Contiguous CPU buffers for tensors that a data plane cannot use directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchrelay._torch import dispatches_itself, is_host_memory
from torchrelay.aggregation._plane import Ticket
from torchrelay.errors import UnsupportedError

__all__ = ["Staging"]


class Staging:
    """The buffers of one call, and the operations of the data plane that use them.

    ``finish()`` copies results to the caller's tensors.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.operations: list[tuple[Callable[..., Ticket | None], tuple[Any, ...]]] = []

    def add(self, operation: Callable[..., Ticket | None], *arguments: Any) -> None:
        """Add an operation and its arguments, without ``timeout_s`` and ``block``."""
        self.operations.append((operation, arguments))

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor with the values of ``tensor``."""
        return self._buffer(tensor, _plain_copy, is_output=False)

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor whose values ``finish`` copies to ``tensor``."""
        return self._buffer(tensor, _plain_empty, is_output=True)

    def inout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor that is input and output."""
        return self._buffer(tensor, _plain_copy, is_output=True)

    def _buffer(
        self,
        tensor: torch.Tensor,
        make: Callable[[torch.Tensor], torch.Tensor],
        is_output: bool,
    ) -> torch.Tensor:
        self._check(tensor)
        buffer = tensor if is_host_memory(tensor) else make(tensor)
        if is_output and buffer is not tensor:
            self._copies.append((tensor, buffer))
        return buffer

    @property
    def finish(self) -> Callable[[], None] | None:
        return self._copy_back if self._copies else None

    def _copy_back(self) -> None:
        with torch.no_grad():
            for tensor, buffer in self._copies:
                tensor.copy_(buffer, non_blocking=True)  # on a GPU: ordered on the current stream

    def _check(self, tensor: torch.Tensor) -> None:
        if dispatches_itself(tensor):
            raise UnsupportedError(
                f"sml: a {type(tensor).__name__} has no memory of its own to send; pass its local "
                "tensor"
            )
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"sml: {tensor.layout} tensors are supported by all_reduce only; use dense ones "
                "(e.g. Embedding(sparse=False))"
            )


def _plain_empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty CPU tensor; pinned for a CUDA tensor, so that copies run at the link's
    speed.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU copy; waits for the current stream if ``tensor`` is on a GPU."""
    with torch.no_grad():
        return _plain_empty(tensor).copy_(tensor)
