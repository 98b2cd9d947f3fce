"""Execution on values: on real tensors, and on deferred ones whose values the program reads.

A program that reads a value goes on to read what follows from it. A small operation takes less time
than the schedule that would run it at the next read, so one that makes a new tensor of known values
is recorded and run at once.
"""

from __future__ import annotations

from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _recording as sessions
from torchrelay.deferred._graph import Storage, map_tensors
from torchrelay.deferred._operators import Operator, describe
from torchrelay.deferred._recording import FakeSession, record
from torchrelay.deferred._replay import Replay
from torchrelay.deferred._results import (
    as_returned,
    constant_fake,
    new_fake,
    shapes_of,
    written_by,
)
from torchrelay.deferred._tensor import FakeTensor, fake_from_region
from torchrelay.errors import DeferredError

__all__ = ["ahead", "by_value", "for_real", "read_values"]

aten = torch.ops.aten

# The largest storage of a small operation.
SMALL_BYTES = 1 << 20

# Arguments that are neither tensors nor ask for a device or a layout.
_PLAIN = {int, float, bool, str, type(None), torch.dtype}


def ahead(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute ``func`` on known values, for a program that reads values; else NotImplemented."""
    session = sessions.recording()
    if session is None:
        return NotImplemented
    if operator.kind == "pure":
        has_read = session.replay.has_read
        return _compute(func, operator, args, kwargs, session) if has_read else NotImplemented
    fake = args[0]
    is_readable = isinstance(fake, FakeTensor) and fake._region.storage.deferred
    if not is_readable or fake._history.escaped is not None:
        return NotImplemented
    real = session.replay.read(fake._region)
    if _torch.is_plain():
        return func(real)
    with _torch.plain_torch():
        return func(real)


def _compute(
    func: Any,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    session: FakeSession,
) -> Any:
    """Record and run ``func``, which makes one tensor, if it is small and its arguments are known.

    Returns:
        ``NotImplemented`` if ``func`` is not small, or has an argument that is neither known nor a
        plain value.
    """
    real: list[Any] = []
    devices: set[torch.device] = set()
    for value in args:
        if isinstance(value, FakeTensor):
            storage = value._region.storage
            if storage.size_bytes > SMALL_BYTES or not value._history.is_current():
                return NotImplemented
            devices.add(storage.device)
            real.append(value._history.cached_view(value._region))
        elif _is_plain(value) or (type(value) is list and all(map(_is_plain, value))):
            real.append(value)
        else:
            return NotImplemented
    if len(devices) != 1 or not (_torch.is_plain() and all(map(_is_plain, kwargs.values()))):
        return NotImplemented
    try:
        like = shapes_of(func, args, kwargs)
    except (NotImplementedError, RuntimeError):
        return NotImplemented
    if like.nbytes > SMALL_BYTES:
        return NotImplemented
    result = func(*real, **kwargs)
    made = new_fake(like, devices.pop(), deferred=True)
    node = record(func, operator, args, kwargs, outputs=(made._region,))
    session.replay.keep(node, made._history, made._region, result)
    return made


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def for_real(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute ``func`` on real tensors, with generators at their recorded positions."""
    innermost = sessions.current()
    if func is aten.set_.source_Storage and innermost is not None:
        innermost.memory = args[1]
    session = sessions.recording() if operator.draws or operator.written else None
    if session is not None:
        with _torch.plain_torch():
            for tensor in written_by(operator, args, kwargs):
                session.before_write(tensor)
        if operator.draws:
            session.stand()
    return func(*args, **kwargs)


def by_value(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fakes: list[FakeTensor],
    deferred: bool,
) -> Any:
    """Execute an operation that reads values; its results are constants."""
    if not deferred or not all(fake._region.storage.deferred for fake in fakes):
        which = repr(fakes[0]) if fakes else "its result"
        raise DeferredError(
            f"{func} needs the values of a fake tensor, which has none: {which}. Tensors made "
            "inside deferred_init can be evaluated; those of fake_mode cannot."
        )
    operator = describe(func)
    replay = _replay()
    written = written_by(operator, args, kwargs)
    copies: dict[Storage, torch.Tensor] = {}  # of whole storages: arguments may share a part
    for tensor in written:
        if isinstance(tensor, FakeTensor) and tensor._region.storage not in copies:
            copies[tensor._region.storage] = replay.read(tensor._region.all_bytes()).clone()

    def value(fake: FakeTensor) -> torch.Tensor:
        region = fake._region
        copy = copies.get(region.storage)
        return replay.read(region) if copy is None else region.of(copy)

    real_args, real_kwargs = map_tensors((args, kwargs), FakeTensor, value)
    try:
        with _torch.plain_torch():
            answer = for_real(func, operator, real_args, real_kwargs)
    finally:  # one that fails may have written to some
        for tensor in written:
            if isinstance(tensor, FakeTensor):
                region = tensor._region.unexpanded()  # what torch lets be written
                result = region.of(copies[region.storage])
                to = fake_from_region(region, tensor._history)
                to.copy_(constant_fake(result, deferred=True))
    if written:
        return as_returned(func, written)
    return map_tensors(answer, torch.Tensor, lambda value: constant_fake(value, deferred=True))


def read_values(fake: FakeTensor) -> torch.Tensor:
    """Return a copy of the values of a deferred tensor, computed from its record."""
    with _torch.plain_torch():
        return _replay().read(fake._region).clone()


def _replay() -> Replay:
    session = sessions.recording()
    return Replay() if session is None else session.replay
