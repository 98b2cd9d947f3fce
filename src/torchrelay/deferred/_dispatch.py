"""Execution of operations on fake tensors: for real, on shapes only, or recorded.

Shapes come from torch's meta kernels on meta tensors of the same shape and stride; common
initialisers take shorter paths.
"""

from __future__ import annotations

from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _session as sessions
from torchrelay.deferred._ahead import compute, read_number, record_and_run
from torchrelay.deferred._graph import map_tensors
from torchrelay.deferred._making import (
    FACTORIES,
    SETS,
    check_device,
    constant_fake,
    device_of,
    explicit_device,
    factory,
    new_fake,
    reshape_in_place,
    set_memory,
    view_of,
)  # fmt: skip
from torchrelay.deferred._operators import Operator, describe
from torchrelay.deferred._replay import Replay
from torchrelay.deferred._shapes import (
    as_returned,
    check_sizes,
    fakes_in,
    flat,
    shapes_of,
    tensors_at,
)
from torchrelay.deferred._tensor import FakeTensor, fake_from_region
from torchrelay.errors import DeferredError, UnsupportedError

__all__ = ["dispatch", "value"]

aten = torch.ops.aten


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: PLR0911, PLR0912
    """Execute ``func``: for real without fake arguments, else on shapes, recorded if deferred."""
    operator = describe(func)
    if (
        operator.is_simple
        and type(args[0]) is FakeTensor
        and args[0]._history.escaped is None
        and not (len(args) > 1 and isinstance(args[1], torch.Tensor))
    ):
        return _simple(func, operator, args, kwargs)
    if operator.makes_one or operator.reads_number:
        result = _ahead(func, operator, args, kwargs)
        if result is not NotImplemented:
            return result
    if func is aten.detach.default and isinstance(args[0], FakeTensor):
        return _detach(args[0])
    if func is aten.new_empty.default and type(args[0]) is not FakeTensor and _torch.is_copying():
        return _for_real(func, operator, args, kwargs)  # a copy of what is real is real
    if operator.is_factory and func in FACTORIES:
        fake = factory(func, operator, args, kwargs)
        if fake is not None:
            return fake
    if operator.composite:
        return func.decompose(*args, **kwargs)
    fakes = fakes_in(*args, kwargs)
    if any(fake._history.escaped is not None for fake in fakes):
        real = _through(func, operator, args, kwargs)
        if real is not NotImplemented:
            return real
    session = sessions.current()
    if operator.name in ("aten::lift_fresh", "aten::lift") and session is not None and not fakes:
        return (
            args[0] if session.is_over_memory(args[0]) else constant_fake(args[0], session.deferred)
        )
    if not fakes:
        if session is None or not operator.is_factory or explicit_device(kwargs).type == "meta":
            return _for_real(func, operator, args, kwargs)
        check_device(explicit_device(kwargs), session)
    return _general(func, operator, args, kwargs, fakes)


def _ahead(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute ``func`` on values that are known, of a program that reads values."""
    session = sessions.recording()
    if session is None:
        return NotImplemented
    if not operator.reads_number:
        if not session.replay.has_read:
            return NotImplemented
        return compute(func, operator, args, kwargs, session)
    fake = args[0]
    if not isinstance(fake, FakeTensor) or fake._history.escaped is not None:
        return NotImplemented
    return read_number(func, fake, session) if fake._region.storage.deferred else NotImplemented


def _for_real(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute ``func`` on real tensors, with generators at their recorded positions."""
    innermost = sessions.current()
    if func is aten.set_.source_Storage and innermost is not None:
        innermost.memory = args[1]
    session = sessions.recording() if operator.draws or operator.written else None
    if session is not None:
        for place in operator.written:
            for tensor in tensors_at(place, args, kwargs):
                with _torch.plain_torch():
                    session.before_write(tensor)
        if operator.draws:
            session.stand()
    return func(*args, **kwargs)


def _through(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute ``func`` on arguments whose memory was handed out as other tensors.

    Returns:
        ``NotImplemented`` if it only reads them, beside deferred ones, and must be recorded.
    """
    written = [tensor for place in operator.written for tensor in tensors_at(place, args, kwargs)]
    deferred = any(fake._history.escaped is None for fake in fakes_in((args, kwargs)))
    writes = [
        one for one in written if isinstance(one, FakeTensor) and one._history.escaped is not None
    ]
    if operator.changes_shape or (deferred and not writes):
        return NotImplemented
    aliases: dict[int, tuple[torch.Tensor, FakeTensor]] = {}

    def alias(fake: FakeTensor) -> torch.Tensor:
        escaped = fake._history.escaped
        if escaped is None:
            return fake
        real = fake._region.of(escaped)
        aliases[id(real)] = real, fake
        return real

    real_args, real_kwargs = map_tensors((args, kwargs), FakeTensor, alias)
    answer = dispatch(func, real_args, real_kwargs)
    for fake in writes:
        if fake._history.escaped is not None:
            torch.autograd.graph.increment_version(fake._history.escaped)
    return map_tensors(answer, torch.Tensor, lambda one: aliases.get(id(one), (one, one))[1])


def _simple(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fake = args[0]
    region = fake._region
    if not region.dtype.is_floating_point:
        return _general(func, operator, args, kwargs, [fake])
    if region.storage.deferred:
        record_and_run(func, operator, args, kwargs, [fake], (region,))
    return fake


def _detach(fake: FakeTensor) -> FakeTensor:
    alias = fake_from_region(fake._region, fake._history)
    if type(fake) is not FakeTensor:
        alias.__class__ = type(fake)
    return alias


def _general(
    func: Any,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fakes: list[FakeTensor],
) -> Any:
    if operator.written and func in SETS and isinstance(args[0], FakeTensor):
        return set_memory(func, *args)
    _check_supported(func, operator, fakes)
    deferred = sessions.recording() is not None or any(
        fake._region.storage.deferred for fake in fakes
    )
    written = [tensor for place in operator.written for tensor in tensors_at(place, args, kwargs)]
    if operator.needs_values or not all(isinstance(tensor, FakeTensor) for tensor in written):
        return _by_value(func, args, kwargs, fakes, deferred)
    try:
        results = shapes_of(func, args, kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not _is_only_shapeless(operator, written, fakes, error):
            return _by_value(func, args, kwargs, fakes, deferred)
        results = None  # in place: the shapes are those of the arguments
    if operator.changes_shape:
        return reshape_in_place(args[0], results)
    if operator.is_view:
        return map_tensors(results, torch.Tensor, lambda result: view_of(fakes[0], result))
    created: list[Any] = []
    if operator.creates:
        device = device_of(func, args, kwargs)
        answer = map_tensors(
            results, torch.Tensor, lambda result: new_fake(result, device, deferred)
        )
        created = [item if item is None else item._region for item in flat(answer)]
    else:
        check_sizes(func, results, written)
        answer = as_returned(func, written)
    if deferred:
        writes = tuple(fake._region for fake in written)
        record_and_run(func, operator, args, kwargs, fakes, writes, tuple(created))
    return answer


def _check_supported(func: Any, operator: Operator, fakes: list[FakeTensor]) -> None:
    if operator.name.startswith(("c10d::", "_c10d_functional::")):
        raise DeferredError(
            f"{func} would send the values of a deferred tensor, which it does not have yet: "
            f"{fakes[0]!r}. Materialize the module first; every rank gets the same values if all "
            "recorded with the same seed."
        )
    if operator.name.startswith("aten::quantize"):
        raise UnsupportedError(
            f"{func}: quantized tensors cannot be deferred. Make them outside deferred_init."
        )


def _is_only_shapeless(
    operator: Operator, written: list[Any], fakes: list[FakeTensor], error: Exception
) -> bool:
    """Return whether ``func`` can be recorded although its meta kernel is missing or refuses.

    Some meta kernels refuse what the real ones accept. The operation is then run for real, and if
    that fails, the error is the eager one. This excludes views, which must stay views.
    """
    if isinstance(error, NotImplementedError):
        return bool(written) and not operator.creates
    if operator.is_view or operator.changes_shape or not _have_values(fakes):
        raise error
    return False


def _have_values(fakes: list[FakeTensor]) -> bool:
    return all(fake._region.storage.deferred for fake in fakes)


def _by_value(
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
    session = sessions.recording()
    replay = Replay() if session is None else session.replay
    written = [t for place in operator.written for t in tensors_at(place, args, kwargs)]
    copies: dict[int, torch.Tensor] = {}

    def value(fake: FakeTensor) -> torch.Tensor:
        if not any(fake is one for one in written):
            return replay.read(fake._region)
        return copies.setdefault(id(fake), replay.read(fake._region).clone())

    real_args, real_kwargs = map_tensors((args, kwargs), FakeTensor, value)
    with _torch.plain_torch():
        answer = _for_real(func, operator, real_args, real_kwargs)
    for tensor in written:
        if isinstance(tensor, FakeTensor):
            tensor.copy_(constant_fake(copies[id(tensor)], deferred=True))
    if written:
        return as_returned(func, written)
    return map_tensors(answer, torch.Tensor, lambda value: constant_fake(value, deferred=True))


def value(fake: FakeTensor) -> torch.Tensor:
    """Return a copy of the values of a deferred tensor, computed from its record."""
    session = sessions.recording()
    replay = Replay() if session is None else session.replay
    with _torch.plain_torch():
        return replay.read(fake._region).clone()
