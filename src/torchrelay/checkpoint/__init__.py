"""Sharded checkpoints: safetensors files, committed in one step, verified, read by byte range into
any layout.

Public: :class:`Checkpointer`, :func:`save`, :func:`async_save`, :class:`Keep`,
:class:`HuggingFace`, :func:`load`, :func:`latest`, :func:`verify`, and :class:`Writer` and
:class:`Reader`, the storage layer for ``torch.distributed.checkpoint``; for other trainers, the
modules ``lightning`` and ``torch_checkpointing``.

The modules here are these functions and the types that all share; ``state`` is what is saved,
``plan`` who writes or reads what of it, ``format`` how it is stored, ``storage`` and ``memory``
where, and ``engine`` moves it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchrelay._names import no_attribute

if TYPE_CHECKING:
    from torchrelay.checkpoint._checkpointer import Checkpointer
    from torchrelay.checkpoint._dcp import Reader, Writer
    from torchrelay.checkpoint._load import LoadResult, load, verify
    from torchrelay.checkpoint._save import async_save, save
    from torchrelay.checkpoint.engine._background import SaveHandle
    from torchrelay.checkpoint.plan._export import HuggingFace
    from torchrelay.checkpoint.storage._catalog import Keep, latest

__all__ = [
    "Checkpointer",
    "HuggingFace",
    "Keep",
    "LoadResult",
    "Reader",
    "SaveHandle",
    "Writer",
    "async_save",
    "latest",
    "load",
    "save",
    "verify",
]

# Loaded when first used: the writer process and the command line need neither torch nor its
# checkpoints.
_HOMES = {
    "engine._background": ("SaveHandle",),
    "storage._catalog": ("Keep", "latest"),
    "_checkpointer": ("Checkpointer",),
    "_dcp": ("Reader", "Writer"),
    "plan._export": ("HuggingFace",),
    "_load": ("LoadResult", "load", "verify"),
    "_save": ("async_save", "save"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise no_attribute(f"module {__name__!r}", name, __all__)


def __dir__() -> list[str]:
    return __all__
