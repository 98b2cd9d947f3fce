"""Tensors: their memory, their parts, devices and generators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "default_generator",
    "default_generator_as",
    "default_generators",
    "device_available",
    "flat_bytes",
    "has_fast_bfloat16",
    "inner_tensors",
    "is_fake",
    "is_host_memory",
    "parse_to",
    "parts_of",
    "results_on_device",
    "saved_tensor",
    "set_bits",
    "storage_at",
    "swap_tensors",
    "tensor_at",
    "trunc_normal",
    "waited",
    "weak_storage",
    "what_fails_without_memory",
    "without_values",
]

# What torch raises where it takes a tensor without memory past the operators.
_NEEDS_MEMORY = {
    "its data is not allocated yet": "memory",
    "already associated to a python object of type FakeTensor": "subclass",
}


def has_fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices faster than float32 ones."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def device_available(device: torch.device) -> bool:
    """Whether this machine has ``device``."""
    if device.type in ("cpu", "meta"):
        return True
    module = getattr(torch, device.type, None)
    return bool(
        module is not None and module.is_available() and (device.index or 0) < module.device_count()
    )


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operations on ``device`` draw from if given none; for a device that
    is absent here, that of the CPU.
    """
    if device.type == "cpu" or not device_available(device):
        return torch.default_generator
    module = getattr(torch, device.type)
    module.init()  # there are no default generators before
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


def default_generators() -> list[torch.Generator]:
    """Return the default generators of the CPU and of the CUDA devices, if these are in use."""
    return [torch.default_generator, *torch.cuda.default_generators]


@contextmanager
def default_generator_as(generator: torch.Generator) -> Iterator[None]:
    """Let the default generator of the device draw from ``generator`` in the block."""
    default = default_generator(generator.device)
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
        generator.set_state(default.get_state())
    finally:
        default.set_state(before)


def set_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> None:
    """Set what torch remembers about a lazy conjugate or negative, without computing."""
    torch._C._set_conj(tensor, conj)
    torch._C._set_neg(tensor, neg)


def parts_of(tensor: torch.Tensor) -> tuple[Sequence[str], Any] | None:
    """Return what a traceable wrapper subclass is made of: the names of its tensors, with that of a
    DTensor's mesh, and the other value it needs; None for other tensors.
    """
    wrapper: Any = tensor
    return wrapper.__tensor_flatten__() if is_traceable_wrapper_subclass(wrapper) else None


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """``tensor``, or the plain tensors that a traceable wrapper subclass is made of."""
    parts = parts_of(tensor)
    if parts is None:
        return [tensor]
    held = [getattr(tensor, name) for name in parts[0]]
    return [
        inner for part in held if isinstance(part, torch.Tensor) for inner in inner_tensors(part)
    ]


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective once it is there; others unchanged."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: PLC0415

    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    return tensor


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether the values of ``tensor`` are contiguous memory of this host, as they are."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()  # a derivative known to be zero, without memory
    )


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is one of torch's own fake tensors."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # there are none without it
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """Device, dtype, non_blocking and memory format out of the arguments of ``Tensor.to``."""
    return torch._C._nn._parse_to(*args, **kwargs)


def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange two objects' contents; weak references and views stay.

    ``torch.utils.swap_tensors`` refuses tensors that have weak references, as in recurrent layers.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


class _CudaArray:
    """Device memory with the CUDA array interface; keeps `owner` alive."""

    def __init__(self, address: int, size_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, size_bytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return the `size_bytes` bytes at `address` of a CUDA `device` as a uint8 tensor that keeps
    `owner` alive.

    The public way; ``torch._C._construct_storage_from_data_pointer`` keeps nothing alive.
    """
    return torch.as_tensor(_CudaArray(address, size_bytes, owner), device=device)


def storage_at(address: int, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage over the bytes at `address`, which the caller keeps mapped."""
    made: Any = torch._C._construct_storage_from_data_pointer(address, device, size_bytes)
    return made  # type: ignore[no-any-return]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 tensor that shares its memory."""
    # reshape(-1) keeps the stride of a single element, with which it cannot be viewed as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def trunc_normal(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any
) -> torch.Tensor:
    """``nn.init.trunc_normal_`` without its check for torch functions."""
    return torch.nn.init._no_grad_trunc_normal_(tensor, mean, std, a, b, generator=generator)


def results_on_device(
    func: Any, args: Any, kwargs: Any, shadow: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """Return the results of ``func`` on fake tensors of torch, which know their device."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: PLC0415
    from torch.utils._pytree import tree_map_only  # noqa: PLC0415

    mode = FakeTensorMode()
    with mode:
        args = tree_map_only(torch.Tensor, lambda t: FakeTensor(mode, shadow(t), t.device), args)
        return func(*args, **kwargs)


def without_values() -> AbstractContextManager[object]:
    """Let operators compute shapes only, those on ordinary tensors too."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    return FakeTensorMode(allow_non_fake_inputs=True)


def saved_tensor(file: Any, start: int, size_bytes: int) -> tuple[torch.Tensor, int]:
    """Return the tensor that ``torch.save`` wrote to a range of a file as a fake one, without
    reading its values, and the byte of the range at which its storage begins.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    from torch.distributed.checkpoint.utils import _create_file_view  # noqa: PLC0415

    with FakeTensorMode():
        tensor = torch.load(_create_file_view(file, start, size_bytes), weights_only=True)  # type: ignore[arg-type]
    return tensor, tensor.untyped_storage()._checkpoint_offset


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Return what equals that of a tensor over the same memory only, and keeps no memory alive."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def what_fails_without_memory(error: RuntimeError) -> str:
    """Return what torch wanted of a tensor without memory, past the operators: "memory", or to make
    a "subclass" of it; "" if the error is another.
    """
    text = str(error)
    return next((what for part, what in _NEEDS_MEMORY.items() if part in text), "")
