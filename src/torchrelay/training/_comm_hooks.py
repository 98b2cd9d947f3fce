"""Functions that the communication hooks share. DDP passes buckets, FSDP passes gradients."""

from __future__ import annotations

import torch

from torchrelay.errors import UnsupportedError

__all__ = ["finished", "refuse_sharded"]


def finished(gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future of ``gradient``, as DDP requires."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradient)
    return future


def refuse_sharded(hook: str, output: torch.Tensor | None) -> None:
    """Raise :class:`UnsupportedError` if FSDP asks for a shard of the gradient."""
    if output is not None:
        raise UnsupportedError(
            f"{hook}: FSDP shards its gradients here, and only whole ones can be averaged among "
            "some of the ranks; use ShardingStrategy.NO_SHARD, or shard inside a node with "
            "FSDP(process_group=...) and no hook"
        )
