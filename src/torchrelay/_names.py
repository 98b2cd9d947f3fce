"""Names that do not exist: errors that say which there are."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

__all__ = ["names_options", "no_attribute"]

P = ParamSpec("P")
T = TypeVar("T")

_MOST = 32  # names are listed up to so many


def names_options(*further: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that makes the TypeError for an unknown keyword list the known ones.

    Args:
        further: those that the function takes as ``**options``.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = list(inspect.signature(function).parameters.values())
        is_method = bool(parameters) and parameters[0].name in ("self", "cls")
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = [one.name for one in parameters[is_method:] if one.kind in kinds] + [*further]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in known:
                    called = _called(function, args[0] if is_method else None)
                    raise TypeError(f"{called}() has no option {name!r}; {_choice(name, known)}")
            return function(*args, **kwargs)

        return checked

    return decorate


def _called(function: Callable[..., Any], owner: object) -> str:
    """Return the name by which a caller knows a function or method of ``owner``."""
    if function.__name__ == "__init__":
        return type(owner).__name__
    return f"{owner.__name__}.{function.__name__}" if isinstance(owner, type) else function.__name__


def no_attribute(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for a missing attribute of ``owner``; it suggests one of ``known``."""
    return AttributeError(f"{owner} has no attribute {name!r}; {_choice(name, list(known))}")


def _choice(name: str, known: list[str]) -> str:
    plain = {_plain(one): one for one in known}
    close = difflib.get_close_matches(_plain(name), plain, n=1)
    if close:
        return f"did you mean {plain[close[0]]!r}?" + _list(" There are", known)
    return _list("there are", known) or "see its documentation"


def _list(start: str, known: list[str]) -> str:
    return f"{start} {', '.join(sorted(known))}" if len(known) <= _MOST else ""


def _plain(name: str) -> str:
    """Return what a name of one MPI binding has in common with that of another."""
    return name.lower().removeprefix("mpi_").removeprefix("get_").replace("_", "")
