"""The switcher's CUDA path: daemon and workers over a driver that checks every call, without
CUDA.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import switching_models as models
from torchrelay.errors import ArgumentError, ModelError, SegmentError
from torchrelay.switching import ModelStore, Switcher
from torchrelay.switching.worker import _fork_server

driver_module = pytest.importorskip("cuda.bindings.driver", reason="needs the [cuda] extra")
FOLDER = Path(__file__).parents[2] / "unit" / "switching" / "device"
spec = importlib.util.spec_from_file_location("fake_driver", FOLDER / "fake_driver.py")
assert spec is not None and spec.loader is not None
fake_driver = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = fake_driver
spec.loader.exec_module(fake_driver)

# The first test of the file starts three processes that import torch: minutes where many others
# run.
pytestmark = pytest.mark.timeout(400)

WAIT_S = 300.0
ARENA_BYTES = 28 << 20  # 14 parts: of two models, each layer has one of its own
NAMES = ("chain0", "chain1", "chain2")
WIDTH, DEPTH = 200, 6


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake = fake_driver.FakeDriver()
    fake_driver.install(fake, monkeypatch.setattr)
    program = [sys.executable, str(FOLDER / "fake_cuda_worker.py")]
    monkeypatch.setattr(_fork_server, "PROGRAM", program)
    yield fake
    gc.collect()
    fake.assert_nothing_left()


@pytest.fixture
def store() -> Iterator[ModelStore]:
    with ModelStore() as made:
        for seed, name in enumerate(NAMES):
            kwargs = {"width": WIDTH, "depth": DEPTH}
            inputs = {"x": (torch.float32, (-1, WIDTH))}
            made.add(name, models.chain, kwargs=kwargs, inputs=inputs, seed=seed)
        yield made


def eager(name: str) -> torch.nn.Module:
    torch.manual_seed(NAMES.index(name))
    module: torch.nn.Module = models.chain(width=WIDTH, depth=DEPTH).eval()
    return module


def test_switching_on_cuda_copies_from_pinned_memory_and_waits_by_event(
    driver: Any, store: ModelStore
) -> None:
    with Switcher(
        store,
        arena_bytes=ARENA_BYTES,
        device="cuda",
        threads=1,
        grouping="layer",
        request_bytes=1 << 20,
        start_timeout_s=WAIT_S,
    ) as switcher:
        for name in NAMES:
            switcher.load(name)
        assert switcher.status()["device"] == "cuda:0" and len(driver.pinned) == len(NAMES)
        check_outputs(switcher, 60)
        log = driver.log
        assert log.count("cuEventCreate") == log.count("cuEventRecord") > len(NAMES) * DEPTH
        assert log.count("cuEventSynchronize") == log.count("cuEventDestroy")
        assert not driver.events
        check_reloads(switcher, driver)
        check_failed_copies(switcher, driver)
        switcher.unload("chain0")
        switcher.infer("chain1", {"x": torch.ones(1, WIDTH)})  # the daemon has had a turn
        assert len(driver.pinned) == 2
    assert log.index("cuMemCreate") < log.index("cuMemExportToShareableHandle")
    assert log.count("cuMemHostRegister") == log.count("cuMemHostUnregister")


def check_outputs(switcher: Switcher, count: int) -> None:
    """Random switches give the bits of unswitched models, some after copies and some without."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    draw = random.Random(1)
    references = {name: eager(name) for name in NAMES}
    copied = []
    for _ in range(count):
        name = draw.choice(NAMES)
        x = torch.randn(draw.randint(1, 4), WIDTH)
        reply = switcher.submit(name, {"x": x}).result(WAIT_S)
        with torch.inference_mode():
            assert torch.equal(reply.outputs["output"], references[name](x))
        copied.append(reply.copied_bytes)
    torch.set_num_threads(threads)
    assert min(copied) == 0 < max(copied)


def check_reloads(switcher: Switcher, driver: Any) -> None:
    """A model that is loaded twice is pinned once, and a loaded model stays pinned."""
    for _ in range(2):
        switcher.load("chain0")
    switcher.infer("chain0", {"x": torch.ones(1, WIDTH)})
    assert len(driver.pinned) == len(NAMES)


def call_all(switcher: Switcher) -> None:
    for name in NAMES:
        switcher.infer(name, {"x": torch.ones(1, WIDTH)})


def check_failed_copies(switcher: Switcher, driver: Any) -> None:
    """An error of the driver while copying fails that request with its name, and no other."""
    for call in ("cuMemcpyHtoDAsync", "cuEventCreate", "cuEventRecord", "cuEventSynchronize"):
        call_all(switcher)  # leaves at least one of them out of the arena
        driver.fail[call] = driver_module.CUresult.CUDA_ERROR_LAUNCH_FAILED
        with pytest.raises(SegmentError, match=f"{call} failed with CUDA_ERROR_LAUNCH_FAILED"):
            call_all(switcher)
        check_outputs(switcher, 6)


def test_a_worker_whose_device_is_broken_is_replaced(driver: Any, store: ModelStore) -> None:
    inputs = {"x": (torch.float32, (1, 4)), "what": (torch.int64, ())}
    store.add("faulty", models.faulty, inputs=inputs)
    options: dict[str, Any] = {"threads": 1, "workers": 1, "start_timeout_s": WAIT_S}
    with Switcher(store, arena_bytes=ARENA_BYTES, device="cuda", **options) as switcher:
        switcher.load("faulty", timeout_s=WAIT_S)
        x = torch.ones(1, 4)
        for what, message in ((1, "asked to fail"), (6, "illegal memory access")):
            with pytest.raises(ModelError, match=message):
                switcher.infer("faulty", {"x": x, "what": torch.tensor(what)})
            fine = switcher.infer("faulty", {"x": x, "what": torch.tensor(0)})
            assert fine["output"].shape == (1, 4)
        assert switcher.status()["worker_deaths"] == 1


def test_an_emulated_link_on_cuda_is_refused_and_nothing_is_left(
    driver: Any, store: ModelStore
) -> None:
    with pytest.raises(ArgumentError, match="emulates a link on the CPU"):
        Switcher(store, arena_bytes=ARENA_BYTES, device="cuda", link_gbps=6.0)
    with pytest.raises(SegmentError, match="OUT_OF_MEMORY"):
        Switcher(store, arena_bytes=1 << 40, device="cuda")
