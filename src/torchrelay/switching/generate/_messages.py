"""What the daemon and a worker say to each other about sequences of tokens."""

from __future__ import annotations

import math
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


TensorShape = tuple[tuple[int, ...], torch.dtype]


class LayerShape(NamedTuple):
    """What one layer keeps: keys and values, of which (heads, size of a head) are here, and states
    of one size, whatever the tokens. Layers that share those of others have none.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    states: tuple[TensorShape, ...] = ()


class KvShape(NamedTuple):
    """What a stash holds, and of how many tokens."""

    layers: tuple[LayerShape, ...]
    capacity: int

    @property
    def tensors(self) -> list[TensorShape]:
        """Those of a stash in order: of each layer keys and values, (heads, capacity, size); two
        counts of tokens; and twice the states of each layer.
        """
        found: list[TensorShape] = [
            ((heads, self.capacity, size), layer.dtype)
            for layer in self.layers
            for heads, size in (layer.keys, layer.values)
        ]
        states = [one for layer in self.layers for one in layer.states]
        return [*found, ((2,), torch.int64), *states, *states]

    def size_bytes(self, tokens: int) -> int:
        """Return what so many tokens take."""
        return sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in self._replace(capacity=tokens).tensors
        )


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

    emitted: list[Emitted]
    stashed: list[Stashed]


class SliceEnded(NamedTuple):
    """The slice is over, and its sequences are stashed."""

    stashed: list[Stashed]
