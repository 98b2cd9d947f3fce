"""Recording of operations that are run at once, because their arguments have been computed.

A program that reads a value goes on to read what follows from it. A small operation takes less time
than the schedule that would run it at the next read.
"""

from __future__ import annotations

from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _session as sessions
from torchrelay.deferred._graph import History, Node, Region, Storage, map_tensors
from torchrelay.deferred._making import device_of, new_fake
from torchrelay.deferred._operators import Operator
from torchrelay.deferred._recording import record
from torchrelay.deferred._session import Session
from torchrelay.deferred._shapes import shapes_of
from torchrelay.deferred._tensor import FakeTensor, fake_from_region

__all__ = ["compute", "read_number", "record_and_run"]

# The largest storage of a small operation.
SMALL_BYTES = 1 << 20

# Arguments that are neither tensors nor ask for a device or a layout.
_PLAIN = {int, float, bool, str, type(None), torch.dtype}


def read_number(func: Any, fake: FakeTensor, session: Session) -> Any:
    """Return the number that ``func`` reads from ``fake``."""
    real = session.replay.read(fake._region)
    if _torch.is_plain():
        return func(real)
    with _torch.plain_torch():
        return func(real)


def compute(
    func: Any,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    session: Session,
) -> Any:
    """Run and record ``func``, which makes one tensor, if it is small and its arguments are known.

    :func:`record_and_run` does the same for any operation, in more steps: it looks at the arguments
    for the shapes, the device, the record and the call. Here that is one pass.

    Returns:
        ``NotImplemented`` if ``func`` is not small, or has an argument that is neither known nor a
        plain value.
    """
    arguments = _Arguments()
    if not _torch.is_plain() or not arguments.gather(args, kwargs, operator.slices):
        return NotImplemented
    key = (operator.name, torch.get_default_dtype(), *arguments.key)
    like = _likeness(key, func, args, kwargs)
    if like is None:
        return NotImplemented
    result = _call(func, arguments.real, kwargs)
    storage = Storage(like.storage.size_bytes, like.storage.device, deferred=True)
    made = Region(storage, like.dtype, like.size, like.stride)
    history = storage.history()
    reads, keeps = tuple(arguments.reads), tuple(arguments.keeps)
    node = Node(func, tuple(arguments.recorded), kwargs, reads, (), (made,), keeps)
    history.record.append(node)
    session.replay.keep_one(node, history, made, result)
    return fake_from_region(made, history)


class _Arguments:
    """The arguments of a call: as regions, as real tensors, and what its result looks like by."""

    __slots__ = ("keeps", "key", "reads", "real", "recorded")

    def __init__(self) -> None:
        self.reads: list[Region] = []
        self.keeps: list[History] = []
        self.recorded: list[Any] = []
        self.real: list[Any] = []
        self.key: list[Any] = []

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any], by_kind: bool) -> bool:
        """Return whether all are plain values or small tensors whose values are known."""
        for value in args:
            kind = type(value)
            if isinstance(value, FakeTensor):
                region, history = value._region, value._history
                if region.storage.size_bytes > SMALL_BYTES or not history.is_current():
                    return False
                self.reads.append(region)
                self.keeps.append(history)
                self.recorded.append(region)
                self.real.append(history.cached_view(region))
                self.key.append(region.layout())
                continue
            if kind is list and all(type(item) in _PLAIN for item in value):
                self.key.append((kind, *value, *map(type, value)))
                self.recorded.append(list(value))
            elif kind in _PLAIN:
                self.key.append(kind if kind is float and by_kind else (kind, value))
                self.recorded.append(value)
            else:
                return False
            self.real.append(value)
        for name, value in kwargs.items():
            if type(value) not in _PLAIN:
                return False
            self.key.append((name, type(value), value))
        return bool(self.reads)


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
            return _call(func, real_args, real_kwargs)
    except BaseException:
        for region in writes:  # nobody knows what it has left there
            region.storage.history().drop()
        raise


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
