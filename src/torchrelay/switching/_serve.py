"""The server process: serves a models file over HTTP until SIGINT or SIGTERM."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from torchrelay.config import Switching
from torchrelay.errors import UnavailableError
from torchrelay.switching._models_file import ModelsFile
from torchrelay.switching._store import ModelStore
from torchrelay.switching._switcher import Switcher

__all__ = ["open_switcher", "serve"]

_LAST_S = 1.0  # after the grace, for what is still to be closed


def open_switcher(options: Switching, store: ModelStore) -> Switcher:
    """Return a switcher that keeps profiles, by default in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = options.profile_folder or str(Path(cache) / "torchrelay" / "switching")
    return Switcher(store, options, profile_folder=folder)


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
        import uvicorn  # noqa: PLC0415 - an optional extra

        from torchrelay.switching._connections import Connection, bind  # noqa: PLC0415
        from torchrelay.switching._http import create_app  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            "serving needs starlette, uvicorn and prometheus-client: pip install "
            f"starlette uvicorn prometheus-client ({error})"
        ) from error
    options = file.server
    sys.path.append(str(file.folder))
    with (
        bind(options.host, options.port) as listener,
        ModelStore() as store,
        open_switcher(options, store) as switcher,
    ):
        report(f"device: {switcher.device}, arena of {options.arena_bytes / 2**20:.1f} MiB")
        for entry in file.models.values():
            if entry.load:
                entry.add_to(store)
                switcher.load(entry.name, priority=entry.priority)
                report(f"{entry.name}: {store.get(entry.name).size_bytes / 2**20:.1f} MiB, ready")
        config = uvicorn.Config(
            create_app(switcher, store, file.models, options),
            http=Connection,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, int(options.grace_s)),
        )
        address = f"http://{options.host}:{listener.getsockname()[1]}"

        class Server(uvicorn.Server):
            """Reports once it accepts connections; ends on a signal, or with the switcher."""

            ends_at = math.inf

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                if self.should_exit:
                    os._exit(128 + sig)  # the second signal: the kernel ends the workers
                self.ends_at = time.monotonic() + options.grace_s
                # A factory that hangs in a thread would keep the process from ending.
                last = threading.Timer(options.grace_s + _LAST_S, os._exit, [1])
                last.daemon = True
                last.start()
                super().handle_exit(sig, frame)

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                report(f"serving on {address}")

        server = Server(config)

        def end_with_switcher() -> None:
            switcher.wait_ended()
            server.should_exit = True

        threading.Thread(target=end_with_switcher, name="torchrelay-watch", daemon=True).start()
        with _signals_end_gracefully():
            server.run(sockets=[listener])
        switcher.close(min(max(0.0, server.ends_at - time.monotonic()), options.grace_s))
        if switcher.failure is not None:
            raise switcher.failure


@contextlib.contextmanager
def _signals_end_gracefully() -> Iterator[None]:
    """Let uvicorn's handlers end the server; the signal that it raises again must not kill this
    process.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
