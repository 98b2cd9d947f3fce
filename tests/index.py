"""Write ``tests/README.md``: which test files run most of each module.

    pip install 'coverage>=7.10'
    coverage run -m pytest -n 4 --dist loadfile --record
    coverage combine && python tests/index.py

A line counts for a test file if one of its tests runs it, in any process; lines that run when a
module is imported do not.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "torchrelay"
PAGE = ROOT / "tests" / "README.md"
MOST = 3  # files for each module
HEAD = "| module | test files, and how many of its lines they run |"


def test_files() -> dict[tuple[str, str], str]:
    """Return the file of each test, by the file's stem and the test's name."""
    return {
        (path.stem, name): str(path.relative_to(PAGE.parent))
        for path in PAGE.parent.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def lines_of(
    data: coverage.CoverageData, module: Path, files: dict[tuple[str, str], str]
) -> Counter[str]:
    """Return how many lines of a module each test file runs."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for line, contexts in data.contexts_by_lineno(str(module)).items():
        for context in filter(None, contexts):
            stem, test = context.split(".")[-2:]
            if file := files.get((stem, test)):
                found[file].add(line)
    return Counter({file: len(lines) for file, lines in found.items()})


def main() -> None:
    data = coverage.CoverageData(str(ROOT / ".coverage"))
    data.read()
    files, rows = test_files(), []
    for module in sorted(SOURCE.rglob("*.py")):
        most = [
            f"`{file}` {lines}" for file, lines in lines_of(data, module, files).most_common(MOST)
        ]
        if most:
            rows.append(f"| `{module.relative_to(SOURCE)}` | {', '.join(most)} |")
    PAGE.write_text("\n".join(["# Which tests run a module", "", HEAD, "|---|---|", *rows]) + "\n")


if __name__ == "__main__":
    main()
