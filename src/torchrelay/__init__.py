"""TorchRelay: distributed training and serving with an unpatched PyTorch.

Import components by name (``import torchrelay.aggregation``); this module holds only the version.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
