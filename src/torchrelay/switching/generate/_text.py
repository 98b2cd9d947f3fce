"""Text and tokens: tokenizers and chat templates of snapshots, and text that grows by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrelay.errors import ArgumentError, StorageError, UnsupportedError

__all__ = ["TextStream", "Tokenizer"]


class Tokenizer:
    """The tokenizer of a snapshot. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._all = tokenizer
        self._fast = tokenizer.backend_tokenizer
        self.eos: int | None = tokenizer.eos_token_id

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
        """Return the tokens of `text`, those that begin every text included if `special`."""
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

    def stream(self) -> Any:
        """Return what turns tokens into text one by one."""
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - an extra

        return DecodeStream(skip_special_tokens=True)

    def step(self, stream: Any, token: int) -> str:
        """Return the text that `token` adds; it may be "", when a character is not complete."""
        return stream.step(self._fast, token) or ""


class TextStream:
    """The text of a sequence as its tokens come, up to the first of the `stop` strings.

    What may be the beginning of one is held back.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._stop = list(stop)
        self._held = ""
        self.is_stopped = False

    def add(self, token: int, *, is_last: bool = False) -> str:
        """Return the text that is certain now."""
        if self._tokenizer is None or self.is_stopped:
            return ""
        text = self._held + self._tokenizer.step(self._stream, token)
        found = [at for one in self._stop if (at := text.find(one)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        kept = 0 if is_last else max((_overlap(text, one) for one in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Return how long the longest end of `text` is that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
