"""The old name of ``torchrelay.training``, until the next version."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    found = getattr(importlib.import_module("torchrelay.training"), name)
    warnings.warn("torchrelay.deferred.training is now torchrelay.training", DeprecationWarning, stacklevel=2)
    return found
