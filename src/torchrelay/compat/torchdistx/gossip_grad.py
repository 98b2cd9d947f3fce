"""torchdistX's GossipGraD, on :mod:`torchrelay.deferred.training.gossip`."""

from torchrelay.deferred.training.gossip import GossipGraDState, Topology, get_num_modules, gossip_grad_hook

__all__ = ["GossipGraDState", "Topology", "get_num_modules", "gossip_grad_hook"]
