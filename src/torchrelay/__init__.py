"""TorchRelay: distributed training and serving with an unpatched PyTorch.

Components are modules (``from torchrelay import mpi``), imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["__version__"]

__version__ = "0.1.0"

_COMPONENTS = (
    "aggregation",
    "checkpoint",
    "deferred",
    "mpi",
    "parameters",
    "switching",
    "training",
)

if not TYPE_CHECKING:  # mypy sees the modules themselves

    def __getattr__(name: str) -> Any:
        if name in _COMPONENTS:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__dir__())}"
        )


def __dir__() -> list[str]:
    return [*__all__, *_COMPONENTS]
