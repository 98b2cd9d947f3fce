"""Carrying out an operation on fake tensors: what shape, dtype and device its results have.

Shapes come from torch's own meta kernels, run on meta tensors of the same shape and stride; the operations
that fill a module with initial values take shorter ways.
"""

from __future__ import annotations

from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import session as sessions
from torchrelay.deferred import tensor as tensors
from torchrelay.deferred.composites import constant
from torchrelay.deferred.graph import Constant, Node, Region, Storage, map_tensors
from torchrelay.deferred.hooks import hooks
from torchrelay.deferred.operators import Operator, describe
from torchrelay.deferred.recording import record
from torchrelay.deferred.replay import Replay
from torchrelay.deferred.tensor import FakeTensor, fake_from_region
from torchrelay.errors import ArgumentError, DeferredError, UnavailableError, UnsupportedError

__all__ = ["dispatch"]

aten = torch.ops.aten
_CPU = torch.device("cpu")
_ITEM = aten._local_scalar_dense.default


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: PLR0911
    """Carries out ``func``: for real if nothing about it is fake, else on shapes alone, recorded if deferred."""
    operator = describe(func)
    if (
        operator.is_simple
        and type(args[0]) is FakeTensor
        and not (len(args) > 1 and isinstance(args[1], torch.Tensor))
    ):
        return _simple(func, operator, args, kwargs)
    if func is aten.detach.default and isinstance(args[0], FakeTensor):
        return _detach(args[0])
    if func in _FACTORIES:
        fake = _factory(func, operator, args, kwargs)
        if fake is not None:
            return fake
    if operator.composite:
        return func.decompose(*args, **kwargs)
    fakes = list(_fakes(args)) + list(_fakes(kwargs))
    session = sessions.current()
    if operator.name in ("aten::lift_fresh", "aten::lift") and session is not None and not fakes:
        return _constant(args[0], session.deferred)
    if not fakes:
        if session is None or not operator.is_factory or _explicit_device(kwargs).type == "meta":
            return func(*args, **kwargs)
        _check_device(_explicit_device(kwargs), session)
    return _general(func, operator, args, kwargs, fakes)


def _fakes(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _fakes(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _fakes(item)


# The short ways.


def _simple(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fake = args[0]
    region = fake._region
    if not region.dtype.is_floating_point:
        return _general(func, operator, args, kwargs, [fake])
    if region.storage.deferred:
        record(func, operator, args, kwargs, writes=(region,))
    return fake


def _detach(fake: FakeTensor) -> FakeTensor:
    alias = fake_from_region(fake._region, fake._history)
    if type(fake) is not FakeTensor:
        alias.__class__ = type(fake)
    return alias


# Factories whose first argument is the size, and whose result is contiguous.
_FACTORIES = {
    aten.empty.memory_format,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.rand.default,
    aten.randn.default,
}


def _factory(
    func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FakeTensor | None:
    """What a factory of the usual kind makes, or None for another kind."""
    session = sessions.current()
    dtype = kwargs.get("dtype") or (None if func is aten.full.default else torch.get_default_dtype())
    if session is None or dtype is None or kwargs.get("memory_format") is not None:
        return None
    device = kwargs.get("device") or _CPU
    if device.type == "meta" or kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
        return None
    if device.type != "cpu":
        _check_device(device, session)
    size = tuple(args[0])
    if any(extent < 0 for extent in size):
        return None
    lazy = _torch.lazy_caller() if func is aten.empty.memory_format else None
    if lazy is not None and size == (0,):
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    stride, count = _contiguous(size)
    region = Region(Storage(count * dtype.itemsize, device, session.deferred), dtype, size, stride)
    fake = fake_from_region(region, region.storage.history())
    if session.deferred and func is not aten.empty.memory_format:
        record(func, operator, args, kwargs, outputs=(region,))
    if isinstance(lazy, torch.Tensor):
        tensors.give_shape(lazy, fake)
    return fake


def _contiguous(size: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The strides of a contiguous tensor of ``size``, and its number of elements."""
    stride, step = [], 1
    for extent in reversed(size):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride)), 0 if 0 in size else step


def _constant(value: torch.Tensor, deferred: bool) -> FakeTensor:
    """A fake tensor whose values are known."""
    fake = _new_fake(value, value.device, deferred)
    if deferred:
        known = Constant(value.clone(memory_format=torch.preserve_format))
        Node(constant, (known,), {}, outputs=(fake._region,)).link()
    return fake


# The general way.


def _general(
    func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: list[FakeTensor]
) -> Any:
    if func is aten.set_.source_Tensor and isinstance(args[0], FakeTensor):
        tensors.assign(args[0], args[1])
        return args[0]
    session = sessions.current()
    deferred = any(fake._region.storage.deferred for fake in fakes) or (
        session is not None and session.deferred
    )
    if operator.name.startswith(("c10d::", "_c10d_functional::")):
        raise DeferredError(
            f"{func} would send the values of a deferred tensor, which it does not have yet: {fakes[0]!r}. "
            "Materialize the module first; every rank gets the same values if all recorded with the same seed."
        )
    if operator.name.startswith("aten::quantize"):
        raise UnsupportedError(
            f"{func}: quantized tensors cannot be deferred. Make them outside deferred_init."
        )
    written = [tensor for place in operator.written for tensor in _tensors_at(place, args, kwargs)]
    if operator.needs_values or not all(isinstance(tensor, FakeTensor) for tensor in written):
        return _by_value(func, args, kwargs, fakes, deferred)
    try:
        results = _shapes(func, args, kwargs)
    except NotImplementedError:
        if not written or operator.creates:
            return _by_value(func, args, kwargs, fakes, deferred)
        results = None  # in place: the shapes are those of the arguments
    if operator.changes_shape:
        return _reshape_in_place(args[0], results)
    if operator.is_view:
        base = fakes[0]
        return map_tensors(results, torch.Tensor, lambda result: _view(base, result))
    if operator.creates:
        device = _device(func, args, kwargs)
        answer = map_tensors(results, torch.Tensor, lambda result: _new_fake(result, device, deferred))
        created = [item if item is None else item._region for item in _results(answer)]
    else:
        answer = _as_returned(func, written)
        created = []
    if deferred:
        record(func, operator, args, kwargs, tuple(fake._region for fake in written), tuple(created))
    return answer


def _results(answer: Any) -> list[Any]:
    if isinstance(answer, (tuple, list)):
        return [item for value in answer for item in _results(value)]
    return [answer if isinstance(answer, FakeTensor) else None]


def _as_returned(func: Any, written: list[Any]) -> Any:
    count = len(func._schema.returns)
    if count == 0:
        return None
    return written[0] if count == 1 else tuple(written)


def _tensors_at(place: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
    return list(value) if isinstance(value, (tuple, list)) else [] if value is None else [value]


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of ``func`` on meta tensors."""

    def shadow(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor):
            return value._region.meta()
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

    meta_kwargs = {key: map_tensors(value, torch.Tensor, shadow) for key, value in kwargs.items()}
    if "generator" in kwargs:
        meta_kwargs["generator"] = None  # nothing is drawn
    if "device" in meta_kwargs or (describe(func).is_factory and describe(func).takes_device):
        meta_kwargs["device"] = torch.device("meta")
    meta_kwargs.pop("pin_memory", None)
    with _torch.plain_torch():
        if describe(func).name.startswith(_LAID_OUT_BY_DEVICE):
            return _torch.results_on_device(func, args, meta_kwargs, shadow)
        return func(*map_tensors(args, torch.Tensor, shadow), **meta_kwargs)


# The meta kernels of linear algebra lay results out as CUDA does, unless they know better.
_LAID_OUT_BY_DEVICE = (
    "aten::linalg_",
    "aten::_linalg_",
    "aten::svd",
    "aten::qr",
    "aten::lu",
    "aten::cholesky",
)


_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def _new_fake(like: torch.Tensor, device: torch.device, deferred: bool) -> FakeTensor:
    """A fake tensor with a storage of its own, shaped like ``like``."""
    if like.layout is not torch.strided or like.is_nested or like.dtype in _QUANTIZED:
        raise UnsupportedError(
            f"A fake tensor is dense: a sparse, nested or quantized one ({like.layout}, {like.dtype}) cannot be "
            "deferred. Make it outside deferred_init."
        )
    size, stride = tuple(like.shape), like.stride()
    count = 0 if 0 in size else 1 + sum((e - 1) * s for e, s in zip(size, stride, strict=True))
    storage = Storage(count * like.dtype.itemsize, device, deferred)
    return fake_from_region(Region(storage, like.dtype, size, stride), storage.history())


def _view(base: FakeTensor, result: torch.Tensor) -> FakeTensor:
    offset = int(result.storage_offset())
    region = Region(base._region.storage, result.dtype, tuple(result.shape), result.stride(), offset)
    return fake_from_region(region, base._history)


def _reshape_in_place(fake: FakeTensor, result: torch.Tensor) -> FakeTensor:
    """The effect of ``t_``, ``squeeze_``, ``resize_`` ...: the same storage, seen otherwise."""
    storage = fake._region.storage
    size_bytes = result.untyped_storage().nbytes()
    if size_bytes > storage.size_bytes:
        if storage.real is not None or storage.history():
            raise UnsupportedError(
                f"Resizing a deferred tensor of {storage.size_bytes} bytes that holds values to {size_bytes} bytes "
                "is not recorded. Make a new tensor and copy into it."
            )
        storage.size_bytes = size_bytes
    tensors.assign(fake, _view(fake, result))
    return fake


def _explicit_device(kwargs: dict[str, Any]) -> torch.device:
    return kwargs.get("device") or _CPU


def _device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where the results are: as asked, else where the arguments are.

    Raises:
        ArgumentError: arguments that are not 0-dim lie on different devices.
    """
    if kwargs.get("device") is not None:
        where: torch.device = kwargs["device"]
        session = sessions.current()
        if session is not None:
            _check_device(where, session)
        return where
    devices = []
    map_tensors((args, kwargs), torch.Tensor, lambda t: devices.append((t.device, t.dim())))
    large = [device for device, dim in devices if dim > 0 or device.type != "cpu"]
    if not all(_may_be_same(device, large[0]) for device in large) and "index" not in str(func):
        names = ", ".join(sorted({str(device) for device in large}))
        raise ArgumentError(
            f"{func}: the arguments are on different devices ({names}). Move them to one first."
        )
    return large[0] if large else _CPU


def _may_be_same(one: torch.device, other: torch.device) -> bool:
    """Without an index, a device is whichever is the current one when memory is taken: ``cuda`` fits ``cuda:0``."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _check_device(device: torch.device, session: sessions.Session) -> None:
    """Raises :class:`UnavailableError` if ``device`` is absent and must not be pretended."""
    if session.pretend is False and not _torch.device_available(device):
        raise UnavailableError(
            f"device={device} is not on this machine, and fake_mode(fake_cuda=False) does not pretend it. "
            "Leave fake_cuda out to make fake tensors for it."
        )


def _by_value(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: list[FakeTensor], deferred: bool
) -> Any:
    """The program wants to see values: they are computed now, and results are known from here on."""
    if not deferred or not all(fake._region.storage.deferred for fake in fakes):
        which = repr(fakes[0]) if fakes else "its result"
        raise DeferredError(
            f"{func} needs the values of a fake tensor, which has none: {which}. "
            "Tensors made inside deferred_init can be evaluated; those of fake_mode cannot."
        )
    replay = Replay()
    real_args, real_kwargs = map_tensors((args, kwargs), FakeTensor, lambda fake: replay.values(fake._region))
    with _torch.plain_torch():
        answer = func(*real_args, **real_kwargs)
    written = [t for place in describe(func).written for t in _tensors_at(place, args, kwargs)]
    if written:  # a real tensor, changed by the values of deferred ones
        return _as_returned(func, written)
    return map_tensors(answer, torch.Tensor, lambda value: _constant(value, deferred=True))


def _value(fake: FakeTensor) -> torch.Tensor:
    with _torch.plain_torch():
        return Replay().values(fake._region)


hooks.dispatch = dispatch
hooks.value = _value
