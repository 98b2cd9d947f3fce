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
from torchrelay.demo.hosts import run_on_hosts
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.triples import SPLITS, read_graph, write_facts
from torchrelay.errors import UnavailableError

__all__ = ["cached_code_graph", "run"]

# The code graph's split: part of the data set, so --seed does not change it.
_SPLIT_SHARE, _SPLIT_SEED = 0.05, 0
_FACTS_PER_ENTITY = 3


def run(options: DemoOptions) -> NoReturn:
    """Replace this process by torchrun with ``options.nproc`` workers, after a check of the data;
    with several hosts, run one for each of them.

    Without ``options.data``, the data is the code graph of this Python's standard library.

    Raises:
        DataError: the data is malformed, or the standard library has no sources here; no process
            has been started.
        UnavailableError: the code graph or the report cannot be written, or hosts cannot be
            simulated.
    """
    _check_report(options.report)
    if options.data is None:
        start = time.perf_counter()
        folder, cached = cached_code_graph(code_graph.standard_library(), _cache_home())
        reading_s = time.perf_counter() - start
        options = replace(options, data=folder, cached=cached, reading_s=reading_s)
    assert options.data is not None
    read_graph(options.data, allow_unseen=options.allow_unseen)
    options = replace(options, launched_at=time.time(), report=options.report.absolute())
    threads = max(1, len(os.sched_getaffinity(0)) // (options.nproc * options.hosts))
    environ = {
        "OMP_NUM_THREADS": str(threads),
        "TORCHRELAY_PARAMETERS_TIMEOUT_S": str(options.timeout_s),
        **os.environ,
    }
    torchrun = [*module_command("torch.distributed.run"), f"--nproc-per-node={options.nproc}"]
    worker = ["--no-python", *module_command("torchrelay.demo.worker"), options.to_json()]
    sys.stdout.flush()
    if options.hosts > 1:
        sys.exit(run_on_hosts(options.hosts, torchrun, worker, environ))
    # One host: the processes find each other, and Gloo communicates, on the loopback interface.
    command = [*torchrun, "--standalone", "--local-addr=127.0.0.1", *worker]
    os.execve(sys.executable, command, {"GLOO_SOCKET_IFNAME": "lo", **environ})


def _check_report(path: Path) -> None:
    """Raise UnavailableError if the report could not be written at the end."""
    folder = path.absolute().parent
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise UnavailableError(
            f"the report cannot be written to {path}; name another file with --report"
        )


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
