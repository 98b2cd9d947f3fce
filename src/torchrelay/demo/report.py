"""Output of the demo: progress, metrics, predictions, and the table of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from torchrelay._resource import Resource
from torchrelay.demo.evaluation import HITS_AT, RankingMetrics

__all__ = [
    "Prediction",
    "Stage",
    "TrainingProgress",
    "metrics_table",
    "predictions_table",
    "stages_table",
]


@dataclass(frozen=True)
class Stage:
    """A row of the table of stages. ``usual_s`` is the time of the same work done the ``usual``
    way.
    """

    name: str
    seconds: float
    usual: str = ""
    usual_s: float | None = None


@dataclass(frozen=True)
class Prediction:
    """A question, the model's first answers with whether each is right, and the rank of the
    expected answer.
    """

    subject: str
    relation: str
    answers: Sequence[tuple[str, bool]]
    expected: str
    rank: float


class TrainingProgress(Resource):
    """A progress bar in a terminal; elsewhere a line per epoch. Silent if ``console`` is None."""

    def __init__(self, console: Console | None, epochs: int, steps: int) -> None:
        self._console, self._epochs, self._steps = console, epochs, steps
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._done, self._sum = 0, 0.0

    def __enter__(self) -> TrainingProgress:
        if self._console is not None and self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("training", total=self._epochs * self._steps)
            self._bar.start()
        return self

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()

    def step(self, epoch: int, loss: float) -> None:
        """Advance by one step of ``epoch`` (from 1) with this rank's loss."""
        self._done += 1
        self._sum += loss
        text = f"epoch {epoch} of {self._epochs}, loss {loss:.3f}"
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)
        elif self._console is not None and self._done % self._steps == 0:
            self._console.print(
                f"epoch {epoch} of {self._epochs}: mean loss {self._sum / self._steps:.4f}"
            )
        if self._done % self._steps == 0:
            self._sum = 0.0


def metrics_table(rows: Mapping[str, RankingMetrics]) -> Table:
    """Return a table of filtered MRR and Hits@k, a row per name."""
    table = Table(title="Link prediction: both sides, filtered, ties shared", title_justify="left")
    table.add_column("")
    for heading in ("questions", "MRR", *(f"Hits@{k}" for k in HITS_AT)):
        table.add_column(heading, justify="right")
    for name, metrics in rows.items():
        figures = (f"{value:.4f}" for value in (metrics.mrr, *metrics.hits))
        table.add_row(name, f"{metrics.questions:,}", *figures)
    return table


def predictions_table(predictions: Sequence[Prediction]) -> Table:
    """Return a table of questions with the model's answers; right ones in green, with a tick."""
    table = Table(
        title="Test questions drawn at random; answers known from train are left out",
        title_justify="left",
    )
    table.add_column("question", overflow="fold", ratio=4)
    table.add_column("first answers of the model", overflow="fold", ratio=5)
    table.add_column("expected, and its rank", overflow="fold", ratio=3)
    for prediction in predictions:
        answers = [
            f"[green]{escape(name)} ✓[/green]" if right else escape(name)
            for name, right in prediction.answers
        ]
        expected = f"{escape(prediction.expected)}  [bold]{prediction.rank:g}[/bold]"
        question = f"{escape(prediction.subject)} [bold]{escape(prediction.relation)}[/bold] ?"
        table.add_row(question, "\n".join(answers), expected)
    return table


def stages_table(stages: Sequence[Stage]) -> Table:
    """Return a table of stages: time, and time of the usual way where it was measured."""
    table = Table(title="Stages, on rank 0", title_justify="left")
    table.add_column("stage", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("the usual way", overflow="fold")
    table.add_column("its time", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    for stage in stages:
        usual = "" if stage.usual_s is None else format_seconds(stage.usual_s)
        ratio = "" if stage.usual_s is None else f"{stage.usual_s / stage.seconds:.2f}"
        table.add_row(stage.name, format_seconds(stage.seconds), stage.usual, usual, ratio)
    return table


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits and a unit: ``1.23 s``, ``45.6 ms``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s"
