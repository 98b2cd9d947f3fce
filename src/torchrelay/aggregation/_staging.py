"""Contiguous CPU buffers for tensors that a data plane cannot use directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchrelay._torch import dispatches_itself, is_host_memory
from torchrelay.errors import UnsupportedError

__all__ = ["Staging"]


class Staging:
    """The buffers of one call, and the operations of the data plane that use them."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.operations: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def add(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Add an operation and its arguments, without ``timeout_s`` and ``block``."""
        self.operations.append((operation, arguments))

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor with the values of ``tensor``."""
        return self._buffer(tensor, is_input=True, is_output=False)

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor whose values ``finish`` copies to ``tensor``."""
        return self._buffer(tensor, is_input=False, is_output=True)

    def inout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor that is input and output."""
        return self._buffer(tensor, is_input=True, is_output=True)

    def _buffer(self, tensor: torch.Tensor, *, is_input: bool, is_output: bool) -> torch.Tensor:
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
        if is_host_memory(tensor):
            return tensor
        # Pinned for a CUDA tensor, so that copies run at the link's speed.
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if is_input:
            with torch.no_grad():
                buffer.copy_(tensor)  # from a GPU: waits for the current stream
        if is_output:
            self._copies.append((tensor, buffer))
        return buffer

    def finish(self) -> None:
        """Copy results to the caller's tensors."""
        for tensor, buffer in self._copies:
            with torch.no_grad():
                tensor.copy_(buffer, non_blocking=True)  # on a GPU: ordered on the current stream
