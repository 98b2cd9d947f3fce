"""The communication hook; see :mod:`torchrelay.training._slowmo`."""

from __future__ import annotations

import torch.distributed as dist

from torchrelay.compat.torchdistx import _states
from torchrelay.training import _slowmo
from torchrelay.training._slowmo import slowmo_hook

__all__ = ["SlowMoState", "slowmo_hook"]


class SlowMoState(_slowmo.SlowMoState, _states.DefaultState):
    """With the attributes of PyTorch's ``DefaultState``, of which torchdistX's state is one."""

    def __init__(self, subgroup: dist.ProcessGroup | None = None, sync_grads: bool = True) -> None:
        _slowmo.SlowMoState.__init__(self, subgroup, sync_grads)
        _states.DefaultState.__init__(self, _states.group_or_all(self.subgroup))
