"""Checkpoints of Lightning's trainer; needs ``lightning``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from torchrelay.checkpoint._save import save
from torchrelay.checkpoint._tools import read_state
from torchrelay.checkpoint.state._state import flatten, put
from torchrelay.checkpoint.storage._contract import Path, text_of
from torchrelay.errors import ArgumentError

__all__ = ["CheckpointIO"]


class CheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """Saves what Lightning's trainer gives one rank as a checkpoint of ours: committed in one step,
    verified when it is loaded, without pickle. Pass it to ``Trainer(plugins=[...])``.

    It also loads the files that Lightning has written without it.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint in place of what is at ``path``.

        Raises:
            ArgumentError: ``storage_options``, or a value that a checkpoint cannot hold.
            TorchRelayError: as for :func:`torchrelay.checkpoint.save`.
        """
        if storage_options is not None:
            raise ArgumentError("storage_options=: there are none")
        save(checkpoint, path, no_dist=True)

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint; ``weights_only`` makes no difference, because no pickle is run.

        Args:
            map_location: a device for the tensors; anything else leaves them on the CPU.

        Raises:
            TorchRelayError: as for :func:`torchrelay.checkpoint.load`.
        """
        state = read_state(text_of(path))
        if isinstance(map_location, str | torch.device):
            for leaf in flatten(state).values():
                if isinstance(leaf.value, torch.Tensor):
                    put(state, leaf.path, leaf.value.to(map_location))
        return state
