"""See :mod:`torchrelay.deferred.training.any_precision`."""

from torchrelay.deferred.training.any_precision import AnyPrecisionAdamW

__all__ = ["AnyPrecisionAdamW"]
