"""Knowledge graphs for tests of the demo."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchrelay.demo.triples import Fact

__all__ = ["write_facts"]


def write_facts(path: Path, facts: Iterable[Fact]) -> None:
    """Write a file of tab-separated facts."""
    path.write_text("".join("\t".join(fact) + "\n" for fact in facts), encoding="utf-8")
