"""``torchrelay serve``: many models from one device memory, over the Open Inference Protocol."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from torchrelay._output import optional_output
from torchrelay.config import Switching, check_value
from torchrelay.errors import ConfigError, UnavailableError

__all__ = ["serve"]

_SETTINGS = {field.name: field for field in dataclasses.fields(Switching)}


def serve(
    models: Annotated[
        Path | None,
        typer.Argument(
            help="The models file, in TOML, or a folder of such files; docs/serving.md describes "
            "them."
        ),
    ] = None,
    snapshots: Annotated[
        Path | None,
        typer.Option(
            "--models",
            help="A folder of Hugging Face snapshots, in place of a file: language models, by the "
            "names of their folders; docs/generate.md describes them.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Serve the models of a file from one memory, switching between them in milliseconds.

    The other options override the file's table [bold]server[/bold]. Process listings show them, so
    set TORCHRELAY_SWITCHING_API_KEY instead of --api-key.
    """
    try:
        # torch takes seconds to import
        from torchrelay.switching.http import _serve  # noqa: PLC0415
        from torchrelay.switching.http._models_file import ModelsFile  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            "serving needs the extra [serve]: pip install uvicorn httptools uvloop msgspec "
            f"prometheus-client ({error})"
        ) from error
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        check_value(value, _SETTINGS[name], f"--{name.replace('_', '-')}")
    if models is not None and snapshots is None:
        file = ModelsFile.read(models)
    elif snapshots is not None and models is None:
        file = ModelsFile.of_snapshots(snapshots)
    else:
        raise ConfigError("name a models file, or a folder of snapshots with --models")
    file = dataclasses.replace(file, server=dataclasses.replace(file.server, **given))
    _serve.serve(file, report=_report)


@optional_output("torchrelay serve")
def _report(line: str) -> None:
    typer.echo(line)


def _option(setting: dataclasses.Field[Any]) -> inspect.Parameter:
    option = typer.Option(help=setting.metadata["doc"], show_default=str(setting.default) or False)
    hint = Annotated[type(setting.default) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint
    )


# The signature that typer reads has an option for each setting instead of ``options``.
*_own, _ = inspect.signature(serve, eval_str=True).parameters.values()
serve.__signature__ = inspect.Signature([*_own, *map(_option, _SETTINGS.values())])  # type: ignore[attr-defined]
