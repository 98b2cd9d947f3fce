"""Prompts and sampling, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torchrelay.errors import ArgumentError
from torchrelay.switching.generate._messages import Sampling
from torchrelay.switching.generate._text import TextStream
from torchrelay.switching.models._store import StoredModel

__all__ = ["check_tokens", "ids_of", "sampling_of", "text_after"]

_MAX_TEMPERATURE = 100.0
_MAX_LOGPROBS = 20
_MAX_SEED = 1 << 63


def ids_of(model: StoredModel, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of `prompt`.

    Raises:
        ArgumentError: it is neither a text nor tokens.
        UnsupportedError: it is a text, and the model has no tokenizer.
    """
    if isinstance(prompt, str):
        known = model.generating
        return tuple(() if known is None else known.text(model.name).encode(prompt))
    try:
        return tuple(one.__index__() for one in prompt)
    except (TypeError, AttributeError) as error:
        raise ArgumentError(
            f"the prompt is a {type(prompt).__name__}; pass a text, or a list of token ids"
        ) from error


def check_tokens(what: str, tokens: Iterable[int], vocabulary: int, model: str) -> None:
    """Raise :class:`ArgumentError` unless `tokens`, of `what`, are of the model's vocabulary."""
    wrong = next((one for one in tokens if not 0 <= one < vocabulary), None)
    if wrong is not None:
        raise ArgumentError(f"{what} has the token {wrong}; model {model!r} has {vocabulary}")


def text_after(model: StoredModel, stop: Sequence[str] = ()) -> TextStream:
    """Return the text, still empty, of what the model generates, up to the first of `stop`.

    Raises:
        ArgumentError: `stop` is no list of texts.
        UnsupportedError: there are such texts, and the model has no tokenizer.
    """
    known = model.generating
    if isinstance(stop, str) or not all(isinstance(one, str) and one for one in stop):
        raise ArgumentError(f"stop={stop!r}: it must be a list of texts, none of them empty")
    if stop and known is not None:
        known.text(model.name)
    return TextStream(None if known is None else known.tokenizer, stop)


def sampling_of(
    model: StoredModel,
    prompt_tokens: int,
    *,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    ignore_eos: bool = False,
    logprobs: int | None = None,
) -> Sampling:
    """Return how the tokens after so many of a prompt are chosen.

    Raises:
        ArgumentError: a value is out of bounds.
    """
    known = model.generating
    if max_tokens is None:  # where there is room for none, the sequence is refused
        max_tokens = 1 if known is None else max(1, known.max_context - prompt_tokens)
    for name, value, is_right, bounds in (
        ("max_tokens", max_tokens, max_tokens >= 1, "at least 1"),
        (
            "temperature",
            temperature,
            0.0 <= temperature <= _MAX_TEMPERATURE,
            f"from 0 to {_MAX_TEMPERATURE:g}",
        ),
        ("top_p", top_p, 0.0 < top_p <= 1.0, "more than 0, and at most 1"),
        ("top_k", top_k, top_k >= 0, "at least 0"),
        ("seed", seed, -_MAX_SEED <= seed < _MAX_SEED, "an integer of 64 bits"),
        ("logprobs", logprobs, 0 <= (logprobs or 0) <= _MAX_LOGPROBS, f"from 0 to {_MAX_LOGPROBS}"),
    ):
        if not is_right or (isinstance(value, float) and not math.isfinite(value)):
            raise ArgumentError(f"{name}={value}: it must be {bounds}")
    eos = () if known is None or ignore_eos else known.eos
    alternatives = -1 if logprobs is None else logprobs
    return Sampling(max_tokens, temperature, top_p, top_k, seed, eos, alternatives)
