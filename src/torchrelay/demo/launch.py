"""Prepares the data and starts torchrun."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torchrelay._python import module_command
from torchrelay.demo import code_graph
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.triples import SPLITS, read_graph, write_facts
from torchrelay.errors import UnavailableError

__all__ = ["cached_code_graph", "run"]

# The code graph's split: part of the data set, so --seed does not change it.
_SPLIT_SHARE, _SPLIT_SEED = 0.05, 0
_FACTS_PER_ENTITY = 3


def run(options: DemoOptions) -> NoReturn:
    """Replace this process by torchrun with ``options.nproc`` workers, after a check of the data.

    Without ``options.data``, the data is the code graph of this Python's standard library.

    Raises:
        DataError: the data is malformed, or the standard library has no sources here; no process
            has been started.
        UnavailableError: the code graph cannot be written to the user's cache.
    """
    if options.data is None:
        start = time.perf_counter()
        folder, cached = cached_code_graph(code_graph.standard_library(), _cache_home())
        reading_s = time.perf_counter() - start
        options = replace(options, data=folder, cached=cached, reading_s=reading_s)
    assert options.data is not None
    read_graph(options.data, allow_unseen=options.allow_unseen)
    options = replace(options, launched_at=time.time())
    threads = max(1, len(os.sched_getaffinity(0)) // options.nproc)
    # One host: the processes find each other, and Gloo talks, on the loopback interface.
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHRELAY_PARAMETERS_TIMEOUT_S": str(options.timeout_s),
    }
    torchrun = f"--standalone --local-addr 127.0.0.1 --no-python --nproc-per-node {options.nproc}"
    command = [
        *module_command("torch.distributed.run"),
        *torchrun.split(),
        *module_command("torchrelay.demo.worker"),
        options.to_json(),
    ]
    sys.stdout.flush()
    os.execve(sys.executable, command, {**defaults, **os.environ})


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrelay"


def cached_code_graph(root: Path, cache: Path) -> tuple[Path, bool]:
    """Return a folder below ``cache`` with the split code graph of ``root``, and whether it
    existed.

    The folder's name changes with the sources, this Python and the reader. It appears complete or
    not at all.

    Raises:
        DataError: ``root`` has no sources.
        UnavailableError: ``cache`` cannot be written.
    """
    folder = cache / f"code-graph-{_fingerprint(root)}"
    if folder.is_dir():
        return folder, True
    facts = code_graph.prune(code_graph.read_code_graph(root), _FACTS_PER_ENTITY)
    splits = code_graph.split_facts(facts, _SPLIT_SHARE, _SPLIT_SEED)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as building:
            made = Path(building) / "graph"
            made.mkdir()
            for split in SPLITS:
                write_facts(made / f"{split}.txt", splits[split])
            _publish(made, folder)
    except OSError as error:
        raise UnavailableError(
            f"the code graph cannot be written below {cache}: {error.strerror}; set XDG_CACHE_HOME "
            "to a folder that can be written"
        ) from error
    return folder, False


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another run was faster, with the same result
            raise


def _fingerprint(root: Path) -> str:
    digest = hashlib.sha256(
        f"{sys.version} {_SPLIT_SHARE} {_SPLIT_SEED} {_FACTS_PER_ENTITY}".encode()
    )
    digest.update(Path(code_graph.__file__).read_bytes())
    for path in code_graph.source_files(root):
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
