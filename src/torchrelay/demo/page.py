"""The demo's report as one HTML page, which needs no other file and no network."""

from __future__ import annotations

import html
import io
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from torchrelay import __version__
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.report import Report, Stage, format_seconds

__all__ = ["page"]

_TEMPLATE = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
# Colours of the drawing that become those of the page, which follow the reader's theme.
_INK, _LINE, _OURS, _USUAL, _REST = (f"#01020{digit}" for digit in range(5))
_COLOURS = {
    _INK: "var(--ink)",
    _LINE: "var(--line)",
    _OURS: "var(--ours)",
    _USUAL: "var(--usual)",
    _REST: "var(--faint)",
}
_STYLE: Any = {
    "svg.fonttype": "none",  # text, in the reader's font
    "svg.hashsalt": "torchrelay",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_WIDTH_IN = 4.6  # readable on a phone, whose page is about as wide
_GROUP_ROW = 0.4  # of the height of a request's row


def page(report: Report, options: DemoOptions, facts: str) -> str:
    """Return the page. ``facts`` names the data."""
    compared = [stage for stage in report.stages if stage.usual_s]
    with mpl.rc_context(_STYLE):
        return _TEMPLATE.substitute(
            summary=html.escape(_summary(report, options, facts)),
            learning=_figure(_losses(report.losses), "Mean loss of an epoch")
            + _figure(
                _mrr(report), "Mean reciprocal rank on test: 1 if every first answer is right"
            ),
            stages_picture=_svg(_stages(compared)),
            stages_table=_table(*report.tables["stage"], {0, 2}),
            serving=_serving(report.switches),
            metrics=_table(*report.tables["facts"], {0}),
            sizes=_table(*report.tables["what"], {0}),
            command=html.escape(options.command),
            versions=html.escape(
                f"torchrelay {__version__}, torch {torch.__version__}, "
                f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
                f"{torch.get_num_threads()} threads in each process"
            ),
        )


def _summary(report: Report, options: DemoOptions, facts: str) -> str:
    """Return two sentences: what was done, and what came of it."""
    processes = options.nproc * options.hosts
    total = format_seconds(report.stages[-1].seconds)
    test, baseline = (report.metrics[name].mrr for name in ("test", "test, most frequent answer"))
    many = "one process" if processes == 1 else f"{processes} processes"
    served = ", calibrated and served beside another model" if options.serve else " and calibrated"
    return (
        f"In {total}, a model of {facts} was built without memory, trained by {many}, saved, "
        f"loaded{served}. Asked for the missing end of a fact, it reaches a mean reciprocal rank "
        f"of {test:.3f}; answering with what is most frequent reaches {baseline:.3f}."
    )


def _axes(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    return figure, figure.add_subplot()


def _losses(losses: Sequence[float]) -> Figure:
    figure, axes = _axes(2.2)
    axes.plot(range(1, len(losses) + 1), losses, color=_OURS, marker="o", markersize=4)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    return figure


def _mrr(report: Report) -> Figure:
    figure, axes = _axes(2.2)
    names = {"most frequent answer": "test, most frequent answer", "the trained model": "test"}
    values = [report.metrics[row].mrr for row in names.values()]
    bars = axes.barh(list(names), values, color=[_USUAL, _OURS], height=0.6)
    axes.bar_label(bars, [f"{value:.3f}" for value in values], padding=4)
    axes.set_xlim(0, 1)
    return figure


def _stages(stages: Sequence[Stage]) -> Figure:
    """Draw both times of each stage on a line, in the order of the table."""
    figure, axes = _axes(0.6 + 0.5 * len(stages))
    for place, stage in enumerate(reversed(stages)):
        axes.plot([stage.seconds, stage.usual_s], [place] * 2, color=_LINE, linewidth=2, zorder=1)
        axes.scatter(stage.usual_s, place, color=_USUAL, marker="D", s=30, zorder=2)
        axes.scatter(stage.seconds, place, color=_OURS, marker="o", s=36, zorder=3)
        _above(axes, place, stage.name.strip().split(":")[0], 9)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(
        lambda seconds, _: format_seconds(seconds).replace("1e+03", "1000")
    )
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(stages) - 0.2)
    axes.grid(axis="x")
    return figure


def _serving(switches: Sequence[dict[str, Any]]) -> str:
    """Return the section about a switch; nothing was served with ``--no-serve``."""
    if not switches:
        return ""
    caption = (
        "From the request until its answer. A model that is not in device memory is copied there "
        "in groups, and computes as soon as the first is in place; one that stayed is not copied. "
        "Below a request: when each group was copied, and when it was computed. "
        "The rest is messages between the processes."
    )
    return f"<h2>A switch to the trained model</h2>{_figure(_timeline(switches), caption)}"


def _timeline(switches: Sequence[dict[str, Any]]) -> Figure:
    """Draw the parts of each request's time one after the other, and below them when each group was
    copied and computed.
    """
    rows = sum(1 + _GROUP_ROW * len(one["groups"]) for one in switches)
    figure, axes = _axes(0.9 + 0.55 * rows)
    parts = {"waits": _LINE, "switches": _USUAL, "computes": _OURS, "the rest": _REST}
    place, ticks = 0.0, dict[float, str]()
    for one in switches:
        times = [one["queue_ms"], one["switch_ms"], one["compute_ms"]]
        times.append(max(0.0, one["total_ms"] - sum(times[1:])))  # a total begins after the wait
        left = 0.0
        for (label, colour), width in zip(parts.items(), times, strict=True):
            axes.barh(place, width, left=left, color=colour, height=0.35, label=label)
            left += width
        count = len(one["groups"])
        groups = f" in {count} group{'s' * (count != 1)}" if count else ""
        size = f"{one['copied_bytes'] / 1e6:.1f} MB copied{groups}"
        text = f"{one['kind']}, {size if one['copied_bytes'] else 'nothing copied'}: {left:.2f} ms"
        _above(axes, place, text, 12)
        for index, (copied, computed) in enumerate(_group_spans(one), 1):
            place -= _GROUP_ROW
            ticks[place] = f"group {index}"
            for (start, end), colour in ((copied, _USUAL), (computed, _OURS)):
                axes.barh(place, end - start, left=start, color=colour, height=0.2)
        place -= 1
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place + 0.6, 0.8)
    axes.set_xlabel("ms")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[: len(parts)], labels[: len(parts)], loc="outside upper left", ncols=4)
    return figure


def _group_spans(switch: dict[str, Any]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return when each group of a switch was copied, and when it was computed, in the order in
    which they were needed: one is copied after the other, and computed until the next is needed.
    """
    groups, wait = switch["groups"], switch["queue_ms"]
    ends = [one["needed_ms"] for one in groups[1:]]
    ends += [one["computes_ms"] + switch["compute_ms"] for one in groups[:1]]  # of the last
    arrived = sorted(one["arrived_ms"] for one in groups)
    before = dict(zip(arrived, [0.0, *arrived], strict=False))
    return [
        (
            (wait + before[one["arrived_ms"]], wait + one["arrived_ms"]),
            (wait + one["computes_ms"], wait + max(one["computes_ms"], end)),
        )
        for one, end in zip(groups, ends, strict=True)
    ]


def _above(axes: Axes, place: float, text: str, points: int) -> None:
    """Write at the left edge, a few points above a line."""
    axes.annotate(
        text,
        (0, place),
        (0, points),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
    )


def _figure(figure: Figure, caption: str) -> str:
    return f"<figure>{_svg(figure)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _svg(figure: Figure) -> str:
    """Return the drawing as an element of the page, in the page's colours."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, name in _COLOURS.items():
        text = text.replace(colour, name)
    return re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg \1 role="img">', text, count=1)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], names: set[int]) -> str:
    """Return a table whose columns are figures, but for those of ``names``."""

    def line(tag: str, cells: Sequence[str]) -> str:
        inside = (
            f"<{tag}{'' if column in names else ' class=figure'}>{html.escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )
        return f"<tr>{''.join(inside)}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f"<table>{line('th', headings)}\n{body}</table>"
