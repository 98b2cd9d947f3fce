"""The arguments of AdaPM's classes, under its names and ours."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ranks import free_port
from torchrelay.compat import adapm
from torchrelay.errors import ArgumentError

KEYS = 4


@pytest.fixture(autouse=True)
def _setup() -> Iterator[None]:
    adapm.setup(KEYS, 1)
    yield
    adapm._Setup.topology = None


@pytest.mark.parametrize(
    "lengths",
    [
        torch.tensor([1.0, 2.9, 3.0, 4.0]),
        torch.tensor([1, 2, 3, 4], dtype=torch.float16),
        np.array([1.0, 2.9, 3.0, 4.0]),
        torch.tensor([1, 2, 3, 4], dtype=torch.int32),
    ],
    ids=["float32", "float16", "numpy", "int32"],
)
def test_lengths_are_cast_and_both_names_are_accepted(lengths: Any) -> None:
    server = adapm.Server(value_lengths=lengths)
    worker = adapm.Worker(0, server)
    assert [worker.get_key_size(key) for key in range(KEYS)] == [1, 2, 3, 4]
    assert worker.get_key_size(key_id=3) == worker.get_key_size(key=3) == 4
    with pytest.raises(TypeError, match="two names: key_id, key"):
        worker.get_key_size(key_id=3, key=3)
    worker.finalize()
    server.shutdown()


@pytest.mark.parametrize("wrong", [0.5, -1.0, float("nan"), float("inf")])
def test_lengths_that_make_no_sense_are_refused(wrong: float) -> None:
    for lengths in (torch.tensor([1.0, wrong, 1, 1]), np.array([1.0, wrong, 1, 1])):
        with pytest.raises(ArgumentError, match="at least 1 and finite"):
            adapm.Server(lengths)


def test_sizes_may_be_numpys() -> None:
    one: Any = np.int64(1)
    adapm.setup(KEYS * one, one)
    with adapm.Server(3 * one) as server:
        assert (server.num_keys, server.row_length()) == (KEYS, 3)


@pytest.mark.parametrize("shape", [(2, 4), (8,), (2, 2, 2), (1, 2, 1, 4)])
@pytest.mark.parametrize("make", [torch.ones, np.ones], ids=["torch", "numpy"])
def test_values_have_any_rank(shape: tuple[int, ...], make: Any) -> None:
    server = adapm.Server(lengths=4)  # type: ignore[call-arg]  # the original's name
    worker = adapm.Worker(0, server)
    keys = torch.tensor([1, 2])
    ones = make(shape, dtype=torch.float32 if make is torch.ones else np.float32)
    pulled = ones * 0
    worker.wait(worker.intent(keys=keys, start=0))
    worker.set(keys=keys, vals=ones)
    worker.push(keys, values=ones)
    worker.wait_replica_sync()
    worker.wait(worker.pull(keys=keys, vals=pulled, **{"async": True}))
    assert pulled.shape == shape and (pulled == 2).all()
    assert worker.pull_if_local(keys, vals=pulled)
    worker.finalize()
    server.shutdown()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_scheduler_ends_with_the_last_server_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DMLC_NUM_SERVER", "1")
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", str(free_port()))
    scheduler = threading.Thread(target=adapm.scheduler, args=(KEYS, 1), daemon=True)
    scheduler.start()
    adapm.setup(KEYS, 1)
    adapm.Server(2)  # dropped: it does not count
    gc.collect()
    first, last = adapm.Server(2), adapm.Server(2)
    store = first.topology.ranks.store
    assert store is not None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            first.shutdown()
            last.abort()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    first.shutdown()
    assert store.add(adapm._SHUT_DOWN, 0) == 0 and not store.check([adapm._LOST])
    last.shutdown()
    scheduler.join(60)
    assert not scheduler.is_alive()
