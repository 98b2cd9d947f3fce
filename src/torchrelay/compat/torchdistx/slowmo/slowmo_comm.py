"""The communication hook; see :mod:`torchrelay.training._slowmo`."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

from torchrelay.training import _slowmo
from torchrelay.training._slowmo import slowmo_hook

__all__ = ["SlowMoState", "slowmo_hook"]


class SlowMoState(_slowmo.SlowMoState, DefaultState):
    """With the attributes of PyTorch's ``DefaultState``, of which torchdistX's state is one."""

    def __init__(self, subgroup: dist.ProcessGroup | None = None, sync_grads: bool = True) -> None:
        _slowmo.SlowMoState.__init__(self, subgroup, sync_grads)
        group = dist.group.WORLD if self.subgroup is None else self.subgroup
        assert group is not None, "init_process_group() comes first"
        DefaultState.__init__(self, group)
