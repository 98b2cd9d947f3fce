"""The server process over a models file."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from torchrelay.config import Switching
from torchrelay.switching._switcher import Switcher
from torchrelay.switching.http._app import Application, log_access
from torchrelay.switching.http._models_file import ModelsFile
from torchrelay.switching.http._server import HttpServer, bind
from torchrelay.switching.models._store import ModelStore

__all__ = ["serve"]


def serve(file: ModelsFile, *, report: Callable[[str], None] = print) -> None:
    """Load the file's models and serve until SIGINT or SIGTERM; then finish what is running.
    Blocks.

    Args:
        report: receives one line for each step of the start.

    Raises:
        ConfigError: the certificate or its key cannot be read.
        UnavailableError: the port is in use: before a model is built.
        TorchRelayError: a model cannot be built or loaded, or the switcher failed.
    """
    options = file.server
    if options.access_log:
        log_access()
    with (
        bind(options.host, options.port) as listener,
        _opened(file, options, report) as (switcher, store),
    ):
        scheme = "https" if options.tls_certificate else "http"
        address = f"{scheme}://{options.host}:{listener.getsockname()[1]}"
        app = Application(switcher, store, file.models, options, file.read_again)
        server = HttpServer(
            app,
            app.limits,
            options.grace_s,
            on_start=lambda: report(f"serving on {address}"),
            has_failed=lambda: switcher.failure is not None,
            on_tick=app.repository.unload_idle,
            on_late=switcher._end_requests,
            tls_certificate=options.tls_certificate,
            tls_key=options.tls_key,
        )
        _load(file, switcher, store, report)
        gc.collect()
        gc.freeze()  # what is here stays: torch's objects would be searched again and again
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.end)
        served = switcher.run(server.serve([listener]))
        # Not for ever at once: a signal just before the wait begins would be seen at its end.
        while not concurrent.futures.wait([served], 1.0).done:
            pass
        served.result()
        switcher.close(server.grace_left_s)
        if switcher.failure is not None:
            raise switcher.failure


@contextlib.contextmanager
def _opened(
    file: ModelsFile, options: Switching, report: Callable[[str], object]
) -> Iterator[tuple[Switcher, ModelStore]]:
    """Open a switcher whose profiles are kept, by default in the user's cache folder."""
    sys.path.extend(map(str, file.folders))
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = options.profile_folder or str(Path(cache) / "torchrelay" / "switching")
    with ModelStore() as store, Switcher(store, options, profile_folder=folder) as switcher:
        report(f"device: {switcher.device}, arena of {options.arena_bytes / 2**20:.1f} MiB")
        yield switcher, store


def _load(
    file: ModelsFile, switcher: Switcher, store: ModelStore, report: Callable[[str], object]
) -> None:
    """Load the models that are to be loaded at the start."""
    with _steps():
        for entry in file.models.values():
            if entry.load is True:
                entry.add_to(store)
                switcher.load(entry.name, priority=entry.priority, pinned=entry.pinned)
                report(f"{entry.name}: {store.get(entry.name).size_bytes / 2**20:.1f} MiB, ready")


@contextlib.contextmanager
def _steps() -> Iterator[None]:
    """Write what takes long to standard error."""
    log, handler = logging.getLogger("torchrelay.switching"), logging.StreamHandler(sys.stderr)
    if log.isEnabledFor(logging.INFO) or log.handlers:
        yield  # the user's own configuration does
        return
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
