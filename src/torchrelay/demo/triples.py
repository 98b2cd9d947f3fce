"""Knowledge graphs as files: ``train.txt``, ``valid.txt`` and ``test.txt`` in one folder.

Each line is a fact: subject, relation and object, separated by tabs. This is how WN18RR, FB15k-237
and other benchmarks are published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchrelay.errors import DataError

__all__ = ["SPLITS", "Fact", "Graph", "graph_of", "read_graph"]

SPLITS = ("train", "valid", "test")

Fact = tuple[str, str, str]


@dataclass(frozen=True)
class Graph:
    """A graph as indices. Triples are int64 of shape ``(n, 3)``: subject, relation, object."""

    entities: tuple[str, ...]
    relations: tuple[str, ...]
    train: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor

    def triples(self) -> torch.Tensor:
        """All facts: train, valid and test, in this order."""
        return torch.cat([self.train, self.valid, self.test])


def read_graph(folder: Path, *, allow_unseen: bool = False) -> Graph:
    """Read the graph in ``folder``. Indices follow the order of appearance in train, valid, test.

    Args:
        allow_unseen: accept facts in valid and test with an entity that train lacks. Such an entity
            gets an embedding that no fact has trained and is ranked like any other, as published
            results for WN18RR do (7 % of its test facts have one).

    Raises:
        DataError: a file is missing, empty or malformed, or valid or test has an entity (unless
            allowed) or a relation that train lacks.
    """
    facts = {split: _read_facts(folder / f"{split}.txt") for split in SPLITS}
    for split in SPLITS[1:]:
        _check_unseen(folder / f"{split}.txt", facts["train"], facts[split], allow_unseen)
    return graph_of(facts)


def graph_of(facts: Mapping[str, Sequence[Fact]]) -> Graph:
    """Return the facts of each split as indices, in the order of appearance in train, valid,
    test.
    """
    everything = [fact for split in SPLITS for fact in facts[split]]
    entities = _number(name for subject, _, obj in everything for name in (subject, obj))
    relations = _number(relation for _, relation, _ in everything)

    def encode(facts: Sequence[Fact]) -> torch.Tensor:
        return torch.tensor([(entities[s], relations[r], entities[o]) for s, r, o in facts])

    train, valid, test = (encode(facts[split]) for split in SPLITS)
    return Graph(tuple(entities), tuple(relations), train, valid, test)


def _read_facts(path: Path) -> list[Fact]:
    """Read the facts of one file.

    Raises:
        DataError: the file is missing, has no fact, is not UTF-8, or has a line without exactly
            three fields.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: the folder must hold train.txt, valid.txt and test.txt"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    lines = enumerate(text.split("\n"), start=1)
    facts = [_parse(path, number, line) for number, line in lines if line.strip()]
    if not facts:
        raise DataError(
            f"{path} has no facts: each line must be subject, relation and object separated by tabs"
        )
    return facts


def _parse(path: Path, number: int, line: str) -> Fact:
    fields = [part.strip() for part in line.split("\t")]
    if len(fields) == 3 and all(fields):
        return fields[0], fields[1], fields[2]
    found = str(len(fields))
    if len(fields) == 3:
        found += f", and the {('1st', '2nd', '3rd')[fields.index('')]} is empty"
    raise DataError(
        f"{path}, line {number}: a line must have three fields, subject, relation and object, "
        f"separated by tabs, but this one has {found}: {line[:80]!r}"
    )


def _number(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _check_unseen(path: Path, train: Sequence[Fact], facts: Sequence[Fact], allow: bool) -> None:
    """Raise if one of ``facts`` (of ``path``) has a relation, or an entity unless that is allowed,
    that ``train`` lacks.
    """
    entities = {name for subject, _, obj in train for name in (subject, obj)}
    relations = {relation for _, relation, _ in train}
    for _, relation, _ in facts:
        if relation not in relations:
            raise DataError(
                f"{path}: the relation {relation!r} does not occur in train.txt, so nothing can "
                "learn it"
            )
    missing = [
        subject if subject not in entities else obj
        for subject, _, obj in facts
        if not entities.issuperset((subject, obj))
    ]
    if missing and not allow:
        raise DataError(
            f"{path}: the entity {missing[0]!r} does not occur in train.txt, like those of "
            f"{len(missing)} of {len(facts)} lines; correct the split, or pass --allow-unseen to "
            "rank such entities with untrained embeddings, as published results for WN18RR do"
        )
