"""torchdistX's optimizers, on :mod:`torchrelay.training._any_precision`."""

from torchrelay.compat.torchdistx.optimizers.anyprecision_optimizer import AnyPrecisionAdamW

__all__ = ["AnyPrecisionAdamW"]
