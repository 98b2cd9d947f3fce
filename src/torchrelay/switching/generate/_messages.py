"""What the daemon and a worker say to each other about sequences of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = [
    "Drop",
    "Emitted",
    "Generate",
    "Join",
    "KvShape",
    "LayerShape",
    "Leave",
    "Pause",
    "Sampling",
    "SequenceState",
    "SliceEnded",
    "Stashed",
    "Stepped",
]


class Sampling(NamedTuple):
    """How the tokens of a sequence are chosen, and when it ends."""

    max_tokens: int
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0
    eos: tuple[int, ...] = ()  # tokens that end it
    logprobs: int = -1  # how many alternatives are reported with each token; -1: not even its own


class LayerShape(NamedTuple):
    """The keys and values of one layer: (heads, size of a head) of each, and their dtype. Layers
    that share those of others have none.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> tuple[int, int]:
        """What the keys and the values of one token take."""
        (heads, size), (value_heads, value_size) = self.keys, self.values
        return heads * size * self.dtype.itemsize, value_heads * value_size * self.dtype.itemsize


class KvShape(NamedTuple):
    """What a stash holds, and of how many tokens."""

    layers: tuple[LayerShape, ...]
    capacity: int

    @property
    def token_bytes(self) -> int:
        """What one token takes."""
        return sum(sum(layer.token_bytes) for layer in self.layers)


class SequenceState(NamedTuple):
    """A sequence as the daemon knows it. The descriptors of stashes come along in order."""

    sequence_id: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # that were generated
    sampling: Sampling
    stashed: int = 0  # the tokens of which the stash has keys and values
    stash: KvShape | None = None


# --- to a worker


class Generate(NamedTuple):
    """Continue sequences of a model until :class:`Pause`; answered by :class:`Stepped` for each
    step, and :class:`SliceEnded` or Failed. The first fields are those of Run.
    """

    request_id: int
    model: str
    offsets: tuple[int, ...]
    missing: list[int]
    whole: bool
    sequences: list[SequenceState]
    is_profile: bool = False


class Join(NamedTuple):
    """Continue another sequence in the running slice."""

    request_id: int
    sequence: SequenceState


class Leave(NamedTuple):
    """Continue a sequence no longer: nobody wants it."""

    request_id: int
    sequence_id: int


class Pause(NamedTuple):
    """End the slice after its step."""

    request_id: int


class Drop(NamedTuple):
    """Forget what is kept of sequences that do not run."""

    sequence_ids: list[int]


# --- from a worker


class Emitted(NamedTuple):
    """A token of a sequence."""

    sequence_id: int
    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, with their log-probabilities
    finished: str  # "stop" or "length" if it is the last


class Stashed(NamedTuple):
    """Keys and values of so many tokens of a sequence are in its stash."""

    sequence_id: int
    tokens: int
    shape: KvShape | None  # of a new stash, whose descriptor comes along


class Stepped(NamedTuple):
    """The tokens of one step, and what has been stashed since the last."""

    request_id: int
    emitted: list[Emitted]
    stashed: list[Stashed]
    computed: int  # tokens that went through the model


class SliceEnded(NamedTuple):
    """The slice is over, and its sequences are stashed."""

    request_id: int
    stashed: list[Stashed]
