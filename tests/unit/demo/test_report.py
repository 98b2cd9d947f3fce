"""What is printed: names as they are, times with three digits and a
unit.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from torchrelay.demo.evaluation import RankingMetrics
from torchrelay.demo.report import (
    Prediction,
    Stage,
    format_seconds,
    metrics_table,
    predictions_table,
    stages_table,
)


def printed(*tables: Table, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal)
    for table in tables:
        console.print(table)
    return out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000668, "0.0668 ms"),
        (0.0122, "12.2 ms"),
        (0.9, "900 ms"),
        (1.04, "1.0 s"),
        (83.26, "83.3 s"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_names_are_printed_as_they_are_even_with_brackets() -> None:
    prediction = Prediction(
        "a[red]", "[b]", [("list[int]", True), ("[/green]", False)], "c[/d]", 1.5
    )
    text = printed(predictions_table([prediction]))
    assert "a[red] [b] ?" in text
    assert "list[int] ✓" in text and "[/green]" in text
    assert "c[/d]  1.5" in text


def test_a_stage_without_a_rival_has_no_ratio() -> None:
    stages = [Stage("alone", 2.0), Stage("beside", 0.5, "the other", 1.0)]
    lines = printed(stages_table(stages)).splitlines()
    assert next(line for line in lines if "alone" in line).split() == [
        "│",
        "alone",
        "│",
        "2.0",
        "s",
        *"││││",
    ]
    assert "│ 2.00 │" in next(line.replace("  ", " ") for line in lines if "beside" in line)


def test_metrics_have_four_digits() -> None:
    text = printed(metrics_table({"test": RankingMetrics(1200, 0.51234, (0.4, 0.5, 0.6))}))
    assert all(figure in text for figure in ("1,200", "0.5123", "0.4000", "0.5000", "0.6000"))
