"""The server process, and the table of `torchrelay serve --bench`, over a models file."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from torchrelay.config import Switching
from torchrelay.errors import ConfigError, UnavailableError
from torchrelay.switching._models_file import ModelsFile
from torchrelay.switching._queue import Reply
from torchrelay.switching._store import ModelStore
from torchrelay.switching._switcher import Switcher

__all__ = ["print_table", "serve"]


@contextlib.contextmanager
def _opened(
    file: ModelsFile, options: Switching, report: Callable[[str], object]
) -> Iterator[tuple[Switcher, ModelStore]]:
    """Load the file's models, and keep profiles, by default in the user's cache folder."""
    sys.path.append(str(file.folder))
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = options.profile_folder or str(Path(cache) / "torchrelay" / "switching")
    with ModelStore() as store, Switcher(store, options, profile_folder=folder) as switcher:
        report(f"device: {switcher.device}, arena of {options.arena_bytes / 2**20:.1f} MiB")
        for entry in file.models.values():
            if entry.load:
                entry.add_to(store)
                switcher.load(entry.name, priority=entry.priority)
                report(f"{entry.name}: {store.get(entry.name).size_bytes / 2**20:.1f} MiB, ready")
        yield switcher, store


def serve(file: ModelsFile, *, report: Callable[[str], None] = print) -> None:
    """Load the file's models and serve until SIGINT or SIGTERM; then finish what is running.
    Blocks.

    Args:
        report: receives one line for each step of the start.

    Raises:
        UnavailableError: the `[serve]` extra is missing, or the port is in use: before a model is
            built.
        TorchRelayError: a model cannot be built or loaded, or the switcher failed.
    """
    try:
        from torchrelay.switching._connections import HttpServer, bind  # noqa: PLC0415 - an extra
        from torchrelay.switching._http import Application  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            "serving needs httptools and prometheus-client: pip install httptools "
            f"prometheus-client ({error})"
        ) from error
    options = file.server
    with (
        bind(options.host, options.port) as listener,
        _opened(file, options, report) as (switcher, store),
    ):
        address = f"http://{options.host}:{listener.getsockname()[1]}"
        server = HttpServer(
            Application(switcher, store, file.models, options),
            options.grace_s,
            on_start=lambda: report(f"serving on {address}"),
            has_failed=lambda: switcher.failure is not None,
        )
        gc.collect()
        gc.freeze()  # what is here stays: torch's objects would be searched again and again
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.end)
        served = switcher.run(server.serve(listener))
        # Not for ever at once: a signal just before the wait begins would be seen at its end.
        while not concurrent.futures.wait([served], 1.0).done:
            pass
        served.result()
        switcher.close(server.grace_left_s)
        if switcher.failure is not None:
            raise switcher.failure


def print_table(file: ModelsFile, rounds: int) -> None:
    """Switch between the models `rounds` times; print medians, and the time of a resident model."""
    names = [entry.name for entry in file.models.values() if entry.load]
    if not names:
        raise ConfigError("no model of the file has load = true")
    switched: dict[str, list[Reply]] = {name: [] for name in names}
    ready: dict[str, list[Reply]] = {name: [] for name in names}
    with _opened(file, file.server, lambda _: None) as (switcher, store):
        for _ in range(rounds):
            for name in names:
                inputs = {spec.name: spec.example_tensor() for spec in store.get(name).inputs}
                # At once again: the model is in place, so this is the model's own time.
                for replies in (switched, ready):
                    replies[name].append(switcher.submit(name, inputs).result())
        sizes = {name: store.get(name).size_bytes / 2**20 for name in names}
    table = Table(title=f"Switching, medians; {torch.get_num_threads()} threads")
    table.add_column("model")
    for head in ("size, MiB", "copied, MiB", "switched to, ms", "ready, ms", "switching costs, ms"):
        table.add_column(head, justify="right")
    for name in names:
        copied = statistics.median(reply.copied_bytes for reply in switched[name]) / 2**20
        total_ms, own_ms = (
            statistics.median((one.switch_s + one.compute_s) * 1e3 for one in replies[name])
            for replies in (switched, ready)
        )
        row = sizes[name], copied, total_ms, own_ms, total_ms - own_ms
        table.add_row(name, *(f"{value:.2f}" for value in row))
    Console().print(table)
