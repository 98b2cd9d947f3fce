"""The shared cache on a real GPU; the same calls run against a fake driver in
tests/unit/switching.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from torchrelay.buffers import Segment
from torchrelay.errors import SegmentError
from torchrelay.switching import SharedCache
from torchrelay.switching.device._contract import Copy
from torchrelay.switching.device._cuda import CudaLink

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZE = 64 << 20
READER = """
import sys, torch
from torchrelay.switching import SharedCache
cache = SharedCache.recv(sys.argv[1])
values = cache.tensor((1024,), torch.float32, 4096)
assert cache.read_only and values.device.type == "cuda"
print(values.sum().item())
try:
    values.zero_()
    torch.cuda.synchronize()
except RuntimeError:
    print("refused")
"""


def test_a_reader_sees_the_values_and_cannot_write(tmp_path: Path) -> None:
    with SharedCache.allocate(SIZE, "cuda") as cache:
        values = cache.tensor((1024,), torch.float32, 4096).fill_(2.0)
        torch.cuda.synchronize()
        address = tmp_path / "cache.sock"
        sender = threading.Thread(target=cache.send, args=(address,), kwargs={"read_only": True})
        sender.start()
        done = subprocess.run(
            [sys.executable, "-c", READER, str(address)],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        sender.join()
        assert done.stdout.split() == ["2048.0", "refused"], done.stderr
        assert values.sum().item() == 2048.0


def test_memory_is_free_after_close() -> None:
    torch.cuda.init()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(5):
        SharedCache.allocate(SIZE, "cuda").close()
    assert before - torch.cuda.mem_get_info()[0] < SIZE
    with pytest.raises(SegmentError, match="OUT_OF_MEMORY"):
        SharedCache.allocate(1 << 44, "cuda")


def test_the_link_copies_what_is_in_host_memory() -> None:
    source = Segment.create(SIZE, populate=True).tensor((SIZE,), torch.uint8)
    source.copy_(torch.arange(SIZE, dtype=torch.int64).to(torch.uint8))
    with SharedCache.allocate(SIZE, "cuda") as cache:
        arena = cache.tensor((SIZE,), torch.uint8)
        link = CudaLink(arena, cache.device)
        link.register(source)
        waits = [link.start([Copy(source[i : i + (1 << 20)], i)]) for i in range(0, SIZE, 1 << 20)]
        for wait in waits:
            wait()
        assert torch.equal(arena.cpu(), source)
        link.unregister(source)
        link.close()


def test_a_module_moves_into_a_region_on_the_gpu() -> None:
    with SharedCache.allocate(SIZE, "cuda") as cache:
        module = torch.nn.Linear(64, 64)
        x = torch.randn(3, 64)
        expected = module(x)
        cache.insert_for_parameter(1 << 20).put(module)
        assert module.weight.device.type == "cuda"
        assert torch.allclose(module(x.cuda()).cpu(), expected, atol=1e-5)
