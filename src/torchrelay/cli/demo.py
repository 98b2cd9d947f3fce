"""``torchrelay demo``; imports torch only when it runs."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from torchrelay.demo.options import DemoOptions

__all__ = ["demo"]


def demo(**options: Any) -> None:
    """Train a model of real data on several processes, and compare each stage with the usual way.

    A ComplEx model is built by deferred initialisation. Its entity embeddings are trained in a
    parameter table, the rest by DistributedDataParallel over the [bold]sml[/bold] backend. It is
    saved to a sharded checkpoint, loaded again, evaluated by link prediction, and served beside
    another model.
    """
    from torchrelay.demo import launch  # noqa: PLC0415 - imports torch

    launch.run(DemoOptions(**options))


# The signature that typer reads: the fields that are described as options.
demo.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(DemoOptions, name),
            annotation=hint,
        )
        for name, hint in typing.get_type_hints(DemoOptions, include_extras=True).items()
        if typing.get_origin(hint) is typing.Annotated
    ]
)
