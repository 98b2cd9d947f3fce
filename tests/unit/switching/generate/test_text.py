"""Text that grows by tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import language_models as models
from torchrelay.errors import ArgumentError, UnsupportedError

pytest.importorskip("transformers")

from torchrelay.switching.generate._text import TextStream, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("snapshot")
    models.tokenizer().save_pretrained(folder)
    found = Tokenizer.of(folder)
    assert found is not None
    return found


def grown(tokenizer: Tokenizer, ids: list[int], *stop: str) -> tuple[str, bool, list[str]]:
    stream = TextStream(tokenizer, stop)
    parts = [stream.add(one, is_last=i == len(ids) - 1) for i, one in enumerate(ids)]
    return "".join(parts), stream.is_stopped, parts


@pytest.mark.parametrize("text", ["once upon a time", "é ä é", "a ¤ b", "two  and\ttwo"])
def test_parts_add_up_to_the_text_and_hold_whole_characters(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    found, _, parts = grown(tokenizer, ids)
    assert found == tokenizer.decode(ids)
    assert not any("\ufffd" in one for one in parts)


def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "once é a ¤ two\tä"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.bytes_of, ids)) == text.encode()
    assert "\ufffd" in "".join(map(tokenizer.text_of, ids))  # parts of characters
    with pytest.raises(ArgumentError, match="is not Unicode"):
        tokenizer.encode("\ud800")


def test_parts_of_random_tokens_add_up_to_their_text(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(60) for _ in range(draw.randint(1, 40))]
        assert grown(tokenizer, ids)[0] == tokenizer.decode(ids)


def test_a_text_ends_before_the_stop_string_that_is_complete_first(tokenizer: Tokenizer) -> None:
    """However the tokens cut the strings."""
    text = "once upon a time there was a cat"
    ids, draw = tokenizer.encode(text), random.Random(1)
    for _ in range(200):
        stops = []
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(text))
            stops.append(text[start : start + draw.randint(1, 6)] + draw.choice(["", "?"]))
        ends = [(text.index(one) + len(one), text.index(one)) for one in stops if one in text]
        expected = text[: min(ends)[1]] if ends else text
        assert grown(tokenizer, ids, *stops)[:2] == (expected, bool(ends)), stops


def test_a_chat_template_refuses_by_a_sentence(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "two"}])) == "two"
    plain = models.tokenizer()
    plain.chat_template = "{{ raise_exception('roles must alternate') }}"
    messages = [{"role": "user", "content": "two"}]
    with pytest.raises(ArgumentError, match="roles must alternate"):
        Tokenizer(plain).chat(messages)
    plain.chat_template = None
    with pytest.raises(UnsupportedError, match="has no chat template"):
        Tokenizer(plain).chat(messages)
    assert Tokenizer.of(tmp_path) is None
