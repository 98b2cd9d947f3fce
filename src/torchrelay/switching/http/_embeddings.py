"""The vectors of texts, by an encoder."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import torch

from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.switching._switcher import Switcher
from torchrelay.switching.generate._prompts import TooLongError, check_tokens
from torchrelay.switching.http._openai_schema import EmbeddingRequest
from torchrelay.switching.models._inputs import TEXTS
from torchrelay.switching.models._store import StoredModel

__all__ = ["embeddings"]

_ROWS = 32  # texts that go through a model together


async def embeddings(
    switcher: Switcher, model: StoredModel, asked: EmbeddingRequest
) -> dict[str, Any]:
    """Return the answer to a request.

    Raises:
        ArgumentError: the model is no encoder, or a text is too long.
        UnsupportedError: the request asks for vectors of another size.
    """
    # A long text takes a while.
    texts = await asyncio.to_thread(_tokens, model, asked.inputs)
    order = sorted(range(len(texts)), key=lambda one: len(texts[one]))  # little is filled up
    parts = [order[start : start + _ROWS] for start in range(0, len(order), _ROWS)]
    replies = await asyncio.gather(
        *(
            switcher.submit(
                model.name,
                _rows([texts[one] for one in part]),
                priority=asked.priority or 0,
                copy=False,
            )
            for part in parts
        )
    )
    vectors = torch.cat([one.outputs["output"] for one in replies])
    if asked.dimensions not in (None, vectors.shape[1]):
        raise UnsupportedError(
            f"dimensions={asked.dimensions}: model {model.name!r} makes vectors of "
            f"{vectors.shape[1]}, which are not cut"
        )
    data: list[Any] = [None] * len(texts)
    for row, index in enumerate(index for part in parts for index in part):
        written = _written(vectors[row], asked.encoding_format == "base64")
        data[index] = {"object": "embedding", "index": index, "embedding": written}
    count = sum(map(len, texts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": model.name, "usage": usage}


def _tokens(model: StoredModel, inputs: list[str | list[int]]) -> list[list[int]]:
    known = model.encoding
    if known is None:
        raise ArgumentError(
            f"model {model.name!r} is no encoder: add the snapshot of one with embed=True, or "
            'kind = "embed"'
        )
    if known.tokenizer is None and any(isinstance(one, str) for one in inputs):
        raise UnsupportedError(f"model {model.name!r} has no tokenizer: pass lists of token ids")
    found = []
    for index, one in enumerate(inputs):
        ids = known.tokenizer.encode(one) if known.tokenizer and isinstance(one, str) else one
        if not 1 <= len(ids) <= known.max_tokens:
            kind = TooLongError if ids else ArgumentError
            raise kind(
                f"input {index} has {len(ids)} tokens; model {model.name!r} takes from 1 to a "
                f"maximum context length of {known.max_tokens}"
            )
        found.append([int(token) for token in ids])
        check_tokens(f"input {index}", found[-1], known.vocabulary, model.name)
    return found


def _rows(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return the inputs of an encoder, filled up to the longest text."""
    lengths = torch.tensor([len(one) for one in texts], device="cpu")
    width = int(lengths.max())
    ids = torch.tensor([one + [0] * (width - len(one)) for one in texts], device="cpu")
    mask = (torch.arange(width, device="cpu") < lengths[:, None]).long()
    return dict(zip(TEXTS, (ids, mask), strict=True))


def _written(vector: torch.Tensor, is_base64: bool) -> str | list[float]:
    if not is_base64:
        found: list[float] = vector.tolist()
        return found
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
