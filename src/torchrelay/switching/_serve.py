"""The server process: serves a models file over HTTP until SIGINT or SIGTERM."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator

from torchrelay.errors import UnavailableError
from torchrelay.switching._models_file import ModelsFile, ServerOptions
from torchrelay.switching._store import ModelStore
from torchrelay.switching._switcher import Switcher, default_profile_folder

__all__ = ["open_switcher", "serve"]


def open_switcher(options: ServerOptions, store: ModelStore) -> Switcher:
    """Return a switcher with the file's options."""
    return Switcher(
        store,
        arena_bytes=options.arena_bytes,
        device=options.device,
        workers=options.workers,
        threads=options.threads,
        link_gbps=options.link_gbps,
        request_bytes=options.request_bytes,
        queue_limit=options.queue_limit,
        client_limit=options.client_limit,
        run_timeout_s=options.run_timeout_s,
        profile_folder=default_profile_folder(),
    )


def serve(file: ModelsFile, *, report: Callable[[str], None] = print) -> None:
    """Load the file's models and serve until SIGINT or SIGTERM; then finish what is running.
    Blocks.

    Args:
        report: receives one line for each step of the start.

    Raises:
        UnavailableError: the `[serve]` extra is missing, or the port is in use.
        TorchRelayError: a model cannot be built or loaded.
    """
    try:
        import uvicorn  # noqa: PLC0415 - an optional extra

        from torchrelay.switching._http import create_app  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            "serving needs fastapi, uvicorn and prometheus-client: pip install "
            f"'torchrelay[serve]' ({error})"
        ) from error
    options = file.server
    sys.path.insert(0, str(file.folder))
    with ModelStore() as store, open_switcher(options, store) as switcher:
        for entry in file.models.values():
            if entry.load:
                entry.add_to(store)
                switcher.load(entry.name, priority=entry.priority)
                report(f"{entry.name}: {store.get(entry.name).size_bytes / 2**20:.1f} MiB, ready")
        app = create_app(switcher, store, file.models, request_bytes=options.request_bytes)
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, int(options.grace_s)),
            limit_concurrency=1024,
        )
        with config.bind_socket() as listener:
            address = f"http://{options.host}:{listener.getsockname()[1]}"

            class Server(uvicorn.Server):
                """Reports once it accepts connections and answers signals."""

                async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                    await super().startup(sockets)
                    report(f"serving on {address}")

            with _signals_end_gracefully():
                Server(config).run(sockets=[listener])
        switcher.close(options.grace_s)


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
