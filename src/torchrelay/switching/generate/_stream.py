"""A sequence as the caller of :meth:`Switcher.generate` sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from torchrelay._resource import Resource
from torchrelay.switching.generate import _sequences
from torchrelay.switching.generate._messages import Emitted
from torchrelay.switching.generate._text import TextStream

__all__ = ["Token", "TokenStream"]


class Token(NamedTuple):
    """A token that was generated."""

    id: int
    text: str  # that it adds; "" while a character, or a word of `stop`, may be incomplete
    logprob: float | None  # if asked for
    top_logprobs: list[tuple[int, float]]  # of the likeliest tokens, by id


class TokenStream(Resource, Iterator[Token]):
    """The tokens of one sequence, as they are generated.

    Used by one thread at a time. Closing it, or dropping it, ends the sequence.
    """

    def __init__(
        self,
        sequence: _sequences.Sequence,
        events: SimpleQueue[Emitted | Exception],
        text: TextStream,
        cancel: Callable[[_sequences.Sequence], object],
    ) -> None:
        self._sequence = sequence
        self._events = events
        self._text = text
        self._cancel = cancel
        self.finish_reason = ""  # "stop", "length", or "cancelled", once there is no more

    def __next__(self) -> Token:
        """Return the next token; blocks until it is there.

        Raises:
            ModelError, NotFoundError, PeerLostError, UnavailableError: as of
                :meth:`Switcher.infer`.
        """
        if self.finish_reason:
            raise StopIteration
        try:
            event = self._events.get()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        return self.take(event)

    def take(self, event: Emitted | Exception) -> Token:
        """Return the token of the next event, or raise its error."""
        if isinstance(event, Exception):
            self.finish_reason = "error"
            raise event
        has_logprobs = self._sequence.sampling.logprobs >= 0
        text = self._text.add(event.token, is_last=bool(event.finished))
        self.finish_reason = event.finished
        if self._text.is_stopped:
            self.close()
            self.finish_reason = "stop"
        return Token(event.token, text, event.logprob if has_logprobs else None, event.top)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self._sequence.prompt)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that went through the model again, as their keys and values had been lost."""
        return self._sequence.recomputed

    def close(self) -> None:
        """End the sequence, if it has not ended. Idempotent."""
        if not self.finish_reason:
            self.finish_reason = "cancelled"
            self._cancel(self._sequence)

    def __del__(self) -> None:
        self.close()

    def text(self) -> str:
        """Return the text of all tokens that are still to come; blocks until the last."""
        return "".join(one.text for one in self)

    def ids(self) -> Sequence[int]:
        """Return the tokens that are still to come; blocks until the last."""
        return [one.id for one in self]
