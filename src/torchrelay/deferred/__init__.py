"""Fake tensors, deferred initialisation, sharded checkpoints."""

from torchrelay.deferred import fake
from torchrelay.deferred.initialization import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)

__all__ = ["deferred_init", "fake", "is_deferred", "materialize_module", "materialize_tensor"]
