"""The code-graph reader on a small package whose facts are known, and the split's promises on
random graphs.
"""

from __future__ import annotations

import random
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.demo.code_graph import (
    _source_files,
    prune,
    read_code_graph,
    split_facts,
    standard_library,
)
from torchrelay.demo.triples import SPLITS, Fact
from torchrelay.errors import DataError

SOURCES = {
    "shapes/__init__.py": """
        import os.path
        from . import round as curves
        from .round import Circle
        """,
    "shapes/round.py": """
        import functools as ft
        from ..shapes import square
        from math import pi

        LIMIT = 3

        class Base:
            pass

        @ft.total_ordering
        class Circle(Base, ValueError):
            def __init__(self, radius, *, unit="m"):
                self.radius = radius
                self._check()

            def _check(self):
                if self.radius > LIMIT:
                    raise ValueError("too big")

            def area(self):
                try:
                    return pi.real * len([self.radius]).bit_length()
                except (TypeError, OSError):
                    return helper(self)

        if LIMIT:
            async def helper(shape, /):
                local = shape.area()
                local()
                return square.side(local)
        """,
    "shapes/square.py": "def side(length): return length.__abs__()",
    "shapes/tests/test_round.py": "import shapes",
    "shapes/broken.py": "def (:",
    "site-packages/other.py": "import os",
}

FACTS = {
    ("shapes", "imports", "os.path"),
    ("shapes", "imports", "shapes.round"),
    ("shapes.round", "imports", "functools"),
    ("shapes.round", "imports", "math"),
    ("shapes.round", "imports", "shapes.square"),
    ("shapes.round", "defines", "shapes.round.Base"),
    ("shapes.round", "defines", "shapes.round.Circle"),
    ("shapes.round", "defines", "shapes.round.helper"),
    ("shapes.round.Circle", "inherits", "shapes.round.Base"),
    ("shapes.round.Circle", "inherits", "ValueError"),
    ("shapes.round.Circle", "is decorated by", "functools.total_ordering"),
    *(("shapes.round.Circle", "has method", f".{m}()") for m in ("__init__", "_check", "area")),
    *(
        ("shapes.round.Circle", "defines", f"shapes.round.Circle.{m}")
        for m in ("__init__", "_check", "area")
    ),
    ("shapes.round.Circle.__init__", "takes", "radius="),
    ("shapes.round.Circle.__init__", "takes", "unit="),
    ("shapes.round.Circle.__init__", "uses", "shapes.round.Circle.radius"),
    ("shapes.round.Circle.__init__", "calls", "shapes.round.Circle._check"),
    ("shapes.round.Circle._check", "uses", "shapes.round.Circle.radius"),
    ("shapes.round.Circle._check", "uses", "shapes.round.LIMIT"),
    ("shapes.round.Circle._check", "raises", "ValueError"),
    ("shapes.round.Circle.area", "uses", "shapes.round.Circle.radius"),
    ("shapes.round.Circle.area", "calls", "len"),
    ("shapes.round.Circle.area", "calls", ".bit_length()"),
    ("shapes.round.Circle.area", "calls", "shapes.round.helper"),
    ("shapes.round.Circle.area", "catches", "TypeError"),
    ("shapes.round.Circle.area", "catches", "OSError"),
    ("shapes.round.helper", "takes", "shape="),
    ("shapes.round.helper", "calls", ".area()"),
    ("shapes.round.helper", "calls", "shapes.square.side"),
    ("shapes.square", "defines", "shapes.square.side"),
    ("shapes.square.side", "takes", "length="),
    ("shapes.square.side", "calls", ".__abs__()"),
}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return tmp_path / "lib"


def test_facts_of_a_small_package(sources: Path) -> None:
    facts = read_code_graph(sources)
    assert set(facts) == FACTS
    assert facts == sorted(FACTS)


def test_tests_and_third_party_packages_are_left_out(sources: Path) -> None:
    names = {str(path.relative_to(sources)) for path in _source_files(sources)}
    assert names == {
        "shapes/__init__.py",
        "shapes/broken.py",
        "shapes/round.py",
        "shapes/square.py",
    }


def test_a_folder_without_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no Python sources"):
        read_code_graph(tmp_path)


def test_the_standard_library_is_where_this_python_has_it() -> None:
    assert standard_library() / "ast.py" in _source_files(standard_library())


def test_prune_leaves_entities_with_enough_facts() -> None:
    ring: list[Fact] = [(str(n), "next", str((n + 1) % 4)) for n in range(4)]
    tail: list[Fact] = [("0", "to", "x"), ("x", "to", "y")]
    assert prune(ring + tail, 2) == ring
    assert prune(ring + tail, 1) == ring + tail
    assert prune(ring + tail, 3) == []


@given(seed=st.integers(0, 10_000), entities=st.integers(2, 30), count=st.integers(1, 200))
def test_split_keeps_every_entity_and_relation_in_train(
    seed: int, entities: int, count: int
) -> None:
    chance = random.Random(seed)
    names = [str(n) for n in range(entities)]
    facts = sorted(
        {(chance.choice(names), chance.choice("rst"), chance.choice(names)) for _ in range(count)}
    )
    splits = split_facts(facts, 0.2, seed)
    assert sorted(fact for split in SPLITS for fact in splits[split]) == facts
    seen = {name for s, _, o in splits["train"] for name in (s, o)}
    relations = {relation for _, relation, _ in splits["train"]}
    for fact in splits["valid"] + splits["test"]:
        assert fact[0] in seen and fact[2] in seen and fact[1] in relations
    assert splits == split_facts(facts, 0.2, seed)
