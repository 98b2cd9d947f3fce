"""Drop-in modules under the names of the systems TorchRelay implements.

Each is imported by its own path (``from torchrelay.compat import torchdistx``) or put in the place of the
original for a script that must run unchanged::

    python -m torchrelay.compat script.py arguments ...

which is :func:`install` for all of them, then the script.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from torchrelay.errors import ArgumentError

__all__ = ["install", "names"]


def names() -> tuple[str, ...]:
    """The modules that can be installed."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_"))


def install(*modules: str) -> None:
    """Makes ``import <name>`` find ``torchrelay.compat.<name>`` in this process, submodules too.

    Args:
        modules: which; none means all.

    Raises:
        ArgumentError: there is no such module, or the original is already imported.
    """
    for name in modules or names():
        if name not in names():
            raise ArgumentError(f"torchrelay.compat has no module {name!r}; it has {', '.join(names())}")
        ours = importlib.import_module(f"{__name__}.{name}")
        if sys.modules.get(name, ours) is not ours:
            raise ArgumentError(
                f"{name} is already imported from {sys.modules[name].__file__}; install() comes first"
            )
        sys.modules[name] = ours
        _alias_submodules(name)


def _alias_submodules(name: str) -> None:
    """``import a.b`` must give the module that ``a`` itself uses, not a second copy of it."""
    package = f"{__name__}.{name}"
    for module in pkgutil.walk_packages(getattr(sys.modules[name], "__path__", []), f"{package}."):
        imported = importlib.import_module(module.name)
        sys.modules[module.name.removeprefix(f"{__name__}.")] = imported
