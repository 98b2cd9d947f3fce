"""What the demo reports: lines and tables, printed at once and kept for the page."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from torchrelay._output import optional_output
from torchrelay.demo.evaluation import HITS_AT, RankingMetrics

__all__ = ["Report", "Stage", "format_seconds"]

_BAR_WIDTH = 40
_BESIDE = ("the usual way", "its time", "ratio")
_NOT_SLOWER = 0.95  # ratios above it are within what two runs differ by
_CLEAR_LINE = "\r\033[2K"


@dataclass(frozen=True)
class Stage:
    """The time of a stage, and that of the same work done the usual way; 0 if not measured."""

    name: str
    seconds: float
    usual: str = ""
    usual_s: float = 0.0
    if_slower: str = ""  # why, where the usual way is faster

    @property
    def ratio(self) -> float:
        """How many times as long the usual way takes."""
        return self.usual_s / self.seconds

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the row of a table: name, time, usual way, its time, ratio."""
        time_s = format_seconds(self.seconds)
        if not self.usual_s:
            return self.name, time_s, "", "", ""
        why = f"; slower: {self.if_slower}" if self.if_slower and self.ratio < _NOT_SLOWER else ""
        ratio = f"{self.ratio:.0f}" if self.ratio >= 100 else f"{self.ratio:.2f}"
        return self.name, time_s, self.usual + why, format_seconds(self.usual_s), ratio


class Report:
    """Prints what is reported, and keeps it; ``quiet`` on all ranks but one."""

    def __init__(self, *, quiet: bool = False) -> None:
        # Names of entities may look like markup.
        self._console = Console(quiet=quiet, markup=False, emoji=False, highlight=False)
        self.stages: list[Stage] = []
        self.losses: list[float] = []
        self.metrics: dict[str, RankingMetrics] = {}
        # Headings and rows, by the first heading.
        self.tables: dict[str, tuple[Sequence[str], list[Sequence[str]]]] = {}
        self.lines: list[str] = []
        self.switches: list[dict[str, Any]] = []

    def doing(self, text: str) -> None:
        """Show on a terminal what is going on, until the next line."""
        if self._console.is_terminal and not self._console.quiet:
            with optional_output("torchrelay demo"):
                print(f"{_CLEAR_LINE}{text} ...", end="", flush=True)

    def line(self, text: str) -> None:
        """Report a line of text."""
        self.lines.append(text)
        self._print(text)

    def epoch(self, epoch: int, epochs: int, loss: float) -> None:
        """Report an epoch's mean loss, and draw it as a bar."""
        self.losses.append(loss)
        bar = "█" * round(_BAR_WIDTH * loss / max(self.losses))
        self._print(f"epoch {epoch} of {epochs}: mean loss {loss:.4f} {bar}")

    def stage(
        self, name: str, seconds: float, usual: str = "", usual_s: float = 0.0, if_slower: str = ""
    ) -> None:
        """Keep the time of a stage, and that of the same work done the ``usual`` way; 0 if it was
        not measured.
        """
        self.stages.append(Stage(name, seconds, usual, usual_s, if_slower))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block as a stage."""
        self.doing(name)
        start = time.perf_counter()
        yield
        self.stage(name, time.perf_counter() - start)

    def print_stages(self) -> None:
        """Print all stages so far."""
        rows = (stage.cells() for stage in self.stages)
        self._table("Stages, on rank 0", ("stage", "time", *_BESIDE), rows)

    def add_metrics(self, rows: Mapping[str, RankingMetrics]) -> None:
        """Report filtered MRR and Hits@k, a row per name."""
        self.metrics.update(rows)
        headings = ("facts", "questions", "MRR", *(f"Hits@{k}" for k in HITS_AT))
        texts = (
            (name, f"{one.questions:,}", *(f"{value:.4f}" for value in (one.mrr, *one.hits)))
            for name, one in rows.items()
        )
        self._table("Link prediction: both sides, filtered, ties shared", headings, texts)

    def add_sizes(self, sizes: Mapping[str, int]) -> None:
        """Report numbers of bytes."""
        rows = ((name, f"{size_bytes / 1e6:,.1f} MB") for name, size_bytes in sizes.items())
        self._table("Bytes, on rank 0", ("what", "size"), rows)

    def _table(self, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table; all columns but those of names are figures, which stand at the right."""
        self.tables[headings[0]] = headings, [*rows]
        table = Table(title=title, title_justify="left")
        for heading in headings:
            is_name = heading in (headings[0], _BESIDE[0])
            justify: Literal["left", "right"] = "left" if is_name else "right"
            table.add_column(heading, overflow="fold", justify=justify, no_wrap=not is_name)
        for row in self.tables[headings[0]][1]:
            table.add_row(*row)
        self._print(table)

    def _print(self, what: str | Table) -> None:
        with optional_output("torchrelay demo"):
            if self._console.is_terminal and not self._console.quiet:
                print(_CLEAR_LINE, end="", flush=True)
            self._console.print(what)


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits and a unit: ``1.23 s``, ``45.6 ms``."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
