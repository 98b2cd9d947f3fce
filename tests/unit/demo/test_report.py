"""What is printed: names as they are, times with three digits and a unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchrelay.demo.evaluation import RankingMetrics
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.page import _group_spans, page
from torchrelay.demo.report import Report, Stage, format_seconds


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


def test_names_are_printed_as_they_are_even_with_brackets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report()
    report.line("[/green] :smile:")
    report.add_sizes({"list[int]": 1})
    output = capsys.readouterr().out
    assert "[/green] :smile:" in output and "list[int]" in output


def test_a_stage_without_a_rival_has_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.stage("alone", 2.0)
    report.stage("beside", 0.5, "the other", 1.0)
    report.print_stages()
    lines = capsys.readouterr().out.splitlines()
    alone = next(line for line in lines if "alone" in line)
    assert alone.split() == ["│", "alone", "│", "2.0", "s", *"││││"]
    assert "│ 2.00 │" in next(line.replace("  ", " ") for line in lines if "beside" in line)


def test_metrics_have_four_digits(capsys: pytest.CaptureFixture[str]) -> None:
    Report().add_metrics({"test": RankingMetrics(1200, 0.51234, (0.4, 0.5, 0.6))})
    output = capsys.readouterr().out
    assert all(figure in output for figure in ("1,200", "0.5123", "0.4000", "0.5000", "0.6000"))


def test_a_stage_that_is_slower_says_why() -> None:
    slower = Stage("build", 2.0, "eager", 1.0, "small")
    assert slower.cells() == ("build", "2.0 s", "eager; slower: small", "1.0 s", "0.50")
    faster = Stage("build", 1.0, "eager", 2.0, "small")
    assert faster.cells()[2] == "eager"


def test_the_page_has_everything_and_needs_nothing_else() -> None:
    report = Report(quiet=True)
    report.stage("a <stage>: with more", 2.0, "usual & known", 4.0)
    report.stage("all of it", 9.0)
    report.print_stages()
    for epoch, loss in enumerate([4.0, 1.0, 2.0], 1):
        report.epoch(epoch, 3, loss)
    metrics = RankingMetrics(1200, 0.51234, (0.4, 0.5, 0.6))
    report.add_metrics({"test": metrics, "test, most frequent answer": metrics})
    report.add_sizes({"memory": 5_000_000})
    times = {"queue_ms": 1.0, "switch_ms": 2.0, "compute_ms": 3.0, "total_ms": 7.0}
    groups = [
        {"arrived_ms": 2.0, "needed_ms": 0.5, "computes_ms": 2.1},
        {"arrived_ms": 3.0, "needed_ms": 2.6, "computes_ms": 3.1},
    ]
    report.switches = [
        {**times, "kind": "cold", "copied_bytes": 2_000_000, "groups": groups},
        {**times, "kind": "resident", "copied_bytes": 0, "groups": []},
    ]
    options = DemoOptions(data=Path("/of this/machine/WN18RR"), epochs=3, serve=False)
    text = page(report, options, "5 facts")
    assert "torchrelay demo --data WN18RR --epochs 3 --no-serve</code>" in text
    assert "a &lt;stage&gt;" in text and "<stage>" not in text and "usual &amp; known" in text
    assert "0.512" in text and "5.0 MB" in text and "2.0 MB copied in 2 groups: 8.00 ms" in text
    assert "nothing copied: 8.00 ms" in text and text.count(">group ") == 2
    assert "torch " in text and text.count("<svg") == 4 and "/of this" not in text
    assert str(Path.home()) not in text
    assert not re.search(r"(?:src|href)=[\"'](?!#)|url\((?!#)|@import|<script", text)
    assert not re.search(r"[$]\w+|#01020", text)


def test_a_group_is_copied_after_the_one_before_and_computed_until_the_next_is_needed() -> None:
    groups = [
        {"arrived_ms": 2.0, "needed_ms": 0.5, "computes_ms": 2.1},
        {"arrived_ms": 3.0, "needed_ms": 2.6, "computes_ms": 3.1},
    ]
    switch = {"queue_ms": 1.0, "switch_ms": 2.0, "compute_ms": 3.0, "groups": groups}
    assert _group_spans(switch) == [
        ((1.0, 3.0), (3.1, 3.6)),
        ((3.0, 4.0), (4.1, 6.1)),
    ]


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Report(quiet=True).line("nothing")
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_what_is_going_on_until_the_next_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Report().doing("not shown in a file")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    report = Report()
    report.doing("reading")
    report.line("read")
    cleared = "\r\x1b[2K"
    assert capsys.readouterr().out == f"{cleared}reading ...{cleared}read\n"
