"""Fake tensors: shape, dtype, stride and device of a tensor, without its memory.

Inside :func:`fake_mode` every tensor that is made is fake, also for devices that this machine does not have.
Operations on fake tensors give fake tensors, inside and outside the mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchrelay.deferred import _session as sessions
from torchrelay.deferred._tensor import FakeTensor
from torchrelay.errors import ArgumentError

__all__ = ["FakeTensor", "fake_mode", "is_fake", "meta_like"]


@contextmanager
def fake_mode(*, fake_cuda: bool | None = None) -> Iterator[None]:
    """Tensors made inside are fake. Can be nested; concerns this thread alone.

    Args:
        fake_cuda: what to do about devices that this machine does not have. None and True: pretend that they
            are there. False: making a tensor on one raises, as it does without the mode.

    Raises:
        UnavailableError: inside, with ``fake_cuda=False``, at a device that is absent.
        UnsupportedError: a fake mode of torch itself is active.

    >>> with fake_mode():
    ...     a = torch.ones([10])
    ...     b = torch.ones([20], device="cuda")
    >>> a
    tensor(..., size=(10,), fake=True)
    >>> b
    tensor(..., size=(20,), device=cuda, fake=True)
    """
    with sessions.enter(sessions.Session(deferred=False, pretend=fake_cuda)):
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has no memory: made in :func:`fake_mode` or by ``deferred_init``."""
    return isinstance(tensor, FakeTensor)


def meta_like(fake: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the dtype, size and stride of ``fake``, detached from it.

    Raises:
        ArgumentError: ``fake`` is not a fake tensor.
    """
    if not isinstance(fake, FakeTensor):
        raise ArgumentError(
            f"meta_like() takes a fake tensor, and this is a real one of shape {tuple(fake.shape)}."
        )
    return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")
