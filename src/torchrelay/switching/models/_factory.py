"""Names for functions that build models, so that another process can call them from the same random
states.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torchrelay import _torch
from torchrelay._random import random_state, restore_random, seed_random
from torchrelay.errors import (
    ArgumentError,
    DeferredError,
    ModelError,
    UnsupportedError,
    describe,
)
from torchrelay.switching.models._code import Code, capture, file_of, run

_log = logging.getLogger("torchrelay.switching")

# Of a process's threads one builds at a time: they share the random states and the modules' names.
_building = threading.RLock()

__all__ = ["Factory", "hidden_tensors"]


@dataclass(frozen=True)
class Factory:
    """A function by name, with the keyword arguments and the seed it is called with.

    `reference` is `package.module:function` or `/path/to/file.py:function`.
    """

    reference: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    code: Code = ()  # of the files, as they were when the function was named

    @classmethod
    def of(
        cls,
        function: Callable[..., Any] | str,
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> Factory:
        """Name `function`, which must be a function or class at the top level of a module or file.

        Raises:
            ArgumentError: it cannot be named or read, or `kwargs` do not survive JSON.
        """
        reference = function if isinstance(function, str) else _reference_of(function)
        module, colon, path = reference.rpartition(":")
        if not colon:
            raise ArgumentError(f"{reference!r} names no function: write package.module:function")
        code: Code = ()
        try:
            if module.endswith(".py"):
                reference = f"{Path(module).resolve()}:{path}"  # for workers in other folders too
                code = capture(str(Path(module).resolve()))
            elif file := file_of(module):
                code = capture(file, module)
        except OSError as error:
            raise ArgumentError(f"cannot load {reference}: {error}") from error
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
        return cls(reference, copy.deepcopy(plain), seed, code)

    def build(self) -> Any:
        """Call the function with the seed set, leaving the caller's random state as it was.

        Raises:
            ModelError: it raised.
        """
        with _building:
            function = self._resolve()
            with self._calling():
                return function()

    def build_module(self) -> torch.nn.Module:
        """Call the function, check that it returned a module, and return that for inference."""
        return self._checked(self.build())

    def build_skeleton(self) -> torch.nn.Module:
        """Build the module, deferred (without memory for its tensors) where possible: not if it
        keeps tensors where they cannot be replaced.
        """
        from torchrelay.deferred._materialization import (  # noqa: PLC0415 - takes a moment
            init_without_escapes,
            materialize_module,
        )

        with _building:
            function = self._resolve()
            # Not every initialisation can be recorded; the eager one always can be run.
            with self._calling(), contextlib.suppress(UnsupportedError, DeferredError):
                built, escaped = init_without_escapes(function)
                module = self._checked(built)
                aliased = _aliased(module)
                if aliased:
                    materialize_module(module)  # the tensors stay the same objects
                if escaped or aliased:
                    _warn_of_hidden(self.reference, escaped + aliased)
                if not escaped and next(hidden_tensors(module), None) is None:
                    return module
        return self.build_module()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Set the seed; turn what the function raises into a ModelError."""
        with _seeded(self.seed):
            try:
                yield
            except (Exception, SystemExit) as error:
                raise ModelError(f"{self.reference} failed: {describe(error)}") from error

    def _checked(self, built: Any) -> torch.nn.Module:
        """Return the module, for inference."""
        if isinstance(built, torch.export.ExportedProgram):
            built = built.module()
        if not isinstance(built, torch.nn.Module):
            raise ArgumentError(
                f"{self.reference} must return a torch.nn.Module, not {type(built).__name__}"
            )
        for path, module in built.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise UnsupportedError(
                    f"{self.reference} returned a module of torch.jit at {path or 'its top'}; its "
                    "tensors cannot be replaced; return the Python module"
                )
        positions = _torch.exported_positions(built)
        if positions:
            built.register_forward_pre_hook(
                partial(_by_position, positions), with_kwargs=True, prepend=True
            )
        return _evaluating(built)

    def _resolve(self) -> Callable[[], Any]:
        """Return the function, bound to arguments that it may change."""
        module_name, _, path = self.reference.rpartition(":")
        try:
            found: Any = run(self.code) if self.code else importlib.import_module(module_name)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, OSError, AttributeError, SyntaxError) as error:
            raise ArgumentError(f"cannot load {self.reference}: {error}") from error
        except (Exception, SystemExit) as error:  # of the module's own code
            raise ModelError(f"{module_name} cannot be imported: {describe(error)}") from error
        if not callable(found):
            raise ArgumentError(
                f"{self.reference} is a {type(found).__name__}, which cannot be called"
            )
        return partial(found, **copy.deepcopy(self.kwargs))


def _by_position(
    names: list[str], module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Pass the arguments `names` by position, as a module of torch.export takes them."""
    given = [kwargs.pop(name) for name in names[len(args) :] if name in kwargs]
    return (*args, *given), kwargs


def _evaluating(module: torch.nn.Module) -> torch.nn.Module:
    """Call `eval()`, except of modules that have no other mode, as those of torch.export."""
    try:
        return module.eval()
    except NotImplementedError:
        for child in module.children():
            _evaluating(child)
        return module


@cache
def _warn_of_hidden(reference: str, count: int) -> None:
    """Log, once a process, why a model is built with memory."""
    _log.warning(
        "%s keeps tensors (%d) outside of its module, in a global, a cache or another object, and "
        "is therefore built with memory",
        reference,
        count,
    )


def _reference_of(function: Callable[..., Any]) -> str:
    module: Any
    path: Any
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):  # a class method, which its class may have inherited
        module, path = owner.__module__, f"{owner.__qualname__}.{function.__name__}"
    else:
        module = getattr(function, "__module__", None)
        path = getattr(function, "__qualname__", "<")
    if not module or "<" in path:
        raise ArgumentError(
            f"{function!r} has no name that another process can import; define it at the top level "
            "of a module"
        )
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    # By kind, as the file may have been edited since.
    if found is not None and _kind_of(found) != _kind_of(function):
        raise ArgumentError(
            f"{function!r} calls itself {module}:{path}, which is another one: give it the name "
            "that leads to it, or pass that name"
        )
    # A script's __main__, or a file loaded by path, is no module for another process.
    if module != "__main__" and _is_findable(module):
        return f"{module}:{path}"
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        file = None
    if file is None:
        raise ArgumentError(f"{function!r} is not defined in a file; define it in a module")
    return f"{Path(file).resolve()}:{path}"


def _kind_of(function: Any) -> str:
    """Return what a function with its name has in common with its later versions, and not with
    what it wraps.
    """
    code = getattr(function, "__code__", None)
    return type(function).__name__ if code is None else str(code.co_name)


def _is_findable(module: str) -> bool:
    """Return whether an import would find `module`'s package, without asking `sys.modules`."""
    top = module.partition(".")[0]
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)


def _aliased(module: torch.nn.Module) -> int:
    """Return how many tensors of `module` something else refers to, too: to replace them in the
    module would not reach that.
    """
    known: dict[int, list[Any]] = {}  # by id: the tensor, and the references that are the module's
    for submodule in module.modules():
        own = vars(submodule)
        places = (submodule._parameters, submodule._buffers, own)
        held = [one for place in places for one in place.values()]
        for one in (*held, *(own.get("_flat_weights") or ())):  # of recurrent layers
            if isinstance(one, torch.Tensor):
                known.setdefault(id(one), [one, 0])[1] += 1
        del held
    one = None
    alone: list[Any] = [object(), 0]
    least = sys.getrefcount(alone[0])
    return sum(sys.getrefcount(entry[0]) - entry[1] > least for entry in known.values())


def hidden_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that `module` keeps where a skeleton cannot replace them: in lists, tuples
    and dicts, in other objects, weak references and functions, and in modules that are not
    registered. They may be parameters of it as well.
    """
    seen = {id(submodule) for submodule in module.modules()}
    own = ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs")
    found = [
        value
        for submodule in module.modules()
        for name, value in vars(submodule).items()
        if name not in own and not isinstance(value, torch.Tensor)
    ]
    while found:
        value = found.pop()
        if id(value) in seen or isinstance(value, type | ModuleType):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            found += [*value, *value.values()]
        elif isinstance(value, weakref.ref):
            found.append(value())
        elif isinstance(value, list | tuple | set | frozenset):
            found += value
        elif isinstance(value, partial):
            found += [value.func, *value.args, *value.keywords.values()]
        elif inspect.ismethod(value):
            found.append(value.__self__)
        elif inspect.isfunction(value):
            found += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty
                    found.append(cell.cell_contents)
        elif not inspect.isroutine(value) and not type(value).__module__.startswith("torch._"):
            found += getattr(value, "__dict__", {}).values()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators for the block, and restore their states after it."""
    state = random_state()
    seed_random(seed)
    try:
        yield
    finally:
        restore_random(state)
