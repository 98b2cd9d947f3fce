"""Training that goes on when members come and go, an optimizer, and algorithms that communicate
less: those of torchdistX, and LocalSGD and DiLoCo.

Elastic jobs: :class:`Elastic`, :class:`Step`, :class:`ElasticLoader`.
AnyPrecision: :class:`AnyPrecisionAdamW`.
SlowMo: :class:`SlowMoState`, :func:`slowmo_hook`, :class:`SlowMomentumOptimizer`.
LocalSGD and DiLoCo: :class:`LocalSGD`, :class:`DiLoCo`.
GossipGraD: :class:`GossipGraDState`, :class:`GossipTopology`, :func:`gossip_grad_hook`,
:func:`get_num_modules`.
"""

from torchrelay.training._any_precision import AnyPrecisionAdamW
from torchrelay.training._diloco import DiLoCo, LocalSGD
from torchrelay.training._elastic import Elastic, Step
from torchrelay.training._gossip import (
    GossipGraDState,
    GossipTopology,
    get_num_modules,
    gossip_grad_hook,
)
from torchrelay.training._samples import ElasticLoader
from torchrelay.training._slowmo import SlowMomentumOptimizer, SlowMoState, slowmo_hook

__all__ = [
    "AnyPrecisionAdamW",
    "DiLoCo",
    "Elastic",
    "ElasticLoader",
    "GossipGraDState",
    "GossipTopology",
    "LocalSGD",
    "SlowMoState",
    "SlowMomentumOptimizer",
    "Step",
    "get_num_modules",
    "gossip_grad_hook",
    "slowmo_hook",
]


def __dir__() -> list[str]:
    return __all__
