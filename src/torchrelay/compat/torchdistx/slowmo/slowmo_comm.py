"""The communication hook; see :mod:`torchrelay.deferred.training.slowmo`."""

from torchrelay.deferred.training.slowmo import SlowMoState, slowmo_hook

__all__ = ["SlowMoState", "slowmo_hook"]
