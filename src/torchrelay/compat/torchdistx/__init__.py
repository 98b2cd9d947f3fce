"""torchdistX's names: :mod:`.fake`, :mod:`.deferred_init` and :mod:`.checkpoint`."""

from torchrelay.compat.torchdistx import deferred_init, fake

__all__ = ["deferred_init", "fake"]
