"""``torchrelay demo``; imports torch only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchrelay.demo.options import DemoOptions

__all__ = ["demo"]


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with train.txt, valid.txt, test.txt: lines of subject, relation, object, "
            "separated by tabs. Without it: the code graph of this Python's standard library."
        ),
    ] = None,
    allow_unseen: Annotated[
        bool,
        typer.Option(
            "--allow-unseen",
            help="Accept valid and test facts with an entity that train lacks (WN18RR).",
        ),
    ] = False,
    nproc: Annotated[int, typer.Option(min=1, help="Processes to train on.")] = DemoOptions.nproc,
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the training facts.")
    ] = DemoOptions.epochs,
    dim: Annotated[
        int, typer.Option(min=1, help="Complex numbers in an embedding.")
    ] = DemoOptions.dim,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Facts in a step, of all processes.")
    ] = DemoOptions.batch_size,
    negatives: Annotated[
        int,
        typer.Option(min=1, help="Entities that each process draws in a step as wrong answers."),
    ] = DemoOptions.negatives,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, help="Adagrad's, falling to 0 at the end.")
    ] = DemoOptions.learning_rate,
    regularisation: Annotated[
        float, typer.Option(min=0.0, help="Weight of the N3 regulariser.")
    ] = DemoOptions.regularisation,
    seed: Annotated[
        int, typer.Option(help="With --nproc 1, the same seed gives the same figures.")
    ] = DemoOptions.seed,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a silent process counts as lost.")
    ] = DemoOptions.timeout_s,
    serve: Annotated[
        bool,
        typer.Option(help="Serve the trained model beside another at the end, and time switches."),
    ] = DemoOptions.serve,
) -> None:
    """Train a model of real data on several processes, and compare each stage with the usual way.

    A ComplEx model is built by deferred initialisation. Its entity embeddings are trained in a
    parameter table, the rest by DistributedDataParallel over the [bold]sml[/bold] backend. It is
    saved to a sharded checkpoint, loaded again, evaluated by link prediction, and served beside
    another model.
    """
    options = DemoOptions(
        data=data or Path(),
        allow_unseen=allow_unseen,
        nproc=nproc,
        epochs=epochs,
        dim=dim,
        batch_size=batch_size,
        negatives=negatives,
        learning_rate=learning_rate,
        regularisation=regularisation,
        seed=seed,
        timeout_s=timeout,
        serve=serve,
    )
    from torchrelay.demo import launch  # noqa: PLC0415 - imports torch

    if data is None:
        launch.run_on_code_graph(options)
    launch.run(options)
