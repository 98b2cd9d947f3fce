"""The choice of the next token from its logits."""

from __future__ import annotations

import random

import torch

from torchrelay.switching.generate._messages import Sampling

__all__ = ["choose"]


def choose(
    logits: torch.Tensor, sampling: Sampling, index: int
) -> tuple[int, float, list[tuple[int, float]]]:
    """Return token `index` of a sequence, its log-probability, and the likeliest ones with theirs.

    Log-probabilities are those of the model, before temperature and the like. The random number is
    one of the seed and the index alone, so that a sequence that was interrupted, wherever it goes
    on, draws what it would have drawn.

    Args:
        logits: of one position, (vocabulary,).
    """
    logits = logits.float()
    token = int(logits.argmax()) if not sampling.temperature else _drawn(logits, sampling, index)
    if sampling.logprobs < 0:
        return token, 0.0, []
    logprobs = logits.log_softmax(-1)
    found = logprobs.topk(min(sampling.logprobs, len(logprobs)))
    top = list(zip(found.indices.tolist(), found.values.tolist(), strict=True))
    return token, float(logprobs[token]), top


def _drawn(logits: torch.Tensor, sampling: Sampling, index: int) -> int:
    from transformers.generation.logits_process import (  # noqa: PLC0415 - an extra, and slow
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    # Nothing but what is unlikely overflows, however low the temperature is.
    scores, nothing = (logits - logits.max()).double()[None], torch.empty(0, dtype=torch.int64)
    scores = TemperatureLogitsWarper(sampling.temperature)(nothing, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(nothing, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(nothing, scores)
    ends = scores[0].softmax(-1).cumsum(-1)
    drawn = random.Random(f"{sampling.seed} {index}").random() * float(ends[-1])
    point = torch.tensor(drawn, dtype=ends.dtype, device=ends.device)
    return int(torch.searchsorted(ends, point, right=True))
