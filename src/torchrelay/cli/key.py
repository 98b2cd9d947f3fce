"""``torchrelay key``: make the key of a job."""

from __future__ import annotations

from pathlib import Path

import typer

from torchrelay.errors import StorageError

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Make a key, which encrypts what a job sends between hosts."
)

_PATH = typer.Argument(help="A new file, which only its owner can read.")


@app.callback()
def _key() -> None:  # typer drops the name of a command that has no sibling, but for this
    pass


@app.command()
def create(path: Path = _PATH) -> None:
    """Write a new key to a file, for all processes of a job."""
    from torchrelay import transport  # noqa: PLC0415 - without the native core, doctor must run

    try:
        transport.create_key(path)
    except FileExistsError:
        raise StorageError(f"{path} exists; a key is never overwritten") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    typer.echo(
        f"{path} has a new key. Copy it to each host, and set this in all processes of the job:\n"
        f"  TORCHRELAY_TRANSPORT_KEY_FILE={path.absolute()}"
    )
