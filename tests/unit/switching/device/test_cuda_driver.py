"""The CUDA implementation against a driver that checks every call, on a machine without CUDA."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.buffers import Segment
from torchrelay.errors import SegmentError, UnavailableError
from torchrelay.switching import SharedCache
from torchrelay.switching.device import _cuda
from torchrelay.switching.device._contract import Copy

driver_module = pytest.importorskip("cuda.bindings.driver", reason="needs the [cuda] extra")
spec = importlib.util.spec_from_file_location(
    "fake_driver", Path(__file__).with_name("fake_driver.py")
)
assert spec is not None and spec.loader is not None
fake_driver = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = fake_driver
spec.loader.exec_module(fake_driver)
GRANULE = fake_driver.GRANULE
RESULT = driver_module.CUresult


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake = fake_driver.FakeDriver()
    fake_driver.install(fake, monkeypatch.setattr)
    yield fake
    gc.collect()
    fake.assert_nothing_left()


def test_allocating_maps_whole_granules_in_the_primary_context(driver: Any) -> None:
    cache = SharedCache.allocate(GRANULE + 1, "cuda")
    assert cache.size_bytes == 2 * GRANULE and cache.device == torch.device("cuda", 0)
    assert driver.log == [
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ]
    driver.log.clear()
    cache.close()
    cache.close()
    assert sorted(driver.log) == ["cuMemAddressFree", "cuMemRelease", "cuMemUnmap"]
    assert driver.log.index("cuMemUnmap") < driver.log.index("cuMemAddressFree")


def test_another_process_maps_the_same_memory_read_only(driver: Any) -> None:
    with SharedCache.allocate(GRANULE, "cuda:0") as cache:
        descriptor = cache.export(read_only=True)
        assert not os.get_inheritable(descriptor)
        with SharedCache.from_descriptors(cache.describe(read_only=True), [descriptor]) as reader:
            os.close(descriptor)
            cache.tensor((4,), torch.float32, 512).copy_(torch.arange(4.0))
            assert reader.tensor((4,), torch.float32, 512).tolist() == [0.0, 1.0, 2.0, 3.0]
            flags = driver_module.CUmemAccess_flags
            assert sorted(driver.access.values()) == [
                flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
                flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            ]


def test_tensors_keep_the_mapping(driver: Any) -> None:
    cache = SharedCache.allocate(GRANULE, "cuda")
    kept = cache.tensor((2,), torch.float32)
    kept.fill_(5)
    cache.close()
    assert kept.tolist() == [5.0, 5.0] and len(driver.mapped) == 1
    del kept, cache


@pytest.mark.parametrize(
    "name", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_a_failure_at_any_step_undoes_the_steps_before(driver: Any, name: str) -> None:
    driver.fail[name] = RESULT.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(SegmentError, match=f"{name} failed with CUDA_ERROR_INVALID_VALUE"):
        SharedCache.allocate(GRANULE, "cuda")
    if name == "cuMemAddressReserve":
        driver.reserved.clear()
    driver.assert_nothing_left()


def test_out_of_memory_says_what_to_try(driver: Any) -> None:
    with pytest.raises(SegmentError, match="OUT_OF_MEMORY; allocate less"):
        SharedCache.allocate(1 << 30, "cuda")


def test_copies_are_queued_on_one_stream_and_waited_for_by_event(driver: Any) -> None:
    source = Segment.create(1 << 16).tensor((1 << 16,), torch.uint8)
    source.copy_(torch.arange(1 << 16).to(torch.uint8))
    with SharedCache.allocate(GRANULE, "cuda") as cache:
        arena = cache.tensor((GRANULE,), torch.uint8)
        link = _cuda.CudaLink(arena, cache.device)
        link.register(source)
        first = link.start([Copy(source[:1000], 512), Copy(source[1000:1024], 4096)])
        second = link.start([Copy(source[2000:2100], 8192)])
        assert int(arena.sum()) == 0, "nothing is copied before an event is waited for"
        first()
        assert torch.equal(arena[512:1512], source[:1000]) and torch.equal(
            arena[4096:4120], source[1000:1024]
        )
        second()
        assert torch.equal(arena[8192:8292], source[2000:2100])
        assert driver.log.count("cuMemcpyHtoDAsync") == 3 and driver.log.count("cuEventRecord") == 2
        link.start([Copy(source[:10], 0)])()
        link.register(source)  # counted
        link.unregister(source)
        assert len(driver.pinned) == 1
        link.unregister(source)
        assert not driver.pinned
        link.register(source)
        link.close()
        link.close()
        del arena


def test_a_failed_wait_raises_and_destroys_the_event(driver: Any) -> None:
    source = Segment.create(4096).tensor((4096,), torch.uint8)
    with SharedCache.allocate(GRANULE, "cuda") as cache:
        link = _cuda.CudaLink(cache.tensor((1,), torch.uint8), cache.device)
        link.register(source)
        for name in ("cuEventSynchronize", "cuEventRecord"):
            driver.fail[name] = RESULT.CUDA_ERROR_LAUNCH_FAILED
            with pytest.raises(SegmentError, match=f"{name} failed with CUDA_ERROR_LAUNCH_FAILED"):
                link.start([Copy(source, 0)])()
            assert not driver.events
        link.close()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a CUDA driver is installed")
def test_a_missing_driver_is_named() -> None:
    with pytest.raises(UnavailableError, match="driver"):
        SharedCache.allocate(GRANULE, "cuda")
