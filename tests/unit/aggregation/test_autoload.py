"""``sml`` is there as soon as torch is imported, and costs nothing until it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from torchrelay import _autoload

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


def test_what_fails_when_sml_is_loaded_is_a_warning_and_torch_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(sys.modules, "torchrelay.aggregation", None)  # its import fails
    urls = []

    def by_variables(url: str, **_: Any) -> str:
        urls.append(url)
        return "what torch does"

    handlers: dict[str, Any] = {"env": by_variables}
    _autoload._load_before_failing(handlers)
    assert handlers["env"]("env://?rank=0") == "what torch does"  # loads nothing
    with pytest.warns(UserWarning, match=r"sml cannot be loaded: .*torchrelay\.aggregation"):
        assert handlers["env"]("env://") == "what torch does"
    assert handlers["env"] is by_variables and urls == ["env://?rank=0", "env://"]
    with pytest.raises(ImportError, match=r"torchrelay\.aggregation"):
        _autoload._create_group(None)
