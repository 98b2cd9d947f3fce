"""torchdistX's GossipGraD, on :mod:`torchrelay.deferred.gossip`."""

from torchrelay.deferred.gossip import GossipGraDState, Topology, get_num_modules, gossip_grad_hook

__all__ = ["GossipGraDState", "Topology", "get_num_modules", "gossip_grad_hook"]
