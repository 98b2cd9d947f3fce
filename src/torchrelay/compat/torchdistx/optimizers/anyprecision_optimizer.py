"""See :mod:`torchrelay.training._any_precision`."""

from torchrelay.training._any_precision import AnyPrecisionAdamW

__all__ = ["AnyPrecisionAdamW"]
