"""Fake tensors: tensors with shape, dtype, stride and device, but without memory.

Inside :func:`fake_mode` every new tensor is fake, also on devices that this machine lacks.
Operations on fake tensors return fake tensors, inside and outside the mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchrelay.deferred._dispatch import enter
from torchrelay.deferred._recording import FakeSession
from torchrelay.deferred._tensor import FakeTensor
from torchrelay.errors import ArgumentError

__all__ = ["FakeTensor", "fake_mode", "is_fake", "meta_like"]


@contextmanager
def fake_mode(*, fake_cuda: bool | None = None) -> Iterator[None]:
    """Create fake tensors inside the block. Can be nested; applies to this thread.

    Args:
        fake_cuda: None and True: devices that this machine lacks work as if present. False:
            creating a tensor on one raises, as it does without the mode.

    Raises:
        DeferredError: a function of torch needs the memory of a fake tensor.
        UnavailableError: a device is absent, with ``fake_cuda=False``.
        UnsupportedError: a fake mode of torch is active, or a class of tensors takes the memory of
            a fake tensor.

    >>> with fake_mode():
    ...     a = torch.ones([10])
    ...     b = torch.ones([20], device="cuda")
    >>> a
    tensor(..., size=(10,), fake=True)
    >>> b
    tensor(..., size=(20,), device=cuda, fake=True)
    """
    with enter(FakeSession(deferred=False, pretend=fake_cuda)):
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is from :func:`fake_mode` or ``deferred_init``."""
    return isinstance(tensor, FakeTensor)


def meta_like(fake: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the dtype, size and stride of ``fake``, detached from it.

    Raises:
        ArgumentError: ``fake`` is not a fake tensor.
    """
    if not isinstance(fake, FakeTensor):
        raise ArgumentError(
            f"meta_like() takes a fake tensor, and this is a real one of shape {tuple(fake.shape)}."
        )
    return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")


def __dir__() -> list[str]:
    return __all__
