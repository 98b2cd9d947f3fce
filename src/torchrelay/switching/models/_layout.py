"""The tensors of a module as a list of storages.

Storages, rather than tensors, are what is stored and moved: tied parameters and views of one
storage then travel once and stay tied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch

from torchrelay.errors import UnsupportedError
from torchrelay.switching.device._contract import align

__all__ = [
    "Grouped",
    "ModelLayout",
    "ModelStorage",
    "TensorSpec",
    "layout_of",
    "named_tensors",
    "view_of",
]


@dataclass
class ModelStorage:
    """One storage of a module, with the tensors that view it."""

    source: torch.UntypedStorage
    index: int
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return self.source.nbytes()

    def bytes(self) -> torch.Tensor:
        """Return the storage as a uint8 tensor, without copying."""
        return torch.empty(0, dtype=torch.uint8, device=self.source.device).set_(self.source)

    def rebind(self, data: torch.Tensor) -> None:
        """Make every tensor of the storage view `data`, which holds the same bytes."""
        for tensor in self.tensors:
            # The offset of `data` in its storage is a multiple of 512.
            offset = data.storage_offset() // tensor.dtype.itemsize + int(tensor.storage_offset())
            storage = data.untyped_storage()
            tensor.data = view_of(storage, tensor.dtype, offset, tensor.shape, tensor.stride())


@dataclass(frozen=True)
class TensorSpec:
    """One tensor object of a module: all its paths, and its position in a storage."""

    paths: tuple[str, ...]
    is_parameter: bool
    requires_grad: bool
    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements from the start of the storage


@dataclass(frozen=True)
class ModelLayout:
    """The sizes of storages and the tensors over them."""

    storages: tuple[int, ...]  # bytes
    tensors: tuple[TensorSpec, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the model in an arena if it is one group."""
        return sum(align(size_bytes) for size_bytes in self.storages)


@dataclass(frozen=True)
class Grouped:
    """The groups of a model, in the order in which they are copied."""

    layout: ModelLayout
    groups: tuple[tuple[int, ...], ...]  # storages

    @classmethod
    def one_group(cls, layout: ModelLayout) -> Grouped:
        """Return one group for the whole model."""
        return cls(layout, (tuple(range(len(layout.storages))),))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each group."""
        storages = self.layout.storages
        return tuple(sum(align(storages[one]) for one in group) for group in self.groups)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The group of each storage."""
        return {storage: index for index, group in enumerate(self.groups) for storage in group}

    def places(self, group: int) -> list[tuple[int, int]]:
        """Return (storage, offset in bytes from the start of the group) for the storages of
        `group`.
        """
        storages = self.groups[group]
        sizes = (align(self.layout.storages[one]) for one in storages)
        return list(zip(storages, accumulate(sizes, initial=0), strict=False))

    def starts(self, granule_bytes: int) -> list[int]:
        """Return where each group starts if each has granules of its own, and where the last
        ends.
        """
        sizes = (align(size_bytes, granule_bytes) for size_bytes in self.sizes)
        return list(accumulate(sizes, initial=0))


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter, buffer and plain tensor attribute with its path; tied ones under each
    path.
    """
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        own = {**submodule._parameters, **submodule._buffers, **vars(submodule)}
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor):
                yield (f"{prefix}.{name}" if prefix else name), tensor


def layout_of(module: torch.nn.Module) -> tuple[ModelLayout, list[ModelStorage]]:
    """Return the layout of `module`, and its storages, in the order of registration.

    Raises:
        UnsupportedError: a tensor has no plain storage (sparse, quantized by subclass, fake), or
            its values are not those of its storage (conjugated, negated).
    """
    storages: dict[int, ModelStorage] = {}  # by address
    specs: dict[int, TensorSpec] = {}  # by the tensor's id
    for path, tensor in named_tensors(module):
        known = specs.get(id(tensor))
        if known is not None:
            specs[id(tensor)] = replace(known, paths=(*known.paths, path))
            continue
        source = _storage_of(path, tensor)
        # Storages of zero bytes share the address 0 without being one storage.
        key = source.data_ptr() or -len(storages) - 1
        storage = storages.setdefault(key, ModelStorage(source, len(storages)))
        storage.tensors.append(tensor)
        specs[id(tensor)] = TensorSpec(
            (path,),
            isinstance(tensor, torch.nn.Parameter),
            tensor.requires_grad,
            storage.index,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )
    sizes = tuple(storage.size_bytes for storage in storages.values())
    return ModelLayout(sizes, tuple(specs.values())), list(storages.values())


def view_of(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Return a tensor over `storage` from the element `offset`."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


def _storage_of(path: str, tensor: torch.Tensor) -> torch.UntypedStorage:
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError(
            f"{path} has no shape yet: call the lazy module once in its factory, on an example"
        )
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or _is_subclass(tensor):
        raise UnsupportedError(
            f"{path} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}; "
            "only plain dense tensors can be shared"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(
            f"{path} is a conjugated or negated view, which shares its memory with the original: "
            "keep its .resolve_conj().resolve_neg() instead"
        )
    return tensor.untyped_storage()


def _is_subclass(tensor: torch.Tensor) -> bool:
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return type(tensor.data) is not torch.Tensor and type(tensor) not in plain
