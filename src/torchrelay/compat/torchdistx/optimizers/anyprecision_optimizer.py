"""See :mod:`torchrelay.deferred.any_precision`."""

from torchrelay.deferred.any_precision import AnyPrecisionAdamW

__all__ = ["AnyPrecisionAdamW"]
