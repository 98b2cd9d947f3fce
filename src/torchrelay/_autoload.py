"""What torch calls when it is imported, through the entry point group ``torch.backends``.

It registers ``sml`` by name; :mod:`torchrelay.aggregation` is imported when a group asks for it.
With ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` torch does not call it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Let ``sml`` be asked for. Never raises: ``import torch`` would fail."""
    try:
        c10d = sys.modules["torch.distributed"]
        handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
        c10d.Backend.register_backend(
            "sml", _create_group, extended_api=True, devices=["cpu", "cuda"]
        )
        _load_before_failing(handlers)
    except Exception as error:
        with contextlib.suppress(Exception):  # without torch.distributed, nobody asks for sml
            _warn_when_asked(sys.modules["torch.distributed"].Backend, error)


def _create_group(given: Any, options: Any = None) -> Any:
    return _aggregation()._create_group(given, options)


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


def _load_before_failing(handlers: dict[str, Any]) -> None:
    """Load ``sml`` where torch is about to fail because it finds no RANK and WORLD_SIZE, which
    ``sml`` can do without.
    """
    by_variables = handlers["env"]

    def load_first(url: str, **kwargs: Any) -> Any:
        fails = url == "env://" and not {"RANK", "WORLD_SIZE"} & os.environ.keys()
        if not fails or handlers["env"] is not load_first:  # sml has been loaded
            return by_variables(url, **kwargs)
        handlers["env"] = by_variables
        try:
            _aggregation()
        except Exception as error:  # the caller may want another backend
            warnings.warn(f"sml cannot be loaded: {error}", stacklevel=2)
        return handlers["env"](url, **kwargs)

    handlers["env"] = load_first


def _aggregation() -> Any:
    return importlib.import_module("torchrelay.aggregation")
