from __future__ import annotations

import gc
import os

import pytest
import torch

from torchrelay.buffers import Segment
from torchrelay.errors import ArgumentError, SegmentError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_share_the_segment(dtype: torch.dtype) -> None:
    segment = Segment.create(4096)
    written = segment.tensor((3, 5), dtype, offset_bytes=64)
    read = Segment.attach(segment.address).tensor((15,), dtype, offset_bytes=64)
    written.copy_(torch.arange(15).reshape(3, 5))
    assert torch.equal(read, torch.arange(15).to(dtype))


def test_a_tensor_keeps_its_segment_alive() -> None:
    tensor = Segment.create(1 << 20).tensor((1 << 18,), torch.float32)
    gc.collect()
    tensor.fill_(3)
    assert tensor.sum() == 3 * (1 << 18)


def test_memory_goes_with_the_last_tensor() -> None:
    segment = Segment.create(1 << 20)
    fd = segment.fd
    tensor = segment.tensor((4,), torch.int64)
    del segment
    gc.collect()
    os.fstat(fd)
    del tensor
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_descriptor_can_be_passed() -> None:
    segment = Segment.create(64)
    copy = os.dup(segment.fd)
    other = Segment.from_fd(copy, read_only=True)
    os.close(copy)
    segment.tensor((64,), torch.uint8).fill_(9)
    assert other.tensor((64,), torch.uint8).eq(9).all()


def test_empty_tensors() -> None:
    assert Segment.create(8).tensor((0, 3), torch.float32).shape == (0, 3)


@pytest.mark.parametrize(("shape", "offset_bytes"), [((5,), 0), ((4,), 4), ((1,), 2), ((1,), -4)])
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], offset_bytes: int) -> None:
    with pytest.raises(ArgumentError, match="does not fit"):
        Segment.create(16).tensor(shape, torch.float32, offset_bytes)


def test_bad_sizes_and_addresses() -> None:
    with pytest.raises(ArgumentError, match="at least 1 byte"):
        Segment.create(0)
    with pytest.raises(ArgumentError, match="no address of a segment"):
        Segment.attach("nonsense")
    with pytest.raises(SegmentError, match="is that process alive"):
        Segment.attach("999999999:3:17")
