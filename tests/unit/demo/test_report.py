"""What is printed: names as they are, times with three digits and a unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchrelay.demo.evaluation import RankingMetrics
from torchrelay.demo.report import Report, _format


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
    assert _format(seconds) == text


def test_names_are_printed_as_they_are_even_with_brackets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report()
    report.line("[/green] :smile:")
    report.sizes("names", {"list[int]": 1})
    output = capsys.readouterr().out
    assert "[/green] :smile:" in output and "list[int]" in output


def test_a_stage_without_a_rival_has_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.stage("alone", 2.0)
    report.stage("beside", 0.5, "the other", 1.0)
    report.stages()
    lines = capsys.readouterr().out.splitlines()
    alone = next(line for line in lines if "alone" in line)
    assert alone.split() == ["│", "alone", "│", "2.0", "s", *"││││"]
    assert "│ 2.00 │" in next(line.replace("  ", " ") for line in lines if "beside" in line)


def test_metrics_have_four_digits(capsys: pytest.CaptureFixture[str]) -> None:
    Report().metrics({"test": RankingMetrics(1200, 0.51234, (0.4, 0.5, 0.6))})
    output = capsys.readouterr().out
    assert all(figure in output for figure in ("1,200", "0.5123", "0.4000", "0.5000", "0.6000"))


def test_the_page_has_everything_and_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report()
    report.line("data & facts")
    report.stage("a <stage>", 2.0)
    report.stages()
    for epoch, loss in enumerate([4.0, 1.0, 2.0], 1):
        report.epoch(epoch, 3, loss)
    report.write(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    text = re.sub(r"</?span[^>]*>", "", page)
    assert f"epoch 1 of 3: mean loss 4.0000 {40 * '█'}\n" in text
    assert f"epoch 2 of 3: mean loss 1.0000 {10 * '█'}\n" in text
    assert "data &amp; facts" in text and "a &lt;stage&gt;" in text and "<stage>" not in text
    assert not re.search(r"(?:src|href)=|url\(|@import|<script", page)
    assert not re.search(r"[{]\w+[}]", page)


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Report(quiet=True).line("nothing")
    assert capsys.readouterr().out == ""
