"""The optimizer; see :mod:`torchrelay.deferred.training.slowmo`."""

from torchrelay.deferred.training.slowmo import SlowMomentumOptimizer

__all__ = ["SlowMomentumOptimizer"]
