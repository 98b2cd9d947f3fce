"""The inputs of models: names, dtypes and shapes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from torchrelay.errors import ArgumentError

__all__ = ["PROMPT", "TEXTS", "InputLike", "InputSpec", "input_spec"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class InputSpec:
    """One input of a model; a dimension of -1 may have any size.

    The model is profiled with an input of shape `example`, by default `shape` with 1 for each -1.

    Raises:
        ArgumentError: `shape` is not a shape, or `example` is not one that fits it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    example: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for what, sizes, least in (
            ("shape", self.shape, -1),
            ("example", self.example_shape, 0),
        ):
            if any(type(size) is not int or size < least for size in sizes):
                raise ArgumentError(
                    f"input {self.name!r} has the {what} {sizes}: each size must be an integer of "
                    "at least 0, or -1 in the shape for any size"
                )
        if not self._fits(self.example_shape):
            raise ArgumentError(
                f"input {self.name!r}: the example {self.example} does not fit the shape "
                f"{self.shape}; it needs as many sizes, and the same ones but for -1"
            )

    @property
    def is_guessed(self) -> bool:
        """Whether the sizes of the example are not known to suit the model."""
        return self.example is None and -1 in self.shape

    @property
    def example_shape(self) -> tuple[int, ...]:
        if self.example is not None:
            return self.example
        return tuple(1 if size == -1 else size for size in self.shape)

    @property
    def example_bytes(self) -> int:
        return math.prod(self.example_shape) * self.dtype.itemsize

    def example_tensor(self) -> torch.Tensor:
        """Return zeros of the example's shape."""
        return torch.zeros(self.example_shape, dtype=self.dtype, device="cpu")

    def check(self, tensor: torch.Tensor, model: str = "") -> None:
        """Raise :class:`ArgumentError` unless `tensor` has this dtype and shape, which `model`
        takes.
        """
        if not self._fits(tensor.shape) or tensor.dtype != self.dtype:
            of, fixed = f"model {model!r}" if model else "the model", ""
            if tensor.dtype == self.dtype and -1 not in self.shape and self.shape:
                sizes = str((-1, *self.shape[1:]))
                fixed = (
                    "; its sizes, that of the batch included, were fixed when it was added: pass "
                    f"({self.dtype}, {sizes}) instead of a tensor, or shape = [-1, ...] in the "
                    "models file, for batches of any size"
                )
            raise ArgumentError(
                f"input {self.name!r} is {tensor.dtype} {tuple(tensor.shape)}, {of} "
                f"takes {self.dtype} {self.shape}{fixed}"
            )

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.shape) and all(
            want in (-1, size) for want, size in zip(self.shape, shape, strict=True)
        )


InputLike = torch.Tensor | tuple[torch.dtype, Shape] | tuple[torch.dtype, Shape, Shape] | InputSpec

#: The inputs of a model that generates, for requests of tensors and for its profile.
PROMPT: dict[str, InputSpec] = {"input_ids": InputSpec("input_ids", torch.int64, (-1, -1), (1, 8))}
#: The inputs of an encoder.
TEXTS = PROMPT | {"attention_mask": InputSpec("attention_mask", torch.int64, (-1, -1), (1, 8))}


def input_spec(name: str, value: InputLike) -> InputSpec:
    """Return what `value` says of input `name`."""
    if isinstance(value, InputSpec):
        return dataclasses.replace(value, name=name)
    if isinstance(value, torch.Tensor):
        return InputSpec(name, value.dtype, tuple(value.shape))
    try:
        dtype, *shapes = value
        if isinstance(dtype, torch.dtype):
            return InputSpec(name, dtype, *map(tuple, shapes))
    except TypeError:
        pass
    raise ArgumentError(
        f"input {name!r} of type {type(value).__name__}: pass a tensor, (dtype, shape) or "
        "(dtype, shape, example), such as (torch.float32, (-1, 64))"
    )
