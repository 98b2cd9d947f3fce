"""benchmarks/results/demo.md has the stages that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from torchrelay.demo import worker

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "demo.md"

_CALLS = ("self.report.stage", "self.report.timed")


def _stages_of_code() -> list[str]:
    """A pattern of each stage's name, by the calls of ``stage`` and ``timed``."""
    tree = ast.parse(Path(worker.__file__).read_text())
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names: dict[str, ast.expr] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    names[f"{node.targets[0].id}, line {node.lineno}"] = node.value
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in _CALLS:
                    found.append(_pattern(_last_assigned(node.args[0], names)))
    return found


def _last_assigned(name: ast.expr, assigned: dict[str, ast.expr]) -> ast.expr:
    if not isinstance(name, ast.Name):
        return name
    before = [
        (int(key.split()[-1]), value)
        for key, value in assigned.items()
        if key.startswith(f"{name.id},") and int(key.split()[-1]) < name.lineno
    ]
    return max(before, key=lambda pair: pair[0])[1]


def _pattern(node: ast.expr) -> str:
    if isinstance(node, ast.IfExp):
        return f"(?:{_pattern(node.body)}|{_pattern(node.orelse)})"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_pattern, node.values))
    return re.escape(str(node.value)) if isinstance(node, ast.Constant) else ".*"


def _stages_of(section: str) -> list[str]:
    """The first column of the table of stages; a long name has several lines."""
    names: list[str] = []
    for line in section[section.index("Stages, on rank 0") :].splitlines():
        if line.startswith("└"):
            break
        if line.startswith("│"):
            name, time = (cell.strip() for cell in line.split("│")[1:3])
            if time:
                names.append(name)
            else:
                names[-1] = f"{names[-1]} {name}".strip()
    return names


@pytest.mark.parametrize("section", RESULTS.read_text().split("\n## ")[1:], ids=lambda s: s[:12])
def test_a_results_file_has_the_stages_of_the_code(section: str) -> None:
    patterns = [pattern.replace(r"\ \ ", "") for pattern in _stages_of_code()]
    names = _stages_of(section)
    assert len(patterns) > 12
    for pattern in patterns:
        assert any(re.fullmatch(pattern, name) for name in names), (pattern, names)
    assert len(names) == len(patterns)
    assert re.search(r"commit [0-9a-f]{7}", section)
