"""torchdistX's names: :mod:`.fake` and :mod:`.deferred_init` on :mod:`torchrelay.deferred`, and :mod:`.checkpoint`."""

from torchrelay.compat.torchdistx import deferred_init, fake

__all__ = ["deferred_init", "fake"]
