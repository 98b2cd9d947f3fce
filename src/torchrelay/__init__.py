"""TorchRelay: what distributed PyTorch needs, for an unpatched PyTorch.

The rooms are imported by name (``import torchrelay.aggregation``); this module holds only the version, so
that importing it costs nothing.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
