"""Tables that the demo prints: metrics, predictions, stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.markup import escape
from rich.table import Table

from torchrelay.demo.evaluation import HITS_AT, RankingMetrics

__all__ = [
    "Prediction",
    "Stage",
    "metrics_table",
    "predictions_table",
    "stages_table",
]


@dataclass(frozen=True)
class Stage:
    """A row of the table of stages. ``usual_s`` is the time of the same work done the ``usual``
    way; 0 if it was not measured.
    """

    name: str
    seconds: float
    usual: str = ""
    usual_s: float = 0.0


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
    for heading in ("stage", "time", "the usual way", "its time", "ratio"):
        is_text = heading in ("stage", "the usual way")
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(heading, overflow="fold", justify=justify, no_wrap=not is_text)
    for stage in stages:
        usual = format_seconds(stage.usual_s) if stage.usual_s else ""
        ratio = f"{stage.usual_s / stage.seconds:.2f}" if stage.usual_s else ""
        table.add_row(stage.name, format_seconds(stage.seconds), stage.usual, usual, ratio)
    return table


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits and a unit: ``1.23 s``, ``45.6 ms``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s"
