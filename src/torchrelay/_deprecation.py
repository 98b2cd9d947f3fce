"""Old names, importable for one more version with a ``DeprecationWarning``."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MODULES", "old_modules", "old_names"]

#: The module that replaces each old one.
MODULES: dict[str, str] = {}


def old_modules(package: str, *modules: str, now: str = "") -> None:
    """Keep ``package.<module>`` importable, with the public names of ``now`` (default:
    ``package``).
    """
    MODULES.update({f"{package}.{module}": now or package for module in modules})


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``module`` that maps old names to new ones."""

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name} is now {module}.{names[name]}", stacklevel=3)
        return getattr(sys.modules[module], names[name])

    return attribute


def _warn(renamed: str, stacklevel: int) -> None:
    message = f"{renamed}; the old name goes with the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


class _Finder(MetaPathFinder, Loader):
    """Find the modules in ``MODULES``, after every other finder found nothing."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        new = importlib.import_module(MODULES[module.__name__])
        public = [*new.__all__, *(["__getattr__"] if hasattr(new, "__getattr__") else [])]
        vars(module).update({name: getattr(new, name) for name in public})
        _warn(f"{module.__name__} is private: import its names from {new.__name__}", stacklevel=2)


sys.meta_path.append(_Finder())
