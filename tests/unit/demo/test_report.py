"""What is printed: names as they are, times with three digits and a
unit.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from torchrelay.demo.evaluation import RankingMetrics
from torchrelay.demo.report import (
    Listing,
    Report,
    Stage,
    format_seconds,
    metrics_listing,
    stages_listing,
)


def printed(listing: Listing) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(listing.printed())
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
    text = printed(Listing("names", ("a", "b"), (), [["list[int]", "[/green]"]]))
    assert "list[int]" in text and "[/green]" in text


def test_a_stage_without_a_rival_has_no_ratio() -> None:
    stages = [Stage("alone", 2.0), Stage("beside", 0.5, "the other", 1.0)]
    lines = printed(stages_listing(stages)).splitlines()
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
    text = printed(metrics_listing({"test": RankingMetrics(1200, 0.51234, (0.4, 0.5, 0.6))}))
    assert all(figure in text for figure in ("1,200", "0.5123", "0.4000", "0.5000", "0.6000"))


def test_the_page_has_everything_and_needs_nothing_else(tmp_path: Path) -> None:
    stages = stages_listing([Stage("a <stage>", 2.0), Stage("beside", 0.5, "the other", 1.0)])
    report = Report(["data & facts"], [3.0, 1.5, 1.0], [stages])
    report.write(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<p>data &amp; facts</p>" in page and "a &lt;stage&gt;" in page and "<stage>" not in page
    assert '<td class="figure" data-label="ratio">2.00</td>' in page
    assert 'points="0.0,0.0 300.0,135.0 600.0,180.0"' in page
    assert "from 3.000 to 1.000" in page
    assert not re.search(r"(?:src|href)=|url\(|@import|<script", page)
    assert not re.search(r"\$\w", page)


def test_a_page_of_one_epoch(tmp_path: Path) -> None:
    Report([], [2.0], []).write(tmp_path / "report.html")
    assert 'points="0.0,0.0"' in (tmp_path / "report.html").read_text()
