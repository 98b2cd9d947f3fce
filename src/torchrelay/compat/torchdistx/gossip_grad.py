"""torchdistX's GossipGraD, on :mod:`torchrelay.training._gossip`."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

from torchrelay.training import _gossip
from torchrelay.training._gossip import GossipTopology as Topology
from torchrelay.training._gossip import get_num_modules, gossip_grad_hook

__all__ = ["GossipGraDState", "Topology", "get_num_modules", "gossip_grad_hook"]


class GossipGraDState(_gossip.GossipGraDState, DefaultState):
    """With the attributes of PyTorch's ``DefaultState``, of which torchdistX's state is one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _gossip.GossipGraDState.__init__(self, *args, **kwargs)
        DefaultState.__init__(self, self.local_process_group)

    @property
    def gossip_period(self) -> int:
        """Steps after which every gradient has reached every node."""
        return _gossip.period(self.num_nodes)

    @property
    def iter(self) -> int:
        """Backward passes so far."""
        return self.iteration
