"""Fake tensors and deferred initialisation: build a module without memory, materialise it later.

Fake tensors: :mod:`.fake`. Deferred initialisation: :func:`deferred_init`, :func:`is_deferred`,
:func:`materialize_tensor`, :func:`materialize_module`; back to deferred: :func:`dematerialize`.
"""

from torchrelay.deferred import _session, fake
from torchrelay.deferred._callers import is_meta as _is_meta
from torchrelay.deferred._dispatch import dispatch as _dispatch_operation
from torchrelay.deferred._dispatch import value as _value
from torchrelay.deferred._hooks import hooks as _hooks
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

_hooks.install(
    fake=fake.FakeTensor,
    dispatch=_dispatch_operation,
    recording=lambda: _session.recording() is not None,
    value=_value,
    is_meta=_is_meta,
)
