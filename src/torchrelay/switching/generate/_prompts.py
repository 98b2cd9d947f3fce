"""Prompts and sampling, checked."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

from torchrelay.errors import ArgumentError
from torchrelay.switching.generate._messages import Sampling
from torchrelay.switching.generate._text import TextStream
from torchrelay.switching.models._store import StoredModel

__all__ = ["TooLongError", "check_tokens", "ids_of", "sampling_of", "text_after"]

_MAX_LOGPROBS = 20
_MAX_SEED = 1 << 63


class TooLongError(ArgumentError):
    """A text does not fit the context of its model."""


def ids_of(model: StoredModel, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of `prompt`.

    Raises:
        ArgumentError: it is neither a text nor tokens, or the model does not generate.
        UnsupportedError: it is a text, and the model has no tokenizer.
    """
    if isinstance(prompt, str):
        return tuple(model.tokenizer.encode(prompt))
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
    is_list = isinstance(stop, Iterable) and not isinstance(stop, str)
    if not (is_list and all(isinstance(one, str) and one for one in stop)):
        raise ArgumentError(f"stop={stop!r}: it must be a list of texts, none of them empty")
    return TextStream(model.tokenizer if stop else model.language.tokenizer, stop)


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
        ArgumentError: a value is out of bounds, or the model does not generate.
    """
    known = model.language
    if max_tokens is None:  # where there is room for none, the sequence is refused
        max_tokens = max(1, known.max_context - prompt_tokens)
    whole, least_p = numbers.Integral, math.ulp(0.0)
    limits: list[tuple[str, Any, Any, float, float, str]] = [
        ("max_tokens", max_tokens, whole, 1, math.inf, "at least 1"),
        ("temperature", temperature, numbers.Real, 0, 100, "from 0 to 100"),
        ("top_p", top_p, numbers.Real, least_p, 1, "more than 0, and at most 1"),
        ("top_k", top_k, whole, 0, math.inf, "at least 0"),
        ("seed", seed, whole, -_MAX_SEED, _MAX_SEED - 1, "an integer of 64 bits"),
        ("logprobs", logprobs or 0, whole, 0, _MAX_LOGPROBS, f"from 0 to {_MAX_LOGPROBS}"),
    ]
    for name, value, kind, least, most, bounds in limits:
        if not (isinstance(value, kind) and least <= value <= most):
            of = "an integer, " if kind is whole and not isinstance(value, kind) else ""
            raise ArgumentError(f"{name}={value!r}: it must be {of}{bounds}")
    eos, alternatives = () if ignore_eos else known.eos, -1 if logprobs is None else logprobs
    return Sampling(max_tokens, float(temperature), float(top_p), top_k, seed, eos, alternatives)
