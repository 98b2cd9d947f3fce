"""Names for functions that build models, so that another process can call them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torchrelay.errors import ArgumentError, DeferredError, ModelError, UnsupportedError

__all__ = ["Factory"]


@dataclass(frozen=True)
class Factory:
    """A function by name, with the keyword arguments and the seed it is called with.

    `reference` is `package.module:function` or `/path/to/file.py:function`.
    """

    reference: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @classmethod
    def of(
        cls,
        function: Callable[..., Any] | str,
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> Factory:
        """Name `function`, which must be a function or class at the top level of a module or file.

        Raises:
            ArgumentError: it cannot be named, or `kwargs` do not survive JSON.
        """
        reference = function if isinstance(function, str) else _reference_of(function)
        if ":" not in reference:
            raise ArgumentError(f"{reference!r} names no function: write package.module:function")
        plain = dict(kwargs or {})
        try:
            same = json.loads(json.dumps(plain)) == plain
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ArgumentError(
                f"the arguments of {reference} must be JSON values (numbers, strings, lists, "
                f"dicts), not {plain}"
            )
        return cls(reference, plain, seed)

    def build(self) -> Any:
        """Call the function with the seed set, leaving the caller's random state as it was.

        Raises:
            ModelError: it raised.
        """
        function = self._resolve()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            try:
                return function(**self.kwargs)
            except Exception as error:
                raise ModelError(
                    f"{self.reference} failed: {type(error).__name__}: {error}"
                ) from error

    def build_module(self) -> torch.nn.Module:
        """Call the function and check that it returned a module."""
        return self._checked(self.build())

    def build_skeleton(self) -> torch.nn.Module:
        """Build the module, deferred (without memory for its tensors) where possible."""
        from torchrelay.deferred import deferred_init  # noqa: PLC0415 - takes a moment to import

        function = self._resolve()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            try:
                module = self._checked(deferred_init(function, **self.kwargs))
                if not _hides_tensors(module):
                    return module
            except (UnsupportedError, DeferredError):
                pass  # not every initialisation can be recorded; the eager one always can be run
            except Exception as error:
                raise ModelError(
                    f"{self.reference} failed: {type(error).__name__}: {error}"
                ) from error
        return self.build_module()

    def _checked(self, built: Any) -> torch.nn.Module:
        if not isinstance(built, torch.nn.Module):
            raise ArgumentError(
                f"{self.reference} must return a torch.nn.Module, not {type(built).__name__}"
            )
        return built

    def _resolve(self) -> Callable[..., Any]:
        module_name, _, path = self.reference.rpartition(":")
        try:
            found: Any = (
                _load_file(module_name) if module_name.endswith(".py") else _load(module_name)
            )
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, OSError, AttributeError, SyntaxError) as error:
            raise ArgumentError(f"cannot load {self.reference}: {error}") from error
        if not callable(found):
            raise ArgumentError(
                f"{self.reference} is a {type(found).__name__}, which cannot be called"
            )
        return found  # type: ignore[no-any-return]


def _load(name: str) -> ModuleType:
    return importlib.import_module(name)


def _load_file(path: str) -> ModuleType:
    name = "torchrelay_models_" + "".join(c if c.isalnum() else "_" for c in path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _reference_of(function: Callable[..., Any]) -> str:
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if not module or "<" in path:
        raise ArgumentError(
            f"{function!r} has no name that another process can import; define it at the top level "
            "of a module"
        )
    # A script's __main__, or a file loaded by path, is no module for another process.
    importable = module != "__main__" and _is_findable(module)
    if importable:
        return f"{module}:{path}"
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        file = None
    if file is None:
        raise ArgumentError(f"{function!r} is not defined in a file; define it in a module")
    return f"{Path(file).resolve()}:{path}"


def _is_findable(module: str) -> bool:
    """Return whether an import would find `module`'s package, without asking `sys.modules`."""
    top = module.partition(".")[0]
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)


def _hides_tensors(module: torch.nn.Module) -> bool:
    """Return whether a submodule has tensors in a list, tuple or dict, which a skeleton cannot
    replace.
    """

    def holds_tensor(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return True
        if isinstance(value, dict):
            return any(map(holds_tensor, value.values()))
        return isinstance(value, list | tuple) and any(map(holds_tensor, value))

    own = ("_parameters", "_buffers", "_modules", "_flat_weights")
    return any(
        isinstance(value, list | tuple | dict) and holds_tensor(value)
        for submodule in module.modules()
        for name, value in vars(submodule).items()
        if name not in own
    )
