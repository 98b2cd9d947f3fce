"""Drop-in modules under the names of the systems that TorchRelay implements.

Import one by its path (``from torchrelay.compat import torchdistx``), or replace the originals for
an unchanged script::

    python -m torchrelay.compat script.py arguments ...

which installs all of them, also in Python processes that the script starts. A module of one of
these names that the script would find beside itself or in ``PYTHONPATH`` takes precedence.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from torchrelay.errors import ArgumentError

__all__ = ["install", "install_in_children", "names", "replace", "script_path"]

_ORIGINALS = str(Path(__file__).parent / "_originals")


def names() -> tuple[str, ...]:
    """Return the modules that can be installed."""
    return tuple(
        sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")
    )


def install(*modules: str, unless_in: Sequence[str] = ()) -> None:
    """Let ``import <name>`` find ``torchrelay.compat.<name>`` in this process, and its submodules.

    A module is loaded when it is first imported, so the requirements of unused ones need not be
    installed. Two take effect at once: ``pipeswitch`` puts its functions on `torch.cuda`, because
    scripts look for them there, and FSDP1 finds ``torchdistx`` even if it is imported already.

    Args:
        modules: which; none means all.
        unless_in: folders in which a module of one of these names comes first.

    Raises:
        ArgumentError: there is no such module, or the original is already imported.
    """
    for name in modules or names():
        if name not in names():
            raise ArgumentError(
                f"torchrelay.compat has no module {name!r}; it has {', '.join(names())}"
            )
        if name in sys.modules and sys.modules[name] is not sys.modules.get(f"{__name__}.{name}"):
            raise ArgumentError(
                f"{name} is already imported from {sys.modules[name].__file__}; install() comes "
                "first"
            )
        if PathFinder.find_spec(name, [*unless_in]) is None:
            _finder.installed.add(name)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if not modules or "pipeswitch" in modules:
        # A patch of torch.cuda in the original, not a module.
        importlib.import_module(f"{__name__}.pipeswitch").install_functions()
    if "torchdistx" in _finder.installed and "torch.distributed.fsdp" in sys.modules:
        from torchrelay import _torch  # noqa: PLC0415 - imports torch

        _torch.find_torchdistx()


def install_in_children() -> None:
    """Let ``import <name>`` find the drop-in modules in Python processes started from now on.

    A spawned process imports the script before anything could call :func:`install`. A directory of
    one-line modules is therefore added to ``PYTHONPATH``, and to ``sys.path``, which
    multiprocessing passes on, behind what is there but before installed packages.
    """
    folders = _folders_of_user()
    if _ORIGINALS not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, _ORIGINALS])
        sys.path.insert(1 + len(folders), _ORIGINALS)  # 0 is the script's directory


def script_path() -> list[str]:
    """Return the folders of ``sys.path`` that are the script's and the user's, not Python's."""
    return [sys.path[0], *_folders_of_user()]


def _folders_of_user() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def replace(name: str) -> None:
    """Install ``torchrelay.compat.<name>`` while the module ``name`` is being imported."""
    del sys.modules[name]
    install(name)
    importlib.import_module(name)


class _Finder(MetaPathFinder, Loader):
    """Finds TorchRelay's own module under the original's name, instead of a second copy."""

    def __init__(self) -> None:
        self.installed: set[str] = set()
        self._own_specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.installed:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{__name__}.{spec.name}")
        self._own_specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing. It has run already; the import system has replaced only its spec."""
        assert module.__spec__ is not None
        module.__spec__ = self._own_specs.pop(module.__spec__.name)


_finder = _Finder()
