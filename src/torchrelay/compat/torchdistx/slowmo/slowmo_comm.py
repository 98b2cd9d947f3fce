"""The communication hook; see :mod:`torchrelay.deferred.slowmo`."""

from torchrelay.deferred.slowmo import SlowMoState, slowmo_hook

__all__ = ["SlowMoState", "slowmo_hook"]
