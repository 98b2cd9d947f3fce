"""The sequences of a worker: continued step by step, in slices that end between two tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay._helper import Channel
from torchrelay.switching.generate import _kv
from torchrelay.switching.generate._messages import (
    Emitted,
    Generate,
    Join,
    Leave,
    Pause,
    SequenceState,
    SliceEnded,
    Stashed,
    Stepped,
)
from torchrelay.switching.generate._sampling import choose

__all__ = ["Sequences"]

#: Tokens of a prompt that go through the model at a time: others wait for no more than these.
PREFILL_TOKENS = 512
_STASH_TOKENS = 64  # what is computed again at most after a worker has died


@dataclass(eq=False)
class _Row:
    """A sequence in this process."""

    state: SequenceState
    tokens: list[int]  # of the prompt, and generated
    cache: Any
    length: int = 0  # tokens whose keys and values the cache holds
    stash: _kv.Stash | None = None

    @property
    def is_prefilling(self) -> bool:
        return self.length < len(self.state.prompt)

    @property
    def following(self) -> list[int]:
        """The tokens that go through the model next: a part of the prompt that begins and ends
        where it does in every run, or a single token.
        """
        end = self.length + 1
        if self.is_prefilling and _kv.is_recurrent(self.cache):
            end = len(self.state.prompt)  # many such models cannot go on from a part of it
        elif self.is_prefilling:
            end = min(len(self.state.prompt), (self.length // PREFILL_TOKENS + 1) * PREFILL_TOKENS)
        return self.tokens[self.length : end]


class Sequences:
    """What a worker keeps of sequences, from one slice to the next, of one model at a time."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel = channel
        self._device = device
        self._model = ""
        self._rows: dict[int, _Row] = {}
        self._joined: Any = None  # the cache of `_members`, as its rows
        self._members: list[_Row] = []

    def drop(self, sequence_ids: list[int]) -> None:
        """Forget sequences that do not run."""
        for one in sequence_ids:
            self._rows.pop(one, None)

    def forget(self, model: str) -> None:
        """Forget all sequences of `model`."""
        if model == self._model:
            self._rows.clear()

    def run(
        self,
        work: Generate,
        descriptors: list[int],
        module: Any,
        forward: Callable[..., Any],
        receive: Callable[[], tuple[Any, list[int]]],
    ) -> None:
        """Continue the sequences of `work` until they have ended, or it is paused.

        Args:
            module: the model.
            forward: calls it, and waits for what has not arrived of it.
            receive: returns the next message for the request, or None if there is none.
        """
        self._module, self._forward, self._names = module, forward, _kv.arguments_of(module)
        kept, self._rows = (self._rows if work.model == self._model else {}), {}
        self._model = work.model
        for state in work.sequences:
            self._add(state, kept.get(state.sequence_id), descriptors)
        is_paused = False
        try:
            while self._rows and not is_paused:
                self._step()
                while (received := receive())[0] is not None:
                    is_paused |= self._handle(*received)
            self._separate()
            stashed, new = self._stash(0)
        except BaseException:  # caches of a step that ended midway hold a part of its tokens
            self._rows, self._members, self._joined = {}, [], None
            raise
        self._channel.send(SliceEnded(stashed), new)

    def _handle(self, message: Any, descriptors: list[int]) -> bool:
        """Handle a message between steps; return whether the slice is to end."""
        if isinstance(message, Join):
            self._add(message.sequence, None, descriptors)
        elif isinstance(message, Leave):
            self._separate()
            self._rows.pop(message.sequence_id, None)
        return isinstance(message, Pause)

    def _add(self, state: SequenceState, kept: _Row | None, descriptors: list[int]) -> None:
        """Take a sequence: as this process kept it, from its stash, or from its prompt."""
        descriptor = descriptors.pop(0) if state.stash is not None else -1
        tokens = [*state.prompt, *state.tokens]
        if kept is not None and kept.stash is not None and kept.length == state.stashed:
            kept.state, kept.tokens = state, tokens
            self._rows[state.sequence_id] = kept
        else:
            row = _Row(state, tokens, _kv.new_cache(self._module.config))
            if state.stash is not None:
                row.stash = _kv.Stash.open(descriptor, state.stash, state.stashed)
                row.length = row.stash.read(row.cache, self._device)
            self._rows[state.sequence_id] = row
        if descriptor >= 0:
            os.close(descriptor)

    def _step(self) -> None:
        """Let a part of one prompt, and one token of each other sequence, go through the model."""
        prefilling = next((row for row in self._rows.values() if row.is_prefilling), None)
        decoding = [row for row in self._rows.values() if not row.is_prefilling]
        emitted = []
        if prefilling is not None:
            fed = prefilling.following
            logits = self._compute(prefilling.cache, [fed], [prefilling.length])
            emitted += self._advance(prefilling, len(fed), logits[0])
        if decoding:
            self._join(decoding)
            lengths = [row.length for row in decoding]
            fed_each = [row.following for row in decoding]
            for row, logits in zip(
                decoding, self._compute(self._joined, fed_each, lengths), strict=True
            ):
                emitted += self._advance(row, 1, logits)
        ended = [one.sequence_id for one in emitted if one.finished]
        if ended:
            self._separate()
            self.drop(ended)
        stashed, new = self._stash(_STASH_TOKENS)
        self._channel.send(Stepped(emitted, stashed), new)

    def _advance(self, row: _Row, count: int, logits: torch.Tensor) -> list[Emitted]:
        """Note that `count` more tokens are in the cache; choose the next if it is not known."""
        row.length += count
        if row.length < len(row.tokens):
            return []
        sampling = row.state.sampling
        index = len(row.tokens) - len(row.state.prompt)
        token, logprob, top = choose(logits, sampling, index)
        row.tokens.append(token)
        finished = ""
        if token in sampling.eos:
            finished = "stop"
        elif index + 1 >= sampling.max_tokens:
            finished = "length"
        return [Emitted(row.state.sequence_id, token, logprob, top, finished)]

    def _compute(self, cache: Any, fed: list[list[int]], lengths: list[int]) -> torch.Tensor:
        """Return the logits after the last of the tokens `fed` to each row of `cache`."""
        ids = torch.tensor(fed, device=self._device)
        names = self._names
        given = _kv.given_to(names, ids, cache)
        if "logits_to_keep" in names:
            given["logits_to_keep"] = 1
        counts = torch.tensor(lengths, device=self._device)[:, None]
        if "position_ids" in names:  # some models count from 0 in each call without them
            given["position_ids"] = counts + torch.arange(len(fed[0]), device=self._device)
        if len(set(lengths)) > 1 and _kv.has_columns(cache):
            columns = torch.arange(max(lengths) + 1, device=self._device)
            given["attention_mask"] = (columns >= max(lengths) - counts).long()
        logits: torch.Tensor = self._forward(**given).logits[:, -1]
        return logits

    def _join(self, rows: list[_Row]) -> None:
        """Let `_joined` be the caches of `rows`."""
        if rows != self._members:
            self._separate()
            caches, lengths = [row.cache for row in rows], [row.length for row in rows]
            self._joined = _kv.stack(self._module.config, caches, max(lengths))
            self._members = rows

    def _separate(self) -> None:
        """Give each sequence a cache of its own again."""
        if len(self._members) > 1:
            lengths = [row.length for row in self._members]
            caches = _kv.split(self._module.config, self._joined, lengths)
            for row, cache in zip(self._members, caches, strict=True):
                row.cache = cache
        self._members, self._joined = [], None

    def _stash(self, least: int) -> tuple[list[Stashed], list[int]]:
        """Stash sequences that have `least` tokens more than their stashes, or have just read their
        prompts; return what to report, and the descriptors of new stashes.
        """
        stashed, new = [], []
        for row in self._rows.values():
            before = 0 if row.stash is None else row.stash.tokens
            is_due = row.length - before >= least or before < len(row.state.prompt) <= row.length
            if not row.length or row.length == before or not is_due:
                continue
            shape = None
            if row in self._members:
                self._separate()
            if row.stash is None:
                shape = _kv.shape_of(
                    row.cache, len(row.state.prompt) + row.state.sampling.max_tokens
                )
                row.stash = _kv.Stash.create(shape)
                new.append(row.stash.segment.fd)
            row.stash.write(row.cache, row.length)
            stashed.append(Stashed(row.state.sequence_id, row.length, shape))
        return stashed, new
