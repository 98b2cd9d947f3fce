"""Checks the data and starts torchrun."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from dataclasses import replace
from typing import NoReturn

from torchrelay._helper import module_command
from torchrelay._platform import loopback, need_core, usable_cores
from torchrelay.demo.options import DemoOptions
from torchrelay.errors import UnavailableError

__all__ = ["run"]


def run(options: DemoOptions) -> NoReturn:
    """Replace this process by torchrun with ``options.nproc`` workers, after a check of the data;
    with several hosts, run one for each of them.

    Raises:
        DataError: the data is malformed; no process has been started.
        UnavailableError: the report cannot be written, or hosts cannot be simulated.
    """
    report = options.report.absolute()
    target = report if report.exists() else report.parent
    if report.is_dir() or not os.access(target, os.W_OK):
        raise UnavailableError(
            f"the report cannot be written to {options.report}; name another file with --report"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("the report needs matplotlib: pip install matplotlib (extra [demo])")
    if options.data is not None:
        from torchrelay.demo.triples import read_graph  # noqa: PLC0415 - imports torch

        read_graph(options.data, allow_unseen=options.allow_unseen)
    options = replace(options, launched_at=time.monotonic(), report=report)
    threads = max(1, usable_cores() // (options.nproc * options.hosts))
    environ = {
        "OMP_NUM_THREADS": str(threads),
        "TORCHRELAY_PARAMETERS_TIMEOUT_S": str(options.timeout_s),
        **os.environ,
    }
    if options.hosts > 1:
        need_core("a demo on several hosts")
    torchrun = [*module_command("torch.distributed.run"), f"--nproc-per-node={options.nproc}"]
    worker = ["--no-python", *module_command("torchrelay.demo.worker"), options.to_json()]
    processes = options.nproc * options.hosts
    print(f"starting {processes} processes, which import torch ...", flush=True)
    if options.hosts > 1:
        from torchrelay.demo.hosts import run_on_hosts  # noqa: PLC0415 - imports torch

        sys.exit(run_on_hosts(options.hosts, torchrun, worker, environ))
    # One host: the processes find each other, and Gloo communicates, on the loopback interface.
    command = [*torchrun, "--standalone", "--local-addr=127.0.0.1", *worker]
    os.execve(sys.executable, command, {"GLOO_SOCKET_IFNAME": loopback(), **environ})
