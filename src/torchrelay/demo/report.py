"""What the demo reports: lines and tables, printed and kept for a page of HTML."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from torchrelay.demo.evaluation import HITS_AT, RankingMetrics

__all__ = ["Report"]

_PAGE = Path(__file__).with_name("report.html")
_BAR_WIDTH = 40
_BESIDE = ("the usual way", "its time", "ratio")


class Report:
    """Prints what is reported, and writes it to a page; ``quiet`` on all ranks but one."""

    def __init__(self, *, quiet: bool = False) -> None:
        # Names of entities may look like markup.
        self._console = Console(record=True, quiet=quiet, markup=False, emoji=False)
        self._stages: list[tuple[str, ...]] = []
        self._largest_loss = 0.0

    def line(self, text: str) -> None:
        """Report a line of text."""
        self._console.print(text)

    def epoch(self, epoch: int, epochs: int, loss: float) -> None:
        """Report an epoch's mean loss, and draw it as a bar."""
        self._largest_loss = max(self._largest_loss, loss)
        bar = "█" * round(_BAR_WIDTH * loss / self._largest_loss)
        self.line(f"epoch {epoch} of {epochs}: mean loss {loss:.4f} {bar}")

    def stage(self, name: str, seconds: float, usual: str = "", usual_s: float = 0.0) -> None:
        """Keep the time of a stage, and that of the same work done the ``usual`` way; 0 if it was
        not measured.
        """
        beside = (usual, _format(usual_s), f"{usual_s / seconds:.2f}") if usual_s else ("", "", "")
        self._stages.append((name, _format(seconds), *beside))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block as a stage."""
        start = time.perf_counter()
        yield
        self.stage(name, time.perf_counter() - start)

    def stages(self) -> None:
        """Report all stages so far."""
        self._table("Stages, on rank 0", ("stage", "time", *_BESIDE), self._stages)

    def metrics(self, rows: Mapping[str, RankingMetrics]) -> None:
        """Report filtered MRR and Hits@k, a row per name."""
        headings = ("facts", "questions", "MRR", *(f"Hits@{k}" for k in HITS_AT))
        texts = (
            (name, f"{one.questions:,}", *(f"{value:.4f}" for value in (one.mrr, *one.hits)))
            for name, one in rows.items()
        )
        self._table("Link prediction: both sides, filtered, ties shared", headings, texts)

    def sizes(self, title: str, sizes: Mapping[str, int]) -> None:
        """Report numbers of bytes."""
        rows = ((name, f"{size_bytes / 1e6:,.1f} MB") for name, size_bytes in sizes.items())
        self._table(title, ("what", "size"), rows)

    def write(self, path: Path) -> None:
        """Write what was reported to a page that needs no other file and no network."""
        self._console.save_html(str(path), code_format=_PAGE.read_text())

    def _table(self, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Report a table; all columns but those of names are figures, which stand at the right."""
        table = Table(title=title, title_justify="left")
        for heading in headings:
            is_name = heading in (headings[0], _BESIDE[0])
            justify: Literal["left", "right"] = "left" if is_name else "right"
            table.add_column(heading, overflow="fold", justify=justify, no_wrap=not is_name)
        for row in rows:
            table.add_row(*row)
        self._console.print(table)


def _format(seconds: float) -> str:
    """Format seconds with three digits and a unit: ``1.23 s``, ``45.6 ms``."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
