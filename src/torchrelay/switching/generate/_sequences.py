"""A sequence that is being generated, as the daemon and its caller know it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torchrelay.errors import ArgumentError
from torchrelay.switching.daemon._descriptor import Descriptor
from torchrelay.switching.daemon._queue import new_id
from torchrelay.switching.generate._messages import (
    Emitted,
    KvShape,
    Sampling,
    SequenceState,
    Stashed,
)
from torchrelay.switching.generate._prompts import TooLongError, check_tokens
from torchrelay.switching.models._store import StoredModel

__all__ = ["Sequence"]


@dataclass(eq=False)
class Sequence:
    """A prompt and its continuation; the daemon's own once it is posted."""

    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    on_event: Callable[[Emitted | Exception], object]  # in the owner's thread
    priority: int = 0
    sequence_id: int = field(default_factory=new_id)
    tokens: list[int] = field(default_factory=list)  # that were generated
    slices: int = 0  # in which it ran
    recomputed: int = 0  # tokens that went through the model again
    reached: int = 0  # the most tokens that have gone through the model, as far as is known
    stashed: int = 0  # tokens whose keys and values are in the stash
    shape: KvShape | None = None
    stash: Descriptor | None = None
    stashed_at: float = 0.0
    losses: int = 0  # of workers since its last token
    is_alone: bool = False  # until its next token it runs in no batch: one with it failed

    @property
    def stash_bytes(self) -> int:
        return (
            0 if self.stash is None or self.shape is None else self.shape.size_bytes(self.stashed)
        )

    def check(self, model: StoredModel) -> None:
        """Raise :class:`ArgumentError` unless `model` can continue the prompt."""
        known = model.language
        if not self.prompt:
            raise ArgumentError("the prompt is empty: it needs at least one token")
        check_tokens("the prompt", self.prompt, known.vocabulary, model.name)
        room = known.max_context - len(self.prompt)
        if self.sampling.max_tokens > room:
            raise TooLongError(
                f"model {model.name!r} has a maximum context length of {known.max_context} tokens; "
                f"the prompt takes {len(self.prompt)}, and max_tokens asks for "
                f"{self.sampling.max_tokens} more"
            )

    def state(self) -> SequenceState:
        """Return what a worker needs to continue."""
        tokens = tuple(self.tokens)
        shape = None if self.stash is None else self.shape
        known = self.sequence_id, self.prompt, tokens, self.sampling
        return SequenceState(*known, self.stashed, shape)

    def note_stashed(self, stashed: Stashed, stash: Descriptor | None) -> None:
        """Note what its stash holds now, and which it is if that is new."""
        if stash is not None:
            self.stash, self.shape = stash, stashed.shape
        self.stashed, self.stashed_at = stashed.tokens, time.monotonic()
        self.reached = max(self.reached, self.stashed)

    def add(self, token: int) -> None:
        """Note the next token."""
        self.tokens.append(token)
        self.reached = len(self.prompt) + len(self.tokens) - 1
        self.losses, self.is_alone = 0, False

    def drop_stash(self) -> None:
        """Give up the stash."""
        self.stash, self.stashed = None, 0
