"""What torchdistX's hook states share with PyTorch's own."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

__all__ = ["DefaultState", "group_or_all"]


def group_or_all(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``group``, or the default group if it is None."""
    found = dist.group.WORLD if group is None else group
    assert found is not None, "init_process_group() comes first"
    return found
