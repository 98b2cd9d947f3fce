"""What torch calls when it is imported, through the entry point group ``torch.backends``.

It registers ``sml`` by name; :mod:`torchrelay.aggregation` is imported when a group asks for it.
With ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` torch does not call it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["register", "register_now"]


def register() -> None:
    """Let ``sml`` be asked for. Never raises: ``import torch`` would fail."""
    try:
        register_now()
    except Exception as error:
        with contextlib.suppress(Exception):  # without torch.distributed, nobody asks for sml
            _warn_when_asked(sys.modules["torch.distributed"].Backend, error)


@functools.cache
def register_now() -> None:
    """Register ``sml`` with torch.distributed, which has been imported.

    ``init_process_group("sml")`` then also works where neither RANK nor WORLD_SIZE is set. There
    torch raises an error; other backends, and calls that give a rank, a size, a store or another
    ``init_method``, get what torch does.
    """
    sys.modules["torch.distributed"].Backend.register_backend(
        "sml", _create_group, extended_api=True, devices=["cpu", "cuda"]
    )
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    handlers["env"] = functools.partial(_meet, handlers["env"])


def _create_group(given: Any, options: Any = None) -> Any:
    return _creation().create_group(given, options)


def _meet(by_variables: Callable[..., Any], url: str, **kwargs: Any) -> Any:
    if url == "env://" and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        from torchrelay._torch import backends_of_init  # noqa: PLC0415 - imports much of torch

        if "sml" in backends_of_init():
            return iter([_creation().meet(kwargs["timeout"])])
    return by_variables(url, **kwargs)


def _warn_when_asked(backend: Any, cause: Exception) -> None:
    """Warn of ``cause`` when torch is given the name ``sml``, which it does not know."""
    create = backend.__new__

    def warn_first(cls: Any, name: Any) -> Any:
        asked = "sml" in str(name).lower().replace(",", ":").split(":")
        if asked and "torchrelay.aggregation" not in sys.modules:
            warnings.warn(
                f"sml could not be registered when torch was imported ({cause!r}); "
                "import torchrelay.aggregation first, which registers it or says what is wrong",
                stacklevel=3,
            )
        return create(cls, name)

    backend.__new__ = warn_first


def _creation() -> Any:
    from torchrelay._platform import need_core  # noqa: PLC0415 - each import torch would wait for it

    need_core("the backend sml")
    return importlib.import_module("torchrelay.aggregation._creation")
