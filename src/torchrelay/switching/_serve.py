"""The server process: serves a models file over HTTP until SIGINT or SIGTERM."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from torchrelay.config import Switching
from torchrelay.errors import UnavailableError
from torchrelay.switching._models_file import ModelsFile
from torchrelay.switching._store import ModelStore
from torchrelay.switching._switcher import Switcher

__all__ = ["open_file", "serve"]


@contextlib.contextmanager
def open_file(
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
        from torchrelay.switching._connections import Server, bind  # noqa: PLC0415 - an extra
        from torchrelay.switching._http import create_app  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            "serving needs starlette, uvicorn, httptools and prometheus-client: pip install "
            f"starlette uvicorn httptools prometheus-client ({error})"
        ) from error
    options = file.server
    with (
        bind(options.host, options.port) as listener,
        open_file(file, options, report) as (switcher, store),
    ):
        address = f"http://{options.host}:{listener.getsockname()[1]}"
        server = Server(
            create_app(switcher, store, file.models, options),
            grace_s=options.grace_s,
            on_start=lambda: report(f"serving on {address}"),
            has_failed=lambda: switcher.failure is not None,
        )
        gc.collect()
        gc.freeze()  # what is here stays: torch's objects would be searched again and again
        with _signals(server.end):
            switcher.run(server.serve(sockets=[listener])).result()
        switcher.close(server.grace_left_s)
        if switcher.failure is not None:
            raise switcher.failure


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM by `handler` within the block."""
    before = {one: signal.signal(one, handler) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)
