"""Models in host memory, by name, ready to be copied into an arena."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrelay._resource import Resource
from torchrelay.buffers import Segment
from torchrelay.errors import ArgumentError, DataError, NotFoundError, UnavailableError
from torchrelay.switching._contract import align
from torchrelay.switching._factory import Factory
from torchrelay.switching._layout import Layout, layout_of

__all__ = ["InputSpec", "ModelStore", "StoredModel"]


@dataclass(frozen=True)
class InputSpec:
    """One input of a model; a dimension of -1 may have any size."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def example(self) -> torch.Tensor:
        """Return zeros of the smallest shape that fits."""
        return torch.zeros([1 if size < 0 else size for size in self.shape], dtype=self.dtype)

    def check(self, tensor: torch.Tensor) -> None:
        """Raise :class:`ArgumentError` unless `tensor` has this dtype and shape."""
        fits = len(tensor.shape) == len(self.shape) and all(
            want in (-1, size) for want, size in zip(self.shape, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype != self.dtype:
            raise ArgumentError(
                f"input {self.name!r} is {tensor.dtype} {tuple(tensor.shape)}, the model takes "
                f"{self.dtype} {self.shape}"
            )


@dataclass(frozen=True)
class StoredModel:
    """A model in host memory: its bytes, and what another process needs to build its module."""

    name: str
    factory: Factory
    layout: Layout
    offsets: tuple[int, ...]  # bytes from the start of the segment, one for each storage
    segment: Segment
    inputs: tuple[InputSpec, ...]
    version: int

    @property
    def size_bytes(self) -> int:
        return self.segment.size_bytes

    def storage(self, index: int) -> torch.Tensor:
        """Return the bytes of one storage as a uint8 tensor, without copying."""
        start = self.offsets[index]
        return self.bytes(start, start + self.layout.storages[index])

    def bytes(self, start: int, end: int) -> torch.Tensor:
        """Return the bytes from `start` up to `end` of the segment as a uint8 tensor, without
        copying.
        """
        return self.segment.tensor((end - start,), torch.uint8, start)

    def fingerprint(self) -> str:
        """Return a digest of everything but the values: equal models have equal profiles."""
        what = [
            self.factory.reference,
            self.factory.kwargs,
            self.layout.to_json(),
            repr(self.inputs),
        ]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


class ModelStore(Resource):
    """Models by name, each in one sealed, anonymous block of host memory. Thread-safe.

    Parameters, buffers (persistent or not, of any dtype) and plain tensor attributes are kept, each
    storage once, so that tied weights stay tied, at 512-byte boundaries.
    """

    def __init__(self) -> None:
        self._models: dict[str, StoredModel] = {}
        self._versions: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(
        self,
        name: str,
        factory: Callable[..., torch.nn.Module] | str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        inputs: Mapping[str, torch.Tensor | tuple[torch.dtype, tuple[int, ...]]],
        weights: str | Path | None = None,
        weights_prefix: str = "",
        seed: int = 0,
    ) -> StoredModel:
        """Build a model and keep it, replacing one of the same name.

        Args:
            factory: builds the module: a function or class at the top level of a module or file, or
                its name (`package.module:function`, `/path/to/file.py:function`). Workers call it
                too.
            kwargs: its keyword arguments; JSON values.
            inputs: the arguments of the module's `forward` by name: an example tensor, or dtype and
                shape with -1 for dimensions of any size.
            weights: what replaces the values the factory gave: a `.safetensors` file, or a folder
                that :func:`torchrelay.checkpoint.load` reads; None keeps them.
            weights_prefix: what the module's keys begin with in such a folder, such as
                ``"model."``.
            seed: for the factory's random numbers.

        Raises:
            ArgumentError: an argument is wrong, or `weights` do not fit the module.
            DataError: the `.safetensors` file is damaged.
            CorruptionError, MismatchError, StorageError: the folder is damaged, does not fit, or is
                not there.
            ModelError: the factory raised.
            UnsupportedError: the module has tensors that are not plain and dense.
        """
        if not name or any(not (c.isalnum() or c in "-_.") for c in name):
            raise ArgumentError(
                f"{name!r} is not a valid name of a model: use letters, digits, '-', '_' and '.'"
            )
        if not inputs:
            raise ArgumentError(f"model {name!r} needs its inputs: a name and an example for each")
        made = Factory.of(factory, kwargs, seed)
        module = made.build_module().eval()
        if weights is not None:
            _load_weights(module, Path(weights), weights_prefix)
        layout, storages = layout_of(module)
        offsets, end_bytes = [], 0
        for size_bytes in layout.storages:
            offsets.append(end_bytes)
            end_bytes += align(size_bytes)
        segment = Segment.create(max(end_bytes, 1), f"torchrelay-model-{name}"[:200])
        specs = tuple(_input_spec(key, value) for key, value in inputs.items())
        with self._lock:
            version = self._versions[name] = self._versions.get(name, 0) + 1
            model = StoredModel(name, made, layout, tuple(offsets), segment, specs, version)
            for index, storage in enumerate(storages):
                model.storage(index).copy_(storage.bytes())
            self._models[name] = model
        return model

    def get(self, name: str) -> StoredModel:
        """Return the model.

        Raises:
            NotFoundError: there is no model of that name.
        """
        with self._lock:
            if name not in self._models:
                raise NotFoundError(
                    f"there is no model {name!r}; there are "
                    f"{', '.join(sorted(self._models)) or 'none'}"
                )
            return self._models[name]

    def remove(self, name: str) -> None:
        """Forget the model; its memory is freed once it is unused.

        Raises:
            NotFoundError: there is no model of that name.
        """
        self.get(name)
        with self._lock:
            self._models.pop(name, None)

    def names(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self._models))

    def close(self) -> None:
        """Forget all models. Idempotent."""
        with self._lock:
            self._models.clear()


def _input_spec(name: str, value: torch.Tensor | tuple[torch.dtype, tuple[int, ...]]) -> InputSpec:
    if isinstance(value, torch.Tensor):
        return InputSpec(name, value.dtype, tuple(value.shape))
    dtype, shape = value
    return InputSpec(name, dtype, tuple(shape))


def _load_weights(module: torch.nn.Module, path: Path, prefix: str) -> None:
    if path.is_dir():
        from torchrelay import checkpoint  # noqa: PLC0415 - takes a moment to import

        checkpoint.load(module, path, prefix=prefix, no_dist=True)
    else:
        _load_safetensors(module, path)


def _load_safetensors(module: torch.nn.Module, path: Path) -> None:
    try:
        from safetensors import SafetensorError  # noqa: PLC0415 - an optional package
        from safetensors.torch import load_file  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            "weights from a file need safetensors: pip install safetensors"
        ) from error
    if path.suffix != ".safetensors":
        raise ArgumentError(
            f"{path}: weights come from a .safetensors file or a checkpoint's folder"
        )
    try:
        values = load_file(path)
    except FileNotFoundError as error:
        raise ArgumentError(f"{path}: there is no such file") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: {error}") from error
    # safetensors keeps tied tensors once, under one of their names.
    tied = {
        id(tensor): name
        for name, tensor in module.state_dict(keep_vars=True).items()
        if name in values
    }
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name not in values and id(tensor) in tied:
            values[name] = values[tied[id(tensor)]]
    try:
        module.load_state_dict(values)
    except RuntimeError as error:
        raise ArgumentError(f"{path} does not fit the model: {error}") from error
