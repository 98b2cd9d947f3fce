"""``torchrelay serve``: many models from one device memory, over the Open Inference Protocol."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["serve"]


def serve(
    models: Annotated[
        Path, typer.Argument(help="The models file, in TOML; docs/switching.md describes it.")
    ],
    host: str | None = typer.Option(None, help="Address to listen at; the file's, or 127.0.0.1."),
    port: int | None = typer.Option(
        None, min=0, help="Port to listen on, 0 for a free one; the file's, or 8000."
    ),
    device: str | None = typer.Option(
        None, help="auto, cpu or cuda[:index]; the file's, or CUDA where there is a device."
    ),
    api_key: str | None = typer.Option(
        None,
        "--api-key",
        help="A secret that clients must send; better set TORCHRELAY_SWITCHING_API_KEY, which "
        "process listings do not show.",
    ),
    repository_control: bool | None = typer.Option(
        None, "--repository-control", help="Let clients load and unload the file's models."
    ),
    link_gbps: float | None = typer.Option(
        None,
        "--link-gbps",
        min=0.0,
        help="On the CPU, emulate a link of so many GB/s to the arena.",
    ),
    bench: bool = typer.Option(False, "--bench", help="Print a table of switching times and exit."),
    rounds: int = typer.Option(20, min=1, help="Requests to each model for --bench."),
) -> None:
    """Serve the models of a file from one memory, switching between them in milliseconds."""
    from torchrelay.switching import _serve  # noqa: PLC0415 - torch takes seconds to import
    from torchrelay.switching._models_file import ModelsFile  # noqa: PLC0415

    file = ModelsFile.read(models)
    given = {
        "host": host,
        "port": port,
        "device": device,
        "link_gbps": link_gbps,
        "api_key": api_key,
        "repository_control": repository_control,
    }
    changed = {key: value for key, value in given.items() if value is not None}
    file = dataclasses.replace(file, server=dataclasses.replace(file.server, **changed))  # type: ignore[arg-type]
    if bench:
        _serve.print_table(file, rounds)
    else:
        _serve.serve(file, report=typer.echo)
