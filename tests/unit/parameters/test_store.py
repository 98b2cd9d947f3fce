"""One node: every access against a dictionary of rows, and everything wrong refused with nothing
written.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nodes import Server, Topology, Worker
from torchrelay.errors import ArgumentError, UnavailableError
from torchrelay.parameters import Embedding, KeyInit, UpdateRule, optim

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(0, Server(100, length=4))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_accesses_equal_a_dense_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    worker = Worker(0, Server(50, length=3, dtype=dtype))
    table = torch.zeros(50, 3, dtype=dtype)
    for _ in range(50):
        keys = torch.randint(0, 50, (17,), generator=generator)
        values = torch.randint(-8, 9, (17, 3), generator=generator).to(dtype)
        worker.push(keys, values)
        for key, value in zip(keys.tolist(), values, strict=True):
            table[key] += value
        keys = torch.randint(0, 50, (5,), generator=generator)
        worker.set(keys, values[:5].flatten())
        for key, value in zip(keys.tolist(), values[:5], strict=True):
            table[key] = value
        keys = torch.randint(0, 50, (23,), generator=generator)
        out = torch.full((23, 3), 77).to(dtype)
        worker.pull(keys, out)
        assert torch.equal(out, table[keys])


def test_half_types_round_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16):
        worker = Worker(0, Server(1000, length=8, dtype=dtype))
        expected = torch.zeros(1000, 8, dtype=dtype)
        for scale in (1e-8, 1e-4, 1.0, 300.0, 60000.0):
            values = (torch.randn(1000, 8, generator=generator) * scale).to(dtype)
            worker.push(torch.arange(1000), values)
            expected += values
        out = torch.empty(1000, 8, dtype=dtype)
        worker.pull(torch.arange(1000), out)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_numpy_and_torch_are_the_same(worker: Worker) -> None:
    keys = np.array([1, 2, 3, 4])
    values = np.ones((4, 4), dtype=np.float32)
    worker.push(keys, values)
    worker.push(torch.from_numpy(keys), torch.ones(16))
    out = np.empty(16, dtype=np.float32)
    worker.pull(keys, out)
    assert (out == 2).all()


@pytest.mark.parametrize("call", ["pull", "push", "set", "pull_if_local"])
def test_bfloat16_values_are_never_numpys(call: str) -> None:
    worker = Worker(0, Server(2, length=4, dtype=torch.bfloat16))
    for dtype in (np.float64, np.float32, np.float16, np.int16):
        with pytest.raises(ArgumentError, match=r"must be torch\.bfloat16"):
            getattr(worker, call)(np.array([1]), np.ones(4, dtype=dtype))
    out = torch.ones(2, 4, dtype=torch.bfloat16)
    worker.pull(torch.arange(2), out)
    assert not out.any()


def test_asynchronous_operations_return_a_handle(worker: Worker) -> None:
    keys, values = torch.tensor([1]), torch.ones(4)
    for handle in (
        worker.push(keys, values, True),
        worker.push(keys, values, async_op=True),
        worker.set(keys, values, async_op=True),
        worker.pull(keys, values, async_op=True),
    ):
        assert handle is not None
        handle.wait()
        assert handle.is_completed()
    worker.wait_all()
    with pytest.raises(ArgumentError, match="timestamp 5"):
        worker.wait_for(5)
    with pytest.raises(TypeError, match="nonsense"):
        worker.push(keys, values, nonsense=True)  # type: ignore[call-arg]


def test_servers_and_workers_are_context_managers() -> None:
    with Server(4) as server, Worker(0, server) as worker:
        worker.push(torch.tensor([1]), torch.ones(1))
    with pytest.raises(UnavailableError, match="is closed"):
        worker.barrier()
    with pytest.raises(UnavailableError, match="has left the table"):
        server.barrier()


def test_lengths_per_key() -> None:
    lengths = torch.tensor([1, 5, 2, 5, 1])
    worker = Worker(0, Server(lengths))
    assert [worker.get_key_size(key) for key in range(5)] == lengths.tolist()
    keys = torch.tensor([1, 0, 4, 3, 1])
    values = torch.arange(5 + 1 + 1 + 5 + 5, dtype=torch.float32)
    worker.push(keys, values)
    out = torch.empty(5 + 1)
    worker.pull(torch.tensor([1, 4]), out)
    assert out.tolist() == [12, 14, 16, 18, 20, 6]


def test_gradients_of_repeated_keys_are_summed_only_where_their_lengths_are_equal() -> None:
    worker = Worker(0, Server(torch.tensor([2, 1, 3, 2]), rule=optim.sgd(1.0)))
    keys = torch.tensor([0, 1, 2, 0])  # of two elements on average, as the first
    with pytest.raises(ArgumentError, match="keys of one length"):
        worker.push(keys, torch.ones(8))
    out = torch.empty(8)
    worker.pull(torch.arange(4), out)
    assert not out.any()
    worker.push(torch.tensor([3, 0, 3]), torch.arange(6.0))
    worker.pull(torch.arange(4), out)
    assert out.tolist() == [-2, -3, 0, 0, 0, 0, -4, -6]


WRONG: dict[str, tuple[Any, Any]] = {
    "keys of another dtype": (torch.tensor([1], dtype=torch.int32), torch.ones(4)),
    "keys of two dimensions": (torch.tensor([[1]]), torch.ones(4)),
    "a list": ([1], torch.ones(4)),
    "values of another dtype": (torch.tensor([1]), torch.ones(4, dtype=torch.float64)),
    "numpy values of another dtype": (np.array([1]), np.ones(4)),
    "too few values": (torch.tensor([1, 2]), torch.ones(7)),
    "too many values": (torch.tensor([1]), torch.ones(5)),
    "a negative key": (torch.tensor([1, -1]), torch.ones(8)),
    "a key beyond the last": (torch.tensor([1, 100]), torch.ones(8)),
    "a huge key": (torch.tensor([1, 2**62]), torch.ones(8)),
    "values with gaps": (torch.tensor([1]), torch.ones(8)[::2]),
    "keys with gaps": (torch.arange(4)[::2], torch.ones(8)),
    "numpy values with gaps": (np.array([1]), np.ones(8, dtype=np.float32)[::2]),
    "values elsewhere": (torch.tensor([1]), torch.ones(4, device="meta")),
    "sparse values": (torch.tensor([1]), torch.ones(1, 4).to_sparse()),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("call", ["pull", "push", "set", "pull_if_local"])
def test_wrong_arguments_write_nothing(worker: Worker, name: str, call: str) -> None:
    before = torch.rand(100, 4)
    worker.set(torch.arange(100), before)
    keys, values = WRONG[name]
    with pytest.raises(ArgumentError):
        getattr(worker, call)(keys, values)
    after = torch.empty(100, 4)
    worker.pull(torch.arange(100), after)
    assert torch.equal(after, before)


def test_errors_say_what_is_wrong(worker: Worker) -> None:
    with pytest.raises(ArgumentError, match=r"keys\[2\] = 100 is out of range.* 0 to 99"):
        worker.pull(torch.tensor([1, 2, 100, 500]), torch.empty(16))
    with pytest.raises(ArgumentError, match=r"2 keys are 8 elements, but the buffer holds 7"):
        worker.pull(torch.tensor([1, 2]), torch.empty(7))
    frozen = np.zeros(4, dtype=np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        worker.pull(np.array([1]), frozen)


def test_wrong_tables_and_workers() -> None:
    for keys in (
        -1,
        torch.tensor([1.5]),
        torch.tensor([0, 1]),
        torch.ones(2, 2, dtype=torch.int64),
        "many",
    ):
        with pytest.raises(ArgumentError):
            Server(keys)  # type: ignore[arg-type]
    for fields in ({"length": 0}, {"length": 1.5}, {"dtype": torch.int32}):
        with pytest.raises(ArgumentError):
            Server(10, **fields)
    for kind in (UpdateRule, KeyInit):
        with pytest.raises(ArgumentError, match="'magic': the choices are"):
            kind("magic")
    for number in (-1.0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match="weight_decay"):
            optim.sgd(0.1, weight_decay=number)
    with pytest.raises(ArgumentError, match=r"beta2 = 1.0: .* below 1"):
        optim.adam(betas=(0.9, 1.0))
    with pytest.raises(ArgumentError, match="floating-point"):
        Server(10, dtype=torch.int64, rule=UpdateRule("adam"))
    with pytest.raises(ArgumentError, match="techniques"):
        Topology(techniques="some")
    server = Server(10)
    first = Worker(0, server)
    with pytest.raises(ArgumentError, match="worker 0 of this node exists already"):
        Worker(0, server)
    with pytest.raises(ArgumentError, match="worker_id=1"):
        Worker(1, server)
    first.close()
    Worker(0, server).close()


def test_sizes_may_be_numpys() -> None:
    server = Server(np.int64(3), length=np.int32(2))
    assert (type(server.num_keys), server.num_keys, server.row_length()) == (int, 3, 2)
    with pytest.raises(ArgumentError, match="at least 0 and 1"):
        Server(np.int64(-1))
    module = Embedding(np.int64(3), np.int64(2))
    assert module(torch.arange(3)).shape == (3, 2)
    module.close()


def test_threads_push_at_once_and_nothing_is_lost() -> None:
    server = Server(20, length=16, topology=Topology(workers_per_node=4))

    def run(number: int) -> None:
        worker = Worker(number, server)
        generator = torch.Generator().manual_seed(number)
        for _ in range(200):
            worker.push(torch.randint(0, 20, (50,), generator=generator), torch.ones(50, 16))
        worker.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = torch.empty(20, 16)
    Worker(3, server).pull(torch.arange(20), out)
    assert out.sum() == 3 * 200 * 50 * 16
    assert torch.equal(out, out[:, :1].expand(20, 16))


def test_initial_values_depend_on_seed_and_key_alone() -> None:
    def rows(init: KeyInit, **fields: Any) -> torch.Tensor:
        worker = Worker(0, Server(1000, length=20, init=init, **fields))
        out = torch.empty(1000, 20, dtype=fields.get("dtype", torch.float32))
        worker.pull(torch.arange(1000), out)
        return out

    normal = rows(KeyInit("normal", 1.0, 2.0, seed=3))
    assert abs(normal.mean() - 1) < 0.05
    assert abs(normal.std() - 2) < 0.05
    assert torch.equal(normal, rows(KeyInit("normal", 1.0, 2.0, seed=3)))
    assert not torch.equal(normal, rows(KeyInit("normal", 1.0, 2.0, seed=4)))
    uniform = rows(KeyInit("uniform", -1.0, 1.0))
    assert uniform.min() >= -1
    assert uniform.max() < 1
    assert abs(uniform.mean()) < 0.05
    assert (rows(KeyInit("constant", 2.5)) == 2.5).all()
    assert (rows(KeyInit("constant", 2.0), dtype=torch.int64) == 2).all()


def test_keys_are_made_at_first_use_and_the_least_used_evicted() -> None:
    worker = Worker(0, Server(0, length=2, capacity=100, init=KeyInit("constant", 5.0)))
    keys = torch.tensor([-(2**62), -1, 0, 7, 2**62])
    out = torch.empty(5, 2)
    worker.pull(keys, out)
    assert (out == 5).all()
    worker.push(keys, torch.ones(5, 2))
    worker.pull(keys, out)
    assert (out == 6).all()
    for start in range(0, 5000, 50):  # many more keys than there is room for; the five stay in use
        worker.push(torch.arange(start, start + 50) + 1000, torch.ones(50, 2))
        worker.pull(keys, out)
        assert (out == 6).all()
    assert worker.server.statistics()["evictions"] >= 4000
    with pytest.raises(ArgumentError, match="reserved"):
        worker.pull(torch.tensor([-(2**63)]), torch.empty(2))
    assert len(worker.owned_keys()) <= 128


def test_an_evicted_key_starts_anew() -> None:
    worker = Worker(0, Server(0, length=1, capacity=4))
    worker.push(torch.tensor([1]), torch.ones(1))
    for start in range(2, 40, 2):
        worker.push(torch.tensor([start, start + 1]), torch.ones(2))
    out = torch.empty(1)
    worker.pull(torch.tensor([1]), out)
    assert out == 0
