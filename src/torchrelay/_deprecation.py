"""Old names, importable for one more version with a ``DeprecationWarning``."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["MODULES", "old_attribute", "old_keywords", "old_modules", "old_names", "warn"]

F = TypeVar("F", bound=Callable[..., Any])

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
        warn(f"{module}.{name} is now {module}.{names[name]}", stacklevel=3)
        return getattr(sys.modules[module], names[name])

    return attribute


def old_keywords(**names: str | tuple[str, float]) -> Callable[[F], F]:
    """Return a decorator of functions and classes that accepts keyword arguments under old names.

    Args:
        names: the new name of each, or the new name and the unit that the old value was in.
    """

    def decorate(function: F) -> F:
        given_class: Any = function if isinstance(function, type) else None
        target: Any = function if given_class is None else given_class.__init__

        @functools.wraps(target)
        def call(*args: Any, **given: Any) -> Any:
            for old in names.keys() & given.keys():
                new = names[old]
                name, unit = (new, None) if isinstance(new, str) else new
                if name in given:
                    raise TypeError(f"{function.__qualname__}() got both {old} and {name}")
                warn(f"the argument {old} of {function.__qualname__}() is now {name}", stacklevel=2)
                value = given.pop(old)
                given[name] = value if unit is None else value * unit
            return target(*args, **given)

        if given_class is None:
            return call  # type: ignore[return-value]
        given_class.__init__ = call
        return function

    return decorate


def old_attribute(old: str, new: str) -> property:
    """Return a property that reads and writes the attribute ``new`` under its ``old`` name."""

    def read(instance: Any) -> Any:
        warn(f"{type(instance).__name__}.{old} is now {new}", stacklevel=2)
        return getattr(instance, new)

    def write(instance: Any, value: Any) -> None:
        warn(f"{type(instance).__name__}.{old} is now {new}", stacklevel=2)
        setattr(instance, new, value)

    return property(read, write)


def warn(renamed: str, stacklevel: int) -> None:
    """Emit the ``DeprecationWarning`` that something is ``renamed``."""
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
        warn(f"{module.__name__} is private: import its names from {new.__name__}", stacklevel=2)


sys.meta_path.append(_Finder())
