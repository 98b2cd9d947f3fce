"""What the demo reports: tables of metrics and stages, printed and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from pathlib import Path
from string import Template
from typing import Literal

from rich.markup import escape
from rich.table import Table

from torchrelay.demo.evaluation import HITS_AT, RankingMetrics

__all__ = ["Listing", "Report", "Stage", "metrics_listing", "stages_listing"]

_PAGE = Path(__file__).with_name("report.html")
_CHART_WIDTH, _CHART_HEIGHT = 600, 180


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
class Listing:
    """A table of texts, whose columns are named by ``headings``; those in ``figures`` are aligned
    at the right.
    """

    title: str
    headings: Sequence[str]
    figures: Sequence[str]
    rows: Sequence[Sequence[str]]

    def printed(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for heading in self.headings:
            is_figure = heading in self.figures
            justify: Literal["left", "right"] = "right" if is_figure else "left"
            table.add_column(heading, overflow="fold", justify=justify, no_wrap=is_figure)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def as_html(self) -> str:
        """Return a heading and the table; in each cell, ``data-label`` repeats the heading."""
        kinds = [' class="figure"' if name in self.figures else "" for name in self.headings]
        labels = [escape_html(name) for name in self.headings]
        head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, labels, strict=True))
        body = "\n".join(
            "<tr>"
            + "".join(
                f'<td{kind} data-label="{label}">{escape_html(cell)}</td>'
                for kind, label, cell in zip(kinds, labels, row, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        heading = escape_html(self.title)
        return f"<h2>{heading}</h2>\n<table>\n<thead><tr>{head}</tr></thead>\n{body}\n</table>"


def metrics_listing(rows: Mapping[str, RankingMetrics]) -> Listing:
    """Return filtered MRR and Hits@k, a row per name."""
    figures = ("questions", "MRR", *(f"Hits@{k}" for k in HITS_AT))
    texts = [
        [name, f"{one.questions:,}", *(f"{value:.4f}" for value in (one.mrr, *one.hits))]
        for name, one in rows.items()
    ]
    title = "Link prediction: both sides, filtered, ties shared"
    return Listing(title, ("facts", *figures), figures, texts)


def stages_listing(stages: Sequence[Stage]) -> Listing:
    """Return the stages: time, and time of the usual way where it was measured."""
    rows = [
        [
            stage.name,
            format_seconds(stage.seconds),
            stage.usual,
            format_seconds(stage.usual_s) if stage.usual_s else "",
            f"{stage.usual_s / stage.seconds:.2f}" if stage.usual_s else "",
        ]
        for stage in stages
    ]
    figures = ("time", "its time", "ratio")
    headings = ("stage", "time", "the usual way", "its time", "ratio")
    return Listing("Stages, on rank 0", headings, figures, rows)


@dataclass
class Report:
    """What rank 0 collects for the page."""

    summary: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write a page that needs no other file and no network."""
        page = Template(_PAGE.read_text()).substitute(
            summary="\n".join(f"<p>{escape_html(line)}</p>" for line in self.summary),
            chart=_chart(self.losses),
            tables="\n".join(listing.as_html() for listing in self.listings),
        )
        path.write_text(page)


def _chart(losses: Sequence[float]) -> str:
    """Return an SVG line of the loss over epochs."""
    low, high = min(losses), max(losses)
    step_x = _CHART_WIDTH / max(len(losses) - 1, 1)
    scale_y = _CHART_HEIGHT / ((high - low) or 1.0)
    points = " ".join(
        f"{epoch * step_x:.1f},{(high - loss) * scale_y:.1f}" for epoch, loss in enumerate(losses)
    )
    return (
        f'<svg viewBox="-60 -15 {_CHART_WIDTH + 80} {_CHART_HEIGHT + 50}" role="img" '
        f'aria-label="mean loss of each epoch, from {losses[0]:.3f} to {losses[-1]:.3f}">'
        f'<path d="M0,0 V{_CHART_HEIGHT} H{_CHART_WIDTH}"/><polyline points="{points}"/>'
        f'<text x="-8" y="5" class="end">{high:.2f}</text>'
        f'<text x="-8" y="{_CHART_HEIGHT}" class="end">{low:.2f}</text>'
        f'<text x="0" y="{_CHART_HEIGHT + 22}">epoch 1</text>'
        f'<text x="{_CHART_WIDTH}" y="{_CHART_HEIGHT + 22}" class="end">{len(losses)}</text></svg>'
    )


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits and a unit: ``1.23 s``, ``45.6 ms``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s"
