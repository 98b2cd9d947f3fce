"""Reading graphs: numbers in order of appearance, and one clear sentence for each way data can be
bad.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from facts import write_facts
from torchrelay.demo.triples import read_graph
from torchrelay.errors import DataError

TRAIN = [("a", "likes", "b"), ("b", "likes", "c"), ("c", "knows", "a")]


def write(folder: Path, **splits: str) -> Path:
    write_facts(folder / "train.txt", TRAIN)
    for split in ("valid", "test"):
        write_facts(folder / f"{split}.txt", TRAIN[:1])
    for split, text in splits.items():
        (folder / f"{split}.txt").write_text(text)
    return folder


def test_numbers_follow_the_order_of_appearance(tmp_path: Path) -> None:
    graph = read_graph(write(tmp_path, valid="c\tlikes\ta\n", test="a\tknows\tc\n"))
    assert graph.entities == ("a", "b", "c")
    assert graph.relations == ("likes", "knows")
    assert graph.train.tolist() == [[0, 0, 1], [1, 0, 2], [2, 1, 0]]
    assert graph.valid.tolist() == [[2, 0, 0]]
    assert graph.test.tolist() == [[0, 1, 2]]
    assert graph.triples().shape == (5, 3)


def test_blank_lines_and_carriage_returns_do_not_count(tmp_path: Path) -> None:
    graph = read_graph(write(tmp_path, test="\na\tknows\tc\r\n\n"))
    assert graph.test.tolist() == [[0, 1, 2]]


def test_unseen_entities_are_accepted_on_request_and_numbered_last(tmp_path: Path) -> None:
    folder = write(tmp_path, valid="a\tlikes\td\n", test="e\tknows\td\na\tlikes\tc\n")
    graph = read_graph(folder, allow_unseen=True)
    assert graph.entities == ("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("splits", "sentence"),
    [
        ({"train": ""}, "train.txt has no facts"),
        ({"valid": "\n \n"}, "valid.txt has no facts"),
        ({"train": "a\tlikes\tb\na\tb\n"}, "train.txt, line 2: .* but this one has 2: 'a\\\\tb'"),
        ({"test": "a likes b\n"}, "test.txt, line 1: .* but this one has 1"),
        ({"test": "a\tlikes\tb\tc\n"}, "test.txt, line 1: .* but this one has 4"),
        ({"test": "a\t\tb\n"}, "test.txt, line 1: .* the 2nd is empty"),
        ({"test": "a\thates\tb\n"}, "test.txt: the relation 'hates' does not occur in train.txt"),
        (
            {"test": "a\tlikes\tz\na\tlikes\tb\n"},
            "test.txt: the entity 'z' does not occur in train.txt",
        ),
        ({"valid": "z\tlikes\ta\n"}, "valid.txt: the entity 'z' .* 1 of 1 lines.* --allow-unseen"),
    ],
)
def test_bad_data_is_told_in_one_sentence(
    tmp_path: Path, splits: dict[str, str], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        read_graph(write(tmp_path, **splits))
    assert "\n" not in str(caught.value)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/train\.txt is missing: the folder must hold"):
        read_graph(tmp_path / "nowhere")
    write(tmp_path)
    with pytest.raises(DataError, match=r"train\.txt cannot be read: Not a directory"):
        read_graph(tmp_path / "train.txt")
    (tmp_path / "test.txt").write_bytes(b"a\tlikes\t\xff\n")
    with pytest.raises(DataError, match=r"test\.txt is not UTF-8 text: byte 8"):
        read_graph(tmp_path)
    (tmp_path / "test.txt").unlink()
    with pytest.raises(DataError, match=r"test\.txt is missing"):
        read_graph(tmp_path)
    (tmp_path / "test.txt").mkdir()
    with pytest.raises(DataError, match=r"test\.txt cannot be read: Is a directory"):
        read_graph(tmp_path)


def test_an_unseen_relation_is_an_error_even_where_unseen_entities_are_not(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the relation 'hates'"):
        read_graph(write(tmp_path, test="a\thates\tz\n"), allow_unseen=True)
