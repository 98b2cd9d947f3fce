"""Text and tokens: tokenizers and chat templates of snapshots, and text that grows by tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrelay.errors import ArgumentError, StorageError, UnsupportedError

__all__ = ["TextStream", "Tokenizer"]

# The characters as which byte-level tokenizers write bytes: their own, or others if they have none.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [one for one in range(0x100) if one not in _PRINTED]
_BYTES = {chr(one): one for one in _PRINTED} | {
    chr(0x100 + i): one for i, one in enumerate(_OTHERS)
}
_MAX_HELD = 16  # tokens; what is no character by then will be none


class Tokenizer:
    """The tokenizer of a snapshot. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._all = tokenizer
        self._fast = tokenizer.backend_tokenizer
        self.eos: int | None = tokenizer.eos_token_id
        limit = tokenizer.model_max_length
        self.max_tokens = int(limit) if limit < 1 << 30 else 0  # of a text; 0: not said

    @classmethod
    def of(cls, folder: Path) -> Tokenizer | None:
        """Return the tokenizer in `folder`; None if it has none.

        Raises:
            StorageError: it cannot be read.
            UnsupportedError: it is none of the library `tokenizers`.
        """
        from transformers import AutoTokenizer  # noqa: PLC0415 - an extra

        if not (folder / "tokenizer_config.json").exists() and not any(folder.glob("tokenizer.*")):
            return None
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of many kinds
            raise StorageError(f"the tokenizer in {folder} cannot be read: {error}") from error
        if not tokenizer.is_fast:
            raise UnsupportedError(
                f"{folder}: its tokenizer needs a tokenizer.json, which it lacks"
            )
        return cls(tokenizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, str]:
        return self._fast.to_str(), str(self._all.chat_template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of `text`, those that begin every text included if `special`.

        Raises:
            ArgumentError: it has lone surrogates, which are no characters.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"the text is not Unicode: {error}") from error
        ids: list[int] = self._fast.encode(text, add_special_tokens=special).ids
        return ids

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation and of the beginning of its answer.

        Raises:
            ArgumentError: the template refuses it.
            UnsupportedError: the snapshot has no chat template.
        """
        if not self._all.chat_template:
            raise UnsupportedError(
                "the model has no chat template, so it is not made for conversations; use "
                "/v1/completions"
            )
        try:
            text = self._all.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # of jinja, and of what the template does
            raise ArgumentError(f"the chat template refuses the messages: {error}") from error
        return self.encode(text, special=False)

    def text_of(self, token: int) -> str:
        """Return the text of one token by itself."""
        return str(self._fast.decode([token], skip_special_tokens=False))

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 of one token by itself, which may be a part of a character."""
        text, piece = self.text_of(token), self._fast.id_to_token(token) or ""
        if "\ufffd" not in text:
            return text.encode()
        if found := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # of SentencePiece
            return bytes.fromhex(found[1])
        is_known = all(one in _BYTES for one in piece)
        return bytes(_BYTES[one] for one in piece) if is_known else text.encode()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._fast.decode(ids, skip_special_tokens=True))


class TextStream:
    """The text of a sequence as its tokens come, up to the `stop` string that is complete first.

    What may be the beginning of one is held back, and the beginning of a character.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens whose text is known begin a text that more is added to, as some tokenizers strip
        # its first space.
        self._known = self._start = 0
        self._stop = list(stop)
        self._held = ""
        self.is_stopped = False

    def add(self, token: int, *, is_last: bool = False) -> str:
        """Return the text that is certain now."""
        if self._tokenizer is None or self.is_stopped:
            return ""
        text = self._held + self._grown(self._tokenizer, token, is_last)
        # The one that was complete first, however tokens cut the text.
        found = [(at + len(one), at) for one in self._stop if (at := text.find(one)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        kept = 0 if is_last else max((_overlap(text, one) for one in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _grown(self, tokenizer: Tokenizer, token: int, is_last: bool) -> str:
        """Return what `token` adds to the text; "" if a character may be incomplete."""
        self._ids.append(token)
        before = tokenizer.decode(self._ids[self._start : self._known])
        text = tokenizer.decode(self._ids[self._start :])
        may_be_incomplete = text.endswith("\ufffd") and len(self._ids) - self._known < _MAX_HELD
        if len(text) <= len(before) or (may_be_incomplete and not is_last):
            return ""
        self._start, self._known = self._known, len(self._ids)
        return text[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """Return how long the longest end of `text` is that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
