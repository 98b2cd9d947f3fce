"""Dynamic batching: requests to a model that differ in their first dimension only run as one."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch

from torchrelay.errors import ModelError
from torchrelay.switching._contract import align
from torchrelay.switching._queue import Reply, Request
from torchrelay.switching._store import StoredModel

__all__ = ["gather", "merge", "split", "waits_until"]


def gather(
    first: Request, waiting: Iterable[Request], model: StoredModel, limit_bytes: int
) -> list[Request]:
    """Return `first` and those of the `waiting` requests that can run together with it.

    Args:
        limit_bytes: what the inputs may take.
    """
    batch, rows, size_bytes = [first], first.rows, _size_bytes(first)
    if not _can_join(first):
        return batch
    for one in waiting:
        joins = one is not first and one.model == first.model and _can_join(one)
        if not joins or one.shape != first.shape:
            continue
        if rows + one.rows <= model.max_batch_size and size_bytes + _size_bytes(one) <= limit_bytes:
            batch.append(one)
            rows, size_bytes = rows + one.rows, size_bytes + _size_bytes(one)
    return batch


def waits_until(batch: Sequence[Request], model: StoredModel) -> float:
    """Return when `batch` starts at the latest, for more requests to join it; at once if it is
    full, or if one would miss its deadline.
    """
    oldest = min(request.arrived for request in batch)
    until = oldest + model.max_delay_us * 1e-6
    is_full = sum(request.rows for request in batch) >= model.max_batch_size
    is_urgent = min(request.deadline for request in batch) <= until
    return -math.inf if is_full or is_urgent or not _can_join(batch[0]) else until


def merge(parts: Sequence[Request]) -> Request:
    """Return one request for all of `parts`."""
    inputs = {name: torch.cat([one.inputs[name] for one in parts]) for name in parts[0].inputs}
    return Request(parts[0].model, inputs, priority=parts[0].priority, parts=tuple(parts))


def split(reply: Reply, parts: Sequence[Request]) -> list[Reply]:
    """Return the reply of each part.

    Raises:
        ModelError: an output has another first dimension than the inputs.
    """
    ends = list(accumulate((part.rows for part in parts), initial=0))
    for name, output in reply.outputs.items():
        if not output.dim() or len(output) != ends[-1]:
            raise ModelError(
                f"output {name!r} of model {reply.model!r} has the shape {tuple(output.shape)} for "
                f"a batch of {ends[-1]}, and cannot be split; serve the model without "
                "max_batch_size"
            )
    started = time.monotonic() - reply.switch_s - reply.compute_s
    return [
        dataclasses.replace(
            reply,
            outputs={name: output[start:end] for name, output in reply.outputs.items()},
            queue_s=max(0.0, started - part.arrived),
        )
        for part, (start, end) in zip(parts, pairwise(ends), strict=True)
    ]


def _can_join(request: Request) -> bool:
    return bool(request.rows) and not (request.is_alone or request.parts or request.is_profile)


def _size_bytes(request: Request) -> int:
    return sum(align(tensor.nbytes) for tensor in request.inputs.values())
