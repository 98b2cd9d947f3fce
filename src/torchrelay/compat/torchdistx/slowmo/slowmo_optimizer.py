"""The optimizer; see :mod:`torchrelay.deferred.slowmo`."""

from torchrelay.deferred.slowmo import SlowMomentumOptimizer

__all__ = ["SlowMomentumOptimizer"]
