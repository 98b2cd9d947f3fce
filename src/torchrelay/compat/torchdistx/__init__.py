"""torchdistX's names: :mod:`.fake` and :mod:`.deferred_init`, on :mod:`torchrelay.deferred`."""

from torchrelay.compat.torchdistx import deferred_init, fake

__all__ = ["deferred_init", "fake"]
