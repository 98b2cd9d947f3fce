"""The memory of requests: tensors cross it with their bits, and lent ones are left alone."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from torchrelay.errors import ArgumentError
from torchrelay.switching.worker import _request_buffer
from torchrelay.switching.worker._request_buffer import BufferPool, RequestBuffer

LARGE = _request_buffer._LEND_BYTES // 4  # float32


def filled(value: float, count: int = LARGE) -> dict[str, torch.Tensor]:
    return {"x": torch.full((count,), value)}


def answer(pool: BufferPool, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the daemon returns after a worker has written `tensors` as outputs."""
    return pool.take(pool.current.write(tensors, 512)[0])


@pytest.mark.parametrize("lent", [False, True])
def test_every_kind_of_tensor_crosses_with_its_bits(lent: bool) -> None:
    ours = RequestBuffer.create(1 << 16)
    theirs = RequestBuffer.open(os.dup(ours.descriptor))
    complex_values = torch.randn(3, 4, dtype=torch.complex64)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(2, 0, 3),
        "bfloat16": torch.randn(5, 7).to(torch.bfloat16),
        "bool": torch.rand(9) > 0.5,
        "uint16": torch.arange(5).to(torch.uint16),
        "transposed": torch.randn(6, 8).t(),
        "strided": torch.arange(40)[::3],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "conjugate": complex_values.conj(),
        "negative": complex_values.conj().imag,
        "float64": torch.randn(2, 3, 4, dtype=torch.float64),
    }
    described = theirs.write(tensors, 1024)[0]
    with torch.device("meta"):  # a default of the caller
        read = ours.lend(described, lambda: None) if lent else ours.read(described)
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
        assert read[name].is_contiguous()


def test_tensors_are_not_read_where_torch_makes_none_with_memory() -> None:
    buffer = RequestBuffer.create(4096)
    written, _ = buffer.write({"x": torch.ones(4)}, 0)
    with pytest.raises(ArgumentError, match="makes tensors without memory here"):
        torch.func.functionalize(lambda x: buffer.read(written)["x"] + x)(torch.ones(4))


def test_the_daemon_sees_which_request_was_started_last() -> None:
    ours = RequestBuffer.create(4096)
    theirs = RequestBuffer.open(os.dup(ours.descriptor))
    assert ours.started == 0
    theirs.write({"x": torch.full((512,), -1)}, 0)  # the whole buffer, and not the header
    theirs.started = 1 << 40
    del theirs
    assert ours.started == 1 << 40


def test_large_outputs_are_lent_and_their_buffer_used_again_once_they_are_dropped() -> None:
    pool = BufferPool(2 * 4 * LARGE)
    first_buffer = pool.current
    first = answer(pool, filled(1.0))
    assert pool.current is not first_buffer
    second = answer(pool, filled(2.0))
    assert torch.equal(first["x"], filled(1.0)["x"]) and torch.equal(second["x"], filled(2.0)["x"])
    first["x"].zero_()  # the caller's own: it may write
    part = first.pop("x")[5:10]
    gc.collect()
    assert first_buffer not in pool._free, "a view keeps the buffer"
    del part
    third_buffer = pool.current
    third = answer(pool, filled(3.0))
    assert pool.current is first_buffer is not third_buffer
    assert torch.equal(third["x"], filled(3.0)["x"])


def test_small_outputs_are_copied() -> None:
    pool = BufferPool(1 << 20)
    buffer = pool.current
    small = answer(pool, filled(1.0, LARGE - 1))
    assert pool.current is buffer
    answer(pool, filled(2.0, LARGE - 1))
    assert torch.equal(small["x"], filled(1.0, LARGE - 1)["x"])


def test_outputs_are_copied_while_every_other_buffer_is_lent() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = BufferPool(2 * 4 * LARGE)
    kept = [answer(pool, filled(float(value))) for value in range(10)]
    assert pool.index == len(pool.all) - 1 and not pool._free
    for value, tensors in enumerate(kept):
        assert torch.equal(tensors["x"], filled(float(value))["x"])
    del pool  # the worker has died: what callers keep stays
    gc.collect()
    assert all(float(tensors["x"][-1]) == value for value, tensors in enumerate(kept))
    kept.clear()
    tensors = {}
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_caller_that_drops_each_reply_for_the_next_never_makes_a_copy() -> None:
    pool = BufferPool(2 * 4 * LARGE)
    for turn in range(10):
        used = pool.current
        reply = answer(pool, filled(float(turn)))
        assert pool.current is not used
        assert torch.equal(reply["x"], filled(float(turn))["x"])
