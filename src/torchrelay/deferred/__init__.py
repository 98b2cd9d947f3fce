"""Fake tensors and deferred initialisation: build a module without memory, materialise it later.

Fake tensors: :mod:`.fake`. Deferred initialisation: :func:`deferred_init`, :func:`is_deferred`,
:func:`materialize_tensor`, :func:`materialize_module`; back to deferred: :func:`dematerialize`.
"""

from torchrelay.deferred import fake
from torchrelay.deferred._initialization import deferred_init, is_deferred
from torchrelay.deferred._materialization import materialize_module, materialize_tensor
from torchrelay.deferred._reversal import dematerialize

__all__ = [
    "deferred_init",
    "dematerialize",
    "fake",
    "is_deferred",
    "materialize_module",
    "materialize_tensor",
]


def __dir__() -> list[str]:
    return [*__all__, "fake"]
