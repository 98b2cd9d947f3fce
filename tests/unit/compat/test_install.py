from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded
import torchrelay.compat
from torchrelay.compat import install, names
from torchrelay.errors import ArgumentError


def test_names_are_the_modules() -> None:
    assert "torch_switchml" in names()
    assert not any(name.startswith("_") for name in names())


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"no module 'torch_switchm'; it has .*torch_switchml"):
        install("torch_switchm")


def test_install_puts_ours_in_the_originals_place() -> None:
    program = (
        "from torchrelay.compat import install; install('torch_switchml'); "
        "install('torch_switchml');"
        "import torch_switchml, torchrelay.compat.torch_switchml as ours; assert torch_switchml is "
        "ours;"
        "import torch.distributed as dist; assert dist.Backend('sml') == 'sml'"
    )
    subprocess.run([preloaded.python(), "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("order", ["fsdp first", "install first"])
def test_fsdp1_finds_torchdistx(order: str) -> None:
    steps = [
        "import torch.distributed.fsdp._init_utils as fsdp1",
        "from torchrelay.compat import install; install('torchdistx')",
    ]
    if order == "install first":
        steps.reverse()
    checks = [
        "import torchrelay.compat.torchdistx.fake as ours",
        "assert fsdp1._TORCHDISTX_AVAIL and fsdp1.fake is ours",
        "assert fsdp1.deferred_init.materialize_module",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(steps + checks)], check=True, timeout=100)


def test_an_original_that_is_imported_already_stays() -> None:
    program = (
        "import sys, types; sys.modules['torch_switchml'] = types.ModuleType('torch_switchml');"
        "sys.modules['torch_switchml'].__file__ = 'elsewhere.py';"
        "from torchrelay.compat import install\n"
        "try: install('torch_switchml')\n"
        "except ValueError as error: assert 'elsewhere.py' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([preloaded.python(), "-c", program], check=True, timeout=100)


def test_what_a_script_does_not_import_need_not_be_there() -> None:
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from torchrelay.compat import install; install()\n"
        "import torchdistx.fake, torchrelay.compat.torchdistx.fake as ours; assert torchdistx.fake "
        "is ours\n"
        "assert ours.__spec__.name == 'torchrelay.compat.torchdistx.fake'\n"
        "import mpi4torch; assert mpi4torch.COMM_WORLD.size == 1"
    )
    subprocess.run([preloaded.python(), "-c", program], check=True, timeout=100)


SPAWNING = """
import sys
import torchdistx.fake
from torch.utils.data import DataLoader

class Kinds:
    def __len__(self): return 1
    def __getitem__(self, index): return torchdistx.fake.__name__

if __name__ == "__main__":
    loader = DataLoader(Kinds(), num_workers=1, multiprocessing_context="spawn")
    assert list(loader) == [["torchrelay.compat.torchdistx.fake"]], list(loader)
    assert sys.argv == [sys.argv[0], "argument"]
"""


def test_every_module_can_be_found_by_children() -> None:
    folder = Path(torchrelay.compat.__file__).parent / "_originals"
    assert {path.stem for path in folder.glob("*.py")} == set(names())


def test_processes_that_a_script_spawns_find_the_modules(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    command = [sys.executable, "-m", "torchrelay.compat", str(script), "argument"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


OWN = """
import multiprocessing
import sys

def check(queue=None):
    import torch
    import torchdistx
    import pipeswitch.worker
    import adapm
    assert pipeswitch.worker.__name__ == "pipeswitch.worker"
    assert torchdistx.__file__.startswith(sys.argv[1]), torchdistx.__file__
    assert adapm.__name__ == "torchrelay.compat.adapm"
    if queue is None:
        torch.cuda.allocate_shared_cache
    else:
        queue.put("checked")

if __name__ == "__main__":
    check()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=check, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == "checked"
    child.join()
"""


def test_what_a_script_has_itself_comes_first(tmp_path: Path) -> None:
    """A package beside it, and one in PYTHONPATH, keep their names."""
    (tmp_path / "repository" / "pipeswitch").mkdir(parents=True)
    (tmp_path / "repository" / "pipeswitch" / "__init__.py").write_text("")
    (tmp_path / "repository" / "pipeswitch" / "worker.py").write_text("")
    (tmp_path / "path" / "torchdistx").mkdir(parents=True)
    (tmp_path / "path" / "torchdistx" / "__init__.py").write_text("")
    script = tmp_path / "repository" / "script.py"
    script.write_text(OWN)
    folder = str(tmp_path / "path")
    done = subprocess.run(
        [preloaded.python(), "-m", "torchrelay.compat", str(script), folder],
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_a_script_needs_a_name() -> None:
    done = subprocess.run(
        [preloaded.python(), "-m", "torchrelay.compat"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 2 and "torch_switchml" in done.stdout
