"""See :mod:`torchrelay.training.any_precision`."""

from torchrelay.training.any_precision import AnyPrecisionAdamW

__all__ = ["AnyPrecisionAdamW"]
