"""A program without the native core, and what it has in common with one that has it.

``without_core.py PACKAGES write|read CHECKPOINTS``, or ``without_core.py PACKAGES refused``, where
PACKAGES has torchrelay without the extension module.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not TYPE_CHECKING:
    sys.path.insert(0, sys.argv[1])
    import other_unix  # noqa: F401

import pytest
import torch
import torch.distributed as dist

import torchrelay
from torchrelay import _platform
from torchrelay.checkpoint import HuggingFace, async_save, load, save, verify
from torchrelay.errors import UnsupportedError

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)
LENGTHS = (0, 1, 3, 1000, 600_000)


def _state(fill: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(5)
    model = torch.nn.Linear(300, 700)
    for one in model.parameters():
        one.data = torch.rand(one.shape, generator=random) * fill
    tensors = {
        f"{dtype}-{length}": (torch.randint(0, 100, (length,), generator=random) * fill).to(dtype)
        for dtype in DTYPES
        for length in LENGTHS
    }
    return {"model": model, "tensors": tensors, "step": 3 * fill, "names": ["a"] * fill}


def write(folder: Path) -> None:
    """Save in all ways."""
    for threads in (1, 3):
        save(_state(1), folder / f"threads-{threads}", threads=threads)
    async_save(_state(1), folder / "async").result(60)
    save(_state(1), folder / "replaced")
    save(_state(1), folder / "replaced")
    save(_state(1), folder / "plain", checksum=False)
    save({"model": _state(1)["model"]}, folder / "huggingface", layout=HuggingFace())


def content(folder: Path) -> dict[str, bytes]:
    """Return all files of all checkpoints, without their ids, dates and what is summed over
    these.
    """
    drawn = re.compile(rb'"saved_at_ns":\d+,"id":"\w+"|"crc32c":"[0-9a-f]{8}"}\n$')
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): drawn.sub(b"", path.read_bytes()) for path in files}


def read(folder: Path) -> None:
    """Verify and load what :func:`write` has saved."""
    for path in sorted(folder.iterdir()):
        verify(path)
        wanted, found = _state(1), _state(0)
        if path.name == "huggingface":
            wanted, found = {"model": wanted["model"]}, {"model": found["model"]}
        load(found, path, verify="header" if path.name == "plain" else "data")
        for one, other in zip(_flat(wanted), _flat(found), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _flat(state: dict[str, Any]) -> list[Any]:
    values = [*state["model"].parameters(), *state.get("tensors", {}).values()]
    return [*values, state.get("step"), state.get("names")]


def refused() -> None:
    """Import every module; each feature that needs the core is refused by its name when it is
    used.
    """
    names = [one.name for one in pkgutil.walk_packages(torchrelay.__path__, "torchrelay.")]
    adapters = {"torchrelay.checkpoint.lightning", "torchrelay.checkpoint.torch_checkpointing"}
    for name in names:  # adapters need the package that they are for
        if not name.endswith("__main__") and name not in adapters:
            importlib.import_module(name)

    from torchrelay import mpi, parameters, switching, transport
    from torchrelay.aggregation import switch

    def group(backend: str) -> object:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return mpi.Communicator.from_group(dist.new_group())

    uses: dict[str, Callable[[], object]] = {
        "the backend sml": lambda: dist.init_process_group("sml"),
        "the backend sml ": lambda: group("cpu:sml"),
        "torchrelay.mpi over a process group": lambda: group("gloo"),
        "a table": lambda: parameters.Table.create(4, 2),
        "a table ": lambda: parameters.Embedding(4, 2),
        "torchrelay.switching": switching.ModelStore,
        "torchrelay.switching ": lambda: switching.SharedCache.allocate(4096),
        "a switch": lambda: switch.UdpDataPlane(port=0),
        "a switch ": lambda: switch.XdpDataPlane(["lo"]),
        "a worker of a switch": lambda: switch.SwitchClient("127.0.0.1", 0, 1, 1),
        "encryption between hosts": lambda: transport.encryption(bytes(32)),
    }
    for feature, use in uses.items():
        with pytest.raises(UnsupportedError, match=rf"^{feature.strip()} needs .* native core"):
            use()


if __name__ == "__main__":
    assert not _platform.has_core
    commands: dict[str, Callable[..., None]]
    commands = {"write": write, "read": read, "refused": refused}
    commands[sys.argv[2]](*map(Path, sys.argv[3:]))
