"""Execution on values: on real tensors, and on deferred ones whose values the program reads.

A program that reads a value goes on to read what follows from it. A small operation takes less time
than the schedule that would run it at the next read, so one that makes a new tensor of known values
is recorded and run at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchrelay import _torch
from torchrelay.deferred import _recording as sessions
from torchrelay.deferred._graph import History, Node, Region, Storage, map_tensors
from torchrelay.deferred._operators import Operator, describe
from torchrelay.deferred._recording import FakeSession
from torchrelay.deferred._replay import Replay
from torchrelay.deferred._results import (
    as_returned,
    constant_fake,
    device_of,
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
    if not operator.reads_number:
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
    """Run and record ``func``, which makes one tensor, if it is small and its arguments are known.

    One pass looks at the arguments for the shapes, the device, the record and the call.

    Returns:
        ``NotImplemented`` if ``func`` is not small, or has an argument that is neither known nor a
        plain value.
    """
    arguments = _gathered(args, kwargs, operator.slices) if _torch.is_plain() else None
    if arguments is None:
        return NotImplemented
    key = (operator.name, torch.get_default_dtype(), *arguments.key)
    like = _likeness(key, func, args, kwargs)
    if like is None:
        return NotImplemented
    result = func(*arguments.real, **kwargs)
    storage = Storage(like.storage.size_bytes, like.storage.device, deferred=True)
    made = Region(storage, like.dtype, like.size, like.stride)
    history = storage.history()
    reads, keeps = tuple(arguments.reads), tuple(arguments.keeps)
    node = Node(func, tuple(arguments.recorded), kwargs, reads, (), (made,), keeps)
    history.record.append(node)
    for kept in keeps:
        if kept.record.reads_outside:
            history.record.reads_outside = True
    session.replay.keep(node, history, made, result)
    return fake_from_region(made, history)


class _Arguments(NamedTuple):
    """The arguments of a call: as regions, as real tensors, and what its result looks like by."""

    reads: list[Region]
    keeps: list[History]
    recorded: list[Any]
    real: list[Any]
    key: list[Any]


def _gathered(args: tuple[Any, ...], kwargs: dict[str, Any], by_kind: bool) -> _Arguments | None:
    """Return the arguments if all are plain values or small tensors whose values are known."""
    reads, keeps, recorded, real, key = found = _Arguments([], [], [], [], [])
    for value in args:
        kind = type(value)
        if isinstance(value, FakeTensor):
            region, history = value._region, value._history
            if region.storage.size_bytes > SMALL_BYTES or not history.is_current():
                return None
            reads.append(region)
            keeps.append(history)
            recorded.append(region)
            real.append(history.cached_view(region))
            key.append(region.layout())
            continue
        if kind is list and all(type(item) in _PLAIN for item in value):
            key.append((kind, *value, *map(type, value)))
            recorded.append(list(value))
        elif kind in _PLAIN:
            key.append(kind if kind is float and by_kind else (kind, value))
            recorded.append(value)
        else:
            return None
        real.append(value)
    for name, value in kwargs.items():
        if type(value) not in _PLAIN:
            return None
        key.append((name, type(value), value))
    return found if reads else None


# The regions that operations on small tensors make. Shared by all threads.
_known: dict[tuple[Any, ...], Any] = {}
_UNKNOWN = object()
_MOST_KNOWN = 2000


def _likeness(
    key: tuple[Any, ...], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Region | None:
    """Return a region like that of the result of ``func``, looked up by ``key``; None if it is not
    small.
    """
    known = _known.get(key, _UNKNOWN)
    if known is not _UNKNOWN:
        return known  # type: ignore[no-any-return]
    try:
        result = shapes_of(func, args, kwargs)
    except (NotImplementedError, RuntimeError):
        return None
    made = new_fake(result, device_of(func, args, kwargs), deferred=True)._region
    devices = {arg._region.storage.device for arg in args if isinstance(arg, FakeTensor)}
    small = made.storage.size_bytes <= SMALL_BYTES and devices == {made.storage.device}
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    likeness = made if small else None
    _known[key] = likeness
    return likeness


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
    copies: dict[int, torch.Tensor] = {}

    def value(fake: FakeTensor) -> torch.Tensor:
        if not any(fake is one for one in written):
            return replay.read(fake._region)
        return copies.setdefault(id(fake), replay.read(fake._region).clone())

    real_args, real_kwargs = map_tensors((args, kwargs), FakeTensor, value)
    with _torch.plain_torch():
        answer = for_real(func, operator, real_args, real_kwargs)
    for tensor in written:
        if isinstance(tensor, FakeTensor):
            tensor.copy_(constant_fake(copies[id(tensor)], deferred=True))
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
