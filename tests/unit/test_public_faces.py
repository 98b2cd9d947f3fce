"""What is public can be imported, is listed, and says what it does; importing is cheap."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import torchrelay

OLD_NAMES = {"torchrelay.deferred.training"}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(torchrelay.__path__, "torchrelay.")
    if not module.name.split(".")[-1].startswith("_")
    and ".mpi" not in module.name
    and module.name not in OLD_NAMES
)


@pytest.mark.parametrize("name", MODULES)
def test_all_is_what_it_says(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, f"{name}.{public} has no docstring"


@pytest.mark.parametrize("name", sorted(OLD_NAMES))
def test_old_names_warn(name: str) -> None:
    module = importlib.import_module(name)
    new = importlib.import_module(name.replace(".deferred", ""))
    for public in new.__all__:
        with pytest.warns(DeprecationWarning, match=new.__name__):
            assert getattr(module, public) is getattr(new, public)


def _python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = _python("import sys, torchrelay; print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert loaded == "False False"


def test_the_ground_floor_costs_little_beyond_torch_and_no_distributed() -> None:
    code = """
import sys, torch
torch_alone = set(sys.modules)
import torchrelay, torchrelay.buffers, torchrelay.world, torchrelay.config, torchrelay.telemetry
added = sorted(name for name in set(sys.modules) - torch_alone if not name.startswith("torchrelay"))
print([name for name in added if name.startswith("torch.distributed")], len(added))
"""
    distributed, count = _python(code).rsplit(" ", 1)
    assert distributed == "[]"
    assert int(count) < 10
