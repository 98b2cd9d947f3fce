"""Recording of operations that are run at once, because their arguments have been computed.

A program that reads a value goes on to read what follows from it. A small operation takes less time
than the schedule that would run it at the next read.
"""

from __future__ import annotations

from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _session as sessions
from torchrelay.deferred._graph import Region, map_tensors
from torchrelay.deferred._operators import Operator
from torchrelay.deferred._recording import record
from torchrelay.deferred._tensor import FakeTensor

__all__ = ["record_and_run"]

# The largest storage of a small operation.
SMALL_BYTES = 1 << 20


def record_and_run(
    func: Any,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fakes: list[FakeTensor],
    writes: tuple[Region, ...],
    outputs: tuple[Region | None, ...] = (),
) -> None:
    """Record ``func``, and run it if it is small, draws nothing, and ``fakes`` are known."""
    session = sessions.recording()
    if session is None or not session.replay.has_read or not _can_run(operator, fakes, outputs):
        record(func, operator, args, kwargs, writes, outputs)
        return
    result = _run(func, args, kwargs, writes)
    session.replay.keep(record(func, operator, args, kwargs, writes, outputs), result)


def _can_run(
    operator: Operator, fakes: list[FakeTensor], outputs: tuple[Region | None, ...]
) -> bool:
    if operator.draws or not fakes:
        return False
    for fake in fakes:
        if not fake._history.is_current() or fake._region.storage.size_bytes > SMALL_BYTES:
            return False
    for region in outputs:
        if region is not None and (
            region.storage.size_bytes > SMALL_BYTES
            or region.storage.device != fakes[0]._region.storage.device
        ):
            return False
    return True


def _run(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], writes: tuple[Region, ...]
) -> Any:

    def real(fake: FakeTensor) -> Any:
        memory = fake._history.real
        assert memory is not None
        return fake._region.over(memory)

    asked = _torch.grad_asked(torch.is_grad_enabled())
    try:
        with _torch.plain_torch(), asked:
            real_args, real_kwargs = map_tensors((args, kwargs), FakeTensor, real)
            return func(*real_args, **real_kwargs)
    except BaseException:
        for region in writes:  # nobody knows what it has left there
            region.storage.history().drop()
        raise
