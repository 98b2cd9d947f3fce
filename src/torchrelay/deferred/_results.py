"""Results of operations on fake tensors: shapes, from torch's meta kernels, and new tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _recording as sessions
from torchrelay.deferred import _tensor as tensors
from torchrelay.deferred._graph import Constant, Node, Region, Storage, flat, map_tensors
from torchrelay.deferred._operators import Operator, constant, describe
from torchrelay.deferred._recording import record
from torchrelay.deferred._tensor import FakeTensor, fake_from_region, meta_of
from torchrelay.errors import ArgumentError, UnavailableError, UnsupportedError

__all__ = [
    "SETS", "as_returned", "check_device", "check_sizes", "constant_fake", "device_of",
    "factory", "fakes_in", "new_fake", "reshape_in_place", "set_memory", "shapes_of", "view_of",
    "written_by",
]  # fmt: skip


def shapes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of ``func`` on meta tensors. Read only: results are cached."""
    try:
        operator = describe(func)
        by_kind = operator.slices
        key = (operator.name, torch.get_default_dtype(), _key(args, by_kind), _key(kwargs, by_kind))
        found = _known.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _shapes_of(func, args, kwargs)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = _shapes_of(func, args, kwargs)
    return found


_known: dict[Any, Any] = {}
_MOST_KNOWN = 2000


def _key(value: Any, by_kind: bool) -> Any:
    """Return what the shapes of results depend on, with types: 1, 1.0 and True are equal.

    Args:
        by_kind: of a float, only its type, as for operations that work element by element.
    """
    kind = type(value)
    if isinstance(value, FakeTensor):
        return value._region.layout()
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.stride(), value.device)
    if kind in (tuple, list):
        return (kind, *[_key(item, by_kind) for item in value])
    if kind is dict:
        return tuple(
            (name, _key(item, by_kind)) for name, item in value.items() if name != "generator"
        )
    return kind if by_kind and kind is float else (kind, value)


def _shapes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operator = describe(func)
    # Without addresses, meta kernels cannot tell which parts of a storage overlap.
    meta = partial(meta_of, alone=bool(operator.written) and not operator.changes_shape)
    meta_kwargs = {key: map_tensors(value, torch.Tensor, meta) for key, value in kwargs.items()}
    if "generator" in kwargs:
        meta_kwargs["generator"] = None  # nothing is drawn
    if "device" in meta_kwargs or (operator.is_factory and operator.takes_device):
        meta_kwargs["device"] = torch.device("meta")
    meta_kwargs.pop("pin_memory", None)
    name = operator.name
    with _torch.plain_torch():
        if name.startswith(_LAID_OUT_BY_DEVICE):
            return _torch.results_on_device(func, args, meta_kwargs, meta)
        results = func(*map_tensors(args, torch.Tensor, meta), **meta_kwargs)
        if operator.kind == "pure" and _may_have_other_strides((args, kwargs), results):
            return _as_on_cpu(func, args, kwargs, results)
        return (
            map_tensors(results, torch.Tensor, _row_by_row)
            if name in _LAID_OUT_IN_ROWS
            else results
        )


_TRIED_BYTES = 1 << 16


def _may_have_other_strides(arguments: Any, result: torch.Tensor) -> bool:
    """Return whether the meta kernel may be wrong about the stride of a dimension of size 1, which
    kernels give as they like, and which can be tried out on the CPU.
    """
    found = [result]
    devices: list[torch.device] = []
    map_tensors(arguments, torch.Tensor, found.append)
    map_tensors(arguments, torch.device, devices.append)
    return (
        any(1 in t.shape for t in found)
        and all(t.layout is torch.strided and t.nbytes <= _TRIED_BYTES for t in found)
        and all(d.type == "cpu" for d in (*(t.device for t in found[1:]), *devices))
    )


def _as_on_cpu(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
) -> torch.Tensor:
    """Return ``result`` with the strides of what the kernel of the CPU makes of zeros."""

    def zeros(like: torch.Tensor) -> torch.Tensor:
        region = like._region if isinstance(like, FakeTensor) else None
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        made.zero_()
        return made if region is None else region.with_bits(made)

    try:
        tried = func(*map_tensors(args, torch.Tensor, zeros), **kwargs)
    except (RuntimeError, IndexError):
        return result
    if (tried.shape, tried.dtype) != (result.shape, result.dtype):
        return result
    return torch.empty_strided(tried.shape, tried.stride(), dtype=tried.dtype, device="meta")


def _row_by_row(result: torch.Tensor) -> torch.Tensor:
    channels_last = torch.channels_last if result.dim() == 4 else torch.channels_last_3d
    if result.dim() in (4, 5) and result.is_contiguous(memory_format=channels_last):
        return result
    return result.contiguous()


# The meta kernels of these keep the strides of their argument; those of the CPU do not. Found by
# comparing the two over torch's database of operators. It matters: random numbers are drawn in the
# order of the strides.
_LAID_OUT_IN_ROWS = {
    "aten::_batch_norm_with_update", "aten::_native_batch_norm_legit", "aten::native_batch_norm",
    "aten::_standard_gamma", "aten::log_sigmoid_forward", "aten::normal.Tensor_Tensor",
    "aten::normal.float_Tensor", "aten::poisson", "aten::rrelu_with_noise",
}  # fmt: skip


# The meta kernels of linear algebra lay results out as CUDA does, unless they know better.
_LAID_OUT_BY_DEVICE = (
    "aten::linalg_",
    "aten::_linalg_",
    "aten::svd",
    "aten::qr",
    "aten::lu",
    "aten::cholesky",
    "aten::_embedding_bag",
)


def check_sizes(func: Any, results: Any, written: list[Any]) -> None:
    """Raise :class:`UnsupportedError` if a result does not fit its destination."""
    for result, target in zip(flat(results), written, strict=False):
        if result is not None and result.shape != target.shape:
            raise UnsupportedError(
                f"{func} resizes its out argument of shape {tuple(target.shape)} to "
                f"{tuple(result.shape)}, which is not recorded. Give it one of the right shape."
            )


def fakes_in(*values: Any) -> list[FakeTensor]:
    """Return the fake tensors in ``values``, through lists, tuples and dicts."""
    found: list[FakeTensor] = []
    map_tensors(values, FakeTensor, found.append)
    return found


def written_by(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that a call writes, also fake ones, in the order of its arguments."""
    found: list[Any] = []
    for place in operator.written:
        if isinstance(place, str):
            value = kwargs.get(place)
        else:
            value = args[place] if place < len(args) else None
        found += value if isinstance(value, (tuple, list)) else [value]
    return [tensor for tensor in found if tensor is not None]


def as_returned(func: Any, written: list[Any]) -> Any:
    """Return what ``func`` returns if it returns the arguments that it writes."""
    count = len(func._schema.returns)
    if not written or count == 0:
        return None
    return written[0] if count == 1 else tuple(written)


aten = torch.ops.aten
_CPU = torch.device("cpu")


def factory(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a common factory; NotImplemented for any other call."""
    session = sessions.current()
    is_empty = func is aten.empty.memory_format
    dtype = kwargs.get("dtype") or (
        None if func is aten.full.default else torch.get_default_dtype()
    )
    if session is None or dtype is None or kwargs.get("memory_format") is not None:
        return NotImplemented
    device = kwargs.get("device") or _CPU
    if (
        device.type == "meta"
        or kwargs.get("pin_memory")
        or kwargs.get("layout") not in (None, torch.strided)
    ):
        return NotImplemented
    if device.type != "cpu":
        check_device(device, session)
    size = tuple(args[0])
    if min(size, default=0) < 0:
        return NotImplemented
    if is_empty and size == (0,) and "pin_memory" not in kwargs:
        # Not from Python: torch.asarray(), as safetensors calls it, is about to set it to real
        # memory.
        return func(*args, **kwargs)
    lazy = _torch.lazy_caller() if is_empty else None
    if lazy is not None and size == (0,):
        return func(*args, **kwargs)
    stride, count = _contiguous(size)
    region = Region(Storage(count * dtype.itemsize, device, session.deferred), dtype, size, stride)
    fake = fake_from_region(region, region.storage.history())
    if session.deferred and not is_empty:
        record(func, operator, args, kwargs, outputs=(region,))
    if isinstance(lazy, torch.Tensor):
        tensors.give_shape(lazy, fake)
    return fake


def _contiguous(size: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return the strides of a contiguous tensor of ``size``, and its number of elements."""
    stride, step = [], 1
    for extent in reversed(size):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride)), 0 if 0 in size else step


def constant_fake(value: torch.Tensor, deferred: bool) -> FakeTensor:
    """Return a fake tensor whose values are known."""
    fake = new_fake(value, value.device, deferred)
    if deferred:
        known = Constant(value.clone(memory_format=torch.preserve_format))
        Node(constant, (known,), {}, outputs=(fake._region,)).link()
    return fake


_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def new_fake(like: torch.Tensor, device: torch.device, deferred: bool) -> FakeTensor:
    """Return a fake tensor with its own storage, shaped like ``like``."""
    if like.layout is not torch.strided or like.is_nested or like.dtype in _QUANTIZED:
        raise UnsupportedError(
            f"A fake tensor is dense: a sparse, nested or quantized one ({like.layout}, "
            f"{like.dtype}) cannot be deferred. Make it outside deferred_init."
        )
    size, stride = tuple(like.shape), like.stride()
    count = (
        like.numel()
        if like.is_contiguous()
        else 1 + sum((e - 1) * s for e, s in zip(size, stride, strict=True))
    )
    storage = Storage(count * like.dtype.itemsize, device, deferred)
    return fake_from_region(Region(storage, like.dtype, size, stride), storage.history())


def view_of(base: FakeTensor, result: torch.Tensor) -> FakeTensor:
    """Return a fake of the region of ``base`` that the meta tensor ``result`` covers."""
    offset = int(result.storage_offset())
    bits = result.is_conj(), result.is_neg()
    region = Region(
        base._region.storage, result.dtype, tuple(result.shape), result.stride(), offset, *bits
    )
    return fake_from_region(region, base._history)


SETS = {
    aten.set_.source_Tensor,
    aten.set_.source_Tensor_storage_offset,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
}


def set_memory(func: Any, fake: FakeTensor, source: Any, *place: Any) -> FakeTensor:
    """Execute ``set_``: the same object over other memory; a real tensor over real memory."""
    if isinstance(source, FakeTensor):
        old, region = fake._region, source._region
        offset, size, stride = place if place else (region.offset, region.size, region.stride)
        new = old._replace(
            storage=region.storage, size=tuple(size), stride=tuple(stride), offset=offset
        )
        tensors.assign(fake, fake_from_region(new, source._history))
        return fake
    with _torch.plain_torch():
        real = torch.empty(0, dtype=fake.dtype, device=source.device)
        tensors.become(fake, func(real, source, *place))
    return fake


def reshape_in_place(fake: FakeTensor, result: torch.Tensor) -> FakeTensor:
    """Execute ``t_``, ``squeeze_``, ``resize_`` and similar: the same storage, another region."""
    storage = fake._region.storage
    size_bytes = result.untyped_storage().nbytes()
    if size_bytes > storage.size_bytes:
        if storage.history().record:
            raise UnsupportedError(
                f"Resizing a deferred tensor of {storage.size_bytes} bytes that holds values to "
                f"{size_bytes} bytes is not recorded. Make a new tensor and copy into it."
            )
        storage.size_bytes = size_bytes
    tensors.assign(fake, view_of(fake, result))
    return fake


def device_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device of the results: the requested one, else that of the arguments.

    Raises:
        ArgumentError: arguments that are not 0-dim are on different devices.
    """
    if kwargs.get("device") is not None:
        where: torch.device = kwargs["device"]
        session = sessions.current()
        if session is not None:
            check_device(where, session)
        return where
    large: list[torch.device] = []

    def note(tensor: torch.Tensor) -> None:
        if tensor.dim() > 0 or tensor.device.type != "cpu":
            large.append(tensor.device)

    map_tensors((args, kwargs), torch.Tensor, note)
    if not all(_may_be_same(device, large[0]) for device in large) and "index" not in str(func):
        names = ", ".join(sorted({str(device) for device in large}))
        raise ArgumentError(
            f"{func}: the arguments are on different devices ({names}). Move them to one first."
        )
    return large[0] if large else _CPU


def _may_be_same(one: torch.device, other: torch.device) -> bool:
    """Compare devices; one without an index, such as ``cuda``, equals any of its type."""
    return one == other or (one.type == other.type and None in (one.index, other.index))


def check_device(device: torch.device, session: sessions.FakeSession) -> None:
    """Raise :class:`UnavailableError` if ``device`` is absent and must not be simulated."""
    if session.pretend is False and not _torch.device_available(device):
        raise UnavailableError(
            f"device={device} is not on this machine, and fake_mode(fake_cuda=False) does not "
            "pretend it. Leave fake_cuda out to make fake tensors for it."
        )
