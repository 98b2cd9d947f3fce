"""``sml`` is there as soon as torch is imported, and costs nothing until it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WITHOUT_IMPORT = """
import sys
import torch
import torch.distributed as dist
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torchrelay", "rich")))
assert hasattr(dist.Backend, "SML") and dist.Backend.default_device_backend_map["cpu"] == "gloo"
dist.init_process_group("sml")
total = torch.ones(2)
dist.all_reduce(total)
print(dist.get_backend(), total.tolist())
dist.destroy_process_group()
dist.init_process_group("sml", store=dist.HashStore(), rank=0, world_size=1)
print(type(dist.group.WORLD).__name__)
dist.destroy_process_group()
"""


def python(code: str, **environ: str) -> list[str]:
    """Run ``code`` without the variables of a launcher; return what it prints."""
    inherited = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
    command = [sys.executable, "-c", code]
    environ = {**inherited, **environ}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.timeout(300)
def test_torch_registers_sml_and_imports_nothing_heavy() -> None:
    modules, backend, group = python(WITHOUT_IMPORT)
    assert modules == "['torchrelay', 'torchrelay._autoload']"
    assert backend == "sml [1.0, 1.0]" and group == "SmlGroup"


@pytest.mark.timeout(300)
def test_torchs_variable_turns_it_off() -> None:
    code = "import sys, torch; print('torchrelay' in sys.modules, hasattr({}, 'SML'))"
    off = python(code.format("torch.distributed.Backend"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert off == ["False False"]


BROKEN = """
import warnings
import torch.distributed as dist
from torchrelay import _autoload

def refuse(*_, **__):
    raise TypeError("not in this torch")

works, dist.Backend.register_backend = dist.Backend.register_backend, refuse
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    _autoload.register()
    for backend in ("gloo", "cpu:sml,cuda:nccl"):
        print(backend, len(caught))
        try:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
        except Exception:
            pass
    print(caught[0].message)
    dist.Backend.register_backend = works
    before = len(caught)
    import torchrelay.aggregation
    dist.init_process_group("sml", store=dist.HashStore(), rank=0, world_size=1)
    print(type(dist.group.WORLD).__name__, len(caught) - before)
    dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_a_failed_registration_is_a_warning_when_sml_is_asked_for() -> None:
    gloo, sml, warning, group = python(BROKEN, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert gloo == "gloo 0" and sml == "cpu:sml,cuda:nccl 0"  # silent until sml is asked for
    assert "TypeError('not in this torch')" in warning
    assert "import torchrelay.aggregation" in warning
    assert group == "SmlGroup 0"


LOADS = """
import sys
import torch.distributed as dist
sys.modules["torchrelay.aggregation"] = None  # its import fails
for backend in ("gloo", "sml"):
    try:
        dist.init_process_group(backend)
    except (ValueError, ImportError) as error:
        print(error)
"""


@pytest.mark.timeout(300)
def test_what_fails_when_sml_is_loaded_is_raised_where_sml_is_asked_for() -> None:
    gloo, sml = python(LOADS)
    assert "environment variable RANK expected" in gloo and "torchrelay.aggregation" in sml
