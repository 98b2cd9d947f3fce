"""The fake tensor: a tensor with shape, dtype, device and autograd, but without memory.

It is a wrapper subclass; nothing in torch is replaced. Here are its place in the record, how it
looks, and the methods that torch would stop before they reach the dispatcher (``.to("cuda")``
without CUDA). What its operations do is in the subclass of :mod:`._dispatch`.
"""

from __future__ import annotations

import copy
import threading
import weakref
from functools import cache
from typing import Any, ClassVar, NoReturn

import torch

from torchrelay import _torch
from torchrelay.deferred._graph import History, Region
from torchrelay.errors import DeferredError

__all__ = [
    "FakeTensor",
    "Life",
    "assign",
    "become",
    "created",
    "fake_from_region",
    "give_shape",
    "go_back",
    "meta_of",
    "replacement",
]

_wrap = torch.Tensor._make_wrapper_subclass


class Life:
    """Ends with its fake tensor, which cannot be weakly referenced itself when it is swapped."""

    __slots__ = ("__weakref__",)


class _Created(threading.local):
    """The fake tensors that this thread makes.

    Attributes:
        lives: gets a weak reference to the life of each; None: they are not counted.
    """

    lives: list[weakref.ref[Life]] | None = None


created = _Created()


class FakeTensor(torch.Tensor):
    """A tensor without memory, from :func:`.fake.fake_mode` or :func:`.deferred_init`.

    Materialisation changes its class to that of the real tensor; it stays the same object.

    Attributes:
        concrete: the subclass that executes operations; every fake tensor is an instance of it.
    """

    concrete: ClassVar[type[FakeTensor]]
    _region: Region
    _history: History
    _life: Life | None = None

    __torch_function__ = _torch.disabled_torch_function  # type: ignore[assignment]

    # A subclass of Parameter stays one: its methods, its isinstance, and its class when
    # materialized.

    @property
    def _is_param(self) -> bool:
        return bool(self.__dict__.get("_is_param", False))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__dict__["_is_param"] = value
        cls = _torch.parameter_class()
        if cls is not None and cls is not torch.nn.Parameter:
            self.__class__ = _kind_of(cls)

    # What it looks like.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = ["...", f"size={tuple(self.shape)}"]
        if self.dtype != torch.get_default_dtype():
            parts.append(f"dtype={self.dtype}")
        if self.device.type != "cpu":
            parts.append(f"device={self.device}")
        if self.requires_grad:
            parts.append("requires_grad=True")
        text = f"tensor({', '.join(parts)}, fake=True)"
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    # What needs memory.

    def data_ptr(self) -> int:
        if not _torch.is_flattening():
            self.refuse("data_ptr()")
        return 0  # equal addresses: the layer leaves its weights as they are

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("pickling")

    def __copy__(self) -> FakeTensor:
        alias = fake_from_region(self._region, self._history)
        alias.requires_grad_(self.requires_grad)
        alias.__class__ = self.__class__
        alias.__dict__.update(user_attributes(self))
        return alias

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse("__dlpack__()")

    def share_memory_(self) -> NoReturn:
        self.refuse("share_memory_()")

    def refuse(self, what: str) -> NoReturn:
        """Raise :class:`DeferredError`: ``what`` needs memory, or values that do not exist."""
        if not self._region.storage.deferred:
            raise DeferredError(
                f"{what} needs the values of a fake tensor, which has none: {self!r}. Tensors made "
                "inside deferred_init can be evaluated; those of fake_mode cannot."
            )
        raise DeferredError(
            f"{what} needs the memory of a tensor, and {self!r} has none. Materialize it first "
            "(materialize_tensor, or materialize_module for its module)."
        )

    # What torch stops on the way to the dispatcher.

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        assign(self, value)

    @property
    def cls_to_become(self) -> type[FakeTensor]:
        """The class that torch gives to a lazy module's parameter once it has its shape."""
        return type(self)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if (args and isinstance(args[0], torch.Tensor)) or "other" in kwargs:
            other = kwargs.pop("other") if "other" in kwargs else args[0]
            args = (other.device, other.dtype, *args[1:])
        device, dtype, non_blocking, memory_format = _torch.parse_to(*args, **kwargs)
        same = (device in (None, self.device)) and dtype in (None, self.dtype)
        if same and not copy and memory_format in (None, torch.preserve_format):
            return self
        copied: torch.Tensor = torch.ops.aten._to_copy(
            self, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format
        )
        return copied

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
    ) -> torch.Tensor:
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        where = torch.device("cuda") if index is None else torch.device("cuda", index)
        return self.to(where, non_blocking=non_blocking, memory_format=memory_format)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        known: torch.Tensor | None = memo.get(id(self))
        return _deepcopy(self, memo) if known is None else known


@cache
def _kind_of(cls: type[torch.nn.Parameter]) -> type[FakeTensor]:
    """Return the class of fake tensors that are also ``cls``, a class of the program."""
    meta: Any = type(cls)
    body = {"_real_class": cls, "__module__": cls.__module__}
    kind: type[FakeTensor] = meta(f"Fake{cls.__name__}", (FakeTensor.concrete, cls), body)
    return kind


def give_shape(lazy: torch.Tensor, fake: FakeTensor) -> None:
    """Turn ``lazy``, a real parameter without shape, into a fake one like ``fake``."""
    replacement = fake_from_region(fake._region, fake._history).requires_grad_(lazy.requires_grad)
    replacement.__dict__.update(lazy.__dict__)
    if issubclass(lazy.cls_to_become, torch.nn.Parameter):  # type: ignore[attr-defined]
        replacement.__dict__["_is_param"] = True
    _torch.swap_tensors(lazy, replacement)


def assign(fake: FakeTensor, value: torch.Tensor) -> None:
    """Execute ``fake.data = value``: the same object becomes a view of ``value``'s storage."""
    if isinstance(value, FakeTensor):
        _set_data(fake, value)
        fake._region, fake._history = value._region, value._history
    else:
        become(fake, value.detach())  # not value itself, which stays the program's


_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _deepcopy(fake: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a copy with its own storage; tensors that shared one still share one."""
    if not fake.is_leaf:
        raise DeferredError(
            "Only tensors that are leaves of the autograd graph can be deep-copied."
        )
    region, escaped = fake._region, fake._history.escaped
    if escaped is not None:
        real = become(copy.copy(fake), copy.deepcopy(region.of(escaped), memo))
        real.__dict__.update(copy.deepcopy(real.__dict__, memo))
        return real
    storage = region.storage
    with torch.no_grad():
        copied: Any = memo.get(id(storage))
        if copied is None:
            count = storage.size_bytes // region.dtype.itemsize
            flat = Region(storage, region.dtype, (count,), (1,))
            copied = memo[id(storage)] = fake_from_region(flat, fake._history).clone()
        mine = region._replace(storage=copied._region.storage, conj=False, neg=False)
        new: Any = fake_from_region(mine, copied._history)
        # What torch's deepcopy returns for a lazy conjugate or negative.
        new = new.conj_physical() if region.conj else new
        new = new.neg() if region.neg else new
    new.__class__ = fake.__class__
    new.__dict__.update(copy.deepcopy(user_attributes(fake), memo))
    new.requires_grad_(fake.requires_grad)
    memo[id(fake)] = new
    return new  # type: ignore[no-any-return]


_OWN = ("_region", "_history", "_life")


def user_attributes(fake: FakeTensor) -> dict[str, Any]:
    """Return the attributes that were set on ``fake`` from outside."""
    return {name: value for name, value in fake.__dict__.items() if name not in _OWN}


def become(fake: FakeTensor, real: torch.Tensor) -> torch.Tensor:
    """Turn ``fake`` into ``real``, a detached tensor; object, class and hooks stay."""
    attributes = user_attributes(fake)
    if attributes.pop("_is_param", False):
        real_class = getattr(type(fake), "_real_class", torch.nn.Parameter)
        real = torch.Tensor._make_subclass(real_class, real, fake.requires_grad)
    elif fake.requires_grad and fake.is_leaf:
        real.requires_grad_()
    real.__dict__.update(attributes)
    _torch.swap_tensors(fake, real)
    # The hooks stay with the Python object; assigning them enters them in the new tensor's autograd
    # data.
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        registered = getattr(fake, name)
        if registered and fake.requires_grad and fake.is_leaf:
            setattr(fake, name, registered)
    return fake


def go_back(real: torch.Tensor, fake: FakeTensor) -> torch.Tensor:
    """Turn ``real`` into ``fake``, the reverse of :func:`become`.

    Returns a new object if ``real`` cannot change.
    """
    if isinstance(real, FakeTensor):
        assign(real, fake)
        return real
    fake.requires_grad_(real.requires_grad)
    fake.__dict__.update(real.__dict__)
    if isinstance(real, torch.nn.Parameter):
        fake.__dict__["_is_param"] = True
    if hasattr(real, "_local_tensor"):  # a DTensor has another layout in memory
        return fake
    if isinstance(real, torch.nn.Parameter) and type(real) is not torch.nn.Parameter:
        fake.__class__ = _kind_of(type(real))
    _torch.swap_tensors(real, fake)
    return real


def replacement(fake: FakeTensor, real: torch.Tensor) -> torch.Tensor:
    """Return a new object like :func:`become`, for a class that cannot be assigned: DTensor."""
    attributes = user_attributes(fake)
    if attributes.pop("_is_param", False):
        real = torch.nn.Parameter(real, fake.requires_grad)
    for name, value in attributes.items():
        setattr(real, name, value)
    return real


def meta_of(tensor: torch.Tensor, alone: bool = False) -> torch.Tensor:
    """Return a meta tensor with the dtype, size and strides of ``tensor``; those of fake tensors
    share memory as they do, unless each is to be ``alone``.
    """
    if isinstance(tensor, FakeTensor):
        return tensor._region.meta(alone)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def fake_from_region(region: Region, history: History) -> FakeTensor:
    """Return a new fake tensor over ``region``."""
    fake: FakeTensor = _wrap(
        FakeTensor.concrete,
        region.size,
        strides=region.stride,
        storage_offset=region.offset,
        dtype=region.dtype,
        device=region.storage.device,
        storage_size=region.storage.size_bytes,
    )
    fake._region = region
    fake._history = history
    lives = created.lives
    if lives is not None:
        fake._life = life = Life()
        lives.append(weakref.ref(life))
    if region.conj or region.neg:
        _torch.set_bits(fake, region.conj, region.neg)
    return fake
