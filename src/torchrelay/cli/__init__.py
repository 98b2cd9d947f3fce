"""The ``torchrelay`` command: one file per sub-command."""

from __future__ import annotations

import sys

try:
    import rich  # noqa: F401 - what the sub-commands print with
    import typer
except ModuleNotFoundError as error:
    sys.exit(f"torchrelay: the command needs {error.name}: pip install typer rich (extra [cli])")

from torchrelay import __version__
from torchrelay._output import OutputError, guarded_stdout
from torchrelay.cli import checkpoint, key
from torchrelay.cli.demo import demo
from torchrelay.cli.doctor import doctor
from torchrelay.cli.serve import serve
from torchrelay.cli.switch import switch
from torchrelay.errors import TorchRelayError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="In-network aggregation, deferred initialisation, checkpoints, differentiable MPI, "
    "adaptive embeddings and model switching for an unpatched PyTorch.\n\n"
    "Start with [bold]torchrelay doctor[/bold], which reports what works on this machine, then "
    "[bold]torchrelay demo[/bold], which trains a model of real data.",
    epilog="Settings are environment variables: docs/settings.md lists them all.",
)
app.command(rich_help_panel="First steps")(doctor)
app.command(rich_help_panel="First steps")(demo)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel="Tools")
app.add_typer(key.app, name="key", rich_help_panel="Tools")
app.command(rich_help_panel="Services")(serve)
app.command(rich_help_panel="Services")(switch)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchrelay {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    pass


def main() -> None:
    """Run the command. Errors of TorchRelay are printed as one sentence; the command ends without
    one if nobody reads its output any more.
    """
    try:
        with guarded_stdout():
            app()
    except OutputError as error:
        error.report("torchrelay")
        sys.exit(error.exit_code)
    except TorchRelayError as error:
        typer.echo(f"torchrelay: {error}", err=True)
        sys.exit(error.exit_code)
