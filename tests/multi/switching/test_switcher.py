"""The switcher over real worker processes: outputs, order, limits, training."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, as_completed, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import switching_models as models
from torchrelay.errors import (
    ArgumentError,
    CapacityError,
    ModelError,
    NotFoundError,
    OperationTimeoutError,
    OverloadedError,
    PeerLostError,
    StorageError,
    UnavailableError,
)
from torchrelay.switching import ModelStore, Reply, Switcher
from torchrelay.switching.daemon import _reports
from torchrelay.switching.device._contract import align
from torchrelay.switching.worker import _request_buffer
from waiting import eventually

# The first test of the file starts three processes that import torch: minutes where many others
# run.
pytestmark = pytest.mark.timeout(400)

WAIT_S = 300.0


X = (torch.float32, (-1, 64))
NAMES = [f"chain{i}" for i in range(4)] + [f"mixed{i}" for i in range(2)]


def eager(name: str) -> torch.nn.Module:
    torch.manual_seed(int(name[-1]))
    made = models.chain(depth=12) if name.startswith("chain") else models.mixed(width=64)
    module: torch.nn.Module = made.eval()
    return module


def add(store: ModelStore, name: str) -> None:
    seed = int(name[-1])
    if name.startswith("chain"):
        store.add(
            name, models.chain, kwargs={"depth": 12}, inputs={"x": X}, seed=seed, replace=True
        )
    else:
        inputs = {"tokens": (torch.int64, (-1, -1))}
        store.add(name, models.mixed, kwargs={"width": 64}, inputs=inputs, seed=seed, replace=True)


@pytest.fixture(scope="module")
def store() -> Iterator[ModelStore]:
    with ModelStore() as made:
        for name in NAMES:
            add(made, name)
        made.add(
            "slow",
            models.slow,
            inputs={"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())},
        )
        inputs = {"x": (torch.float32, (1, 4)), "what": (torch.int64, ())}
        made.add("faulty", models.faulty, inputs=inputs)
        made.add("large", models.chain, kwargs={"depth": 80}, inputs={"x": X})
        yield made


@pytest.fixture(scope="module")
def switcher(store: ModelStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switcher]:
    layouts = [store.get(name).layout for name in NAMES]
    # In pages, of which a group has its own.
    largest = max(sum(align(size_bytes, 4096) for size_bytes in one.storages) for one in layouts)
    with Switcher(
        store,
        arena_bytes=2 * largest,  # two of the six models
        threads=1,
        request_bytes=1 << 20,
        queue_limit=8,
        run_timeout_s=WAIT_S,
        start_timeout_s=WAIT_S,
        grouping="layer",  # whether "best" splits these small models depends on measured times
        profile_folder=str(tmp_path_factory.mktemp("profiles")),
    ) as made:
        for name in [*NAMES, "slow", "faulty"]:
            made.load(name)
        yield made


def inputs_of(name: str, draw: random.Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    if name.startswith("chain"):
        return {"x": torch.randn(draw.randint(1, 4), 64, generator=generator)}
    return {"tokens": torch.randint(50, (draw.randint(1, 3), 7), generator=generator)}


def slow_inputs(seconds: float) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(1, 8), "seconds": torch.tensor(seconds)}


def test_outputs_over_a_thousand_random_switches_have_the_bits_of_unswitched_models(
    switcher: Switcher,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    try:
        references = {name: eager(name) for name in NAMES}
        draw = random.Random(0)
        kinds = {"cold": 0, "resident": 0}
        pending: deque[tuple[str, dict[str, torch.Tensor], Any]] = deque()
        for count in range(1000):
            name = draw.choice(NAMES)
            given = inputs_of(name, draw)
            pending.append((name, given, switcher.submit(name, given)))
            # Several in the queue, so that prefetch has something to do; at the end none.
            while len(pending) > (draw.randint(0, 3) if count < 999 else 0):
                name, given, future = pending.popleft()
                reply = future.result(WAIT_S)
                with torch.inference_mode():
                    expected = references[name](**given)
                expected = expected if isinstance(expected, dict) else {"output": expected}
                assert expected.keys() == reply.outputs.keys()
                assert all(
                    torch.equal(value, reply.outputs[key]) for key, value in expected.items()
                )
                kinds["cold" if reply.copied_bytes else "resident"] += 1
    finally:
        torch.set_num_threads(before)
    status = switcher.status()
    assert sum(kinds.values()) == 1000
    assert kinds["cold"] > 100 and kinds["resident"] > 100 and status["counts"]["prefetches"] > 10
    assert not any(model["pinned"] for model in status["models"])


def test_models_are_split_into_groups_and_used_in_another_order_than_registered(
    switcher: Switcher,
) -> None:
    groups = {model["name"]: model["groups"] for model in switcher.status()["models"]}
    assert groups["chain0"] > 1


def test_the_status_has_when_each_group_was_copied_and_computed(switcher: Switcher) -> None:
    inputs = {"x": torch.ones(1, 64)}
    for name in ("chain1", "chain2", "chain3", "chain0", "chain0"):  # two fit
        switcher.infer(name, inputs)
    resident, cold = switcher.status()["switches"][:2]
    assert resident["groups"] == [] and len(cold["groups"]) > 1
    assert sum(one["bytes"] for one in cold["groups"]) >= cold["copied_bytes"] > 0
    last = 0.0
    for one in cold["groups"]:
        assert 0 <= one["arrived_ms"] <= one["computes_ms"]
        assert last <= one["needed_ms"] <= one["computes_ms"]
        last = one["computes_ms"]
    assert last <= cold["total_ms"]
    assert cold["switch_ms"] + cold["compute_ms"] <= cold["total_ms"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_wrong_inputs_and_names_are_refused_and_the_next_request_is_served(
    switcher: Switcher,
) -> None:
    ones = torch.ones(1, 64)
    with pytest.raises(ArgumentError, match="from -1000 to 1000"):
        switcher.infer("chain0", {"x": ones}, priority=1001)
    with pytest.raises(NotFoundError, match="no model 'nothing'; loaded are chain0"):
        switcher.infer("nothing", {"x": ones})
    with pytest.raises(NotFoundError, match=r"'large' is not loaded: call load\('large'\)"):
        switcher.infer("large", {"x": ones})
    with pytest.raises(ArgumentError, match=r"a Tensor; pass a dict of tensors by name"):
        switcher.infer("chain0", ones)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"'x' is a ndarray, not a tensor; pass torch\.as_"):
        switcher.submit("chain0", {"x": ones.numpy()})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="takes the inputs x; got y"):
        switcher.infer("chain0", {"y": ones})
    with pytest.raises(ArgumentError, match=r"model .* takes torch"):
        switcher.infer("chain0", {"x": torch.ones(1, 63)})
    for absent in (ones.to_sparse_csr(), ones.to("meta")):
        with pytest.raises(ArgumentError, match="'x', a Tensor of layout"):
            switcher.infer("chain0", {"x": absent})
    with pytest.raises(ArgumentError, match="has no memory of its own"):
        torch.vmap(lambda x: switcher.infer("chain0", {"x": x})["output"])(ones.expand(2, 1, 64))
    with pytest.raises(ArgumentError, match="deadline_s=nan"):
        switcher.submit("chain0", {"x": ones}, deadline_s=math.nan)
    with pytest.raises(CapacityError, match="a request at most"):
        switcher.infer("chain0", {"x": torch.ones(1 << 14, 64)})
    with pytest.raises(CapacityError, match="larger arena"):
        switcher.load("large")
    with pytest.raises(NotFoundError, match="no model 'nothing'"):
        switcher.load("nothing")
    with pytest.raises(NotFoundError, match="to unload"):
        switcher.unload("nothing")
    assert switcher.infer("chain0", {"x": ones})["output"].shape == (1, 64)


def test_what_takes_long_says_what_it_does(
    switcher: Switcher,
    store: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_reports, "REPORT_S", 0.001)
    store.add("late", models.chain, inputs={"x": X}, replace=True)
    with caplog.at_level("INFO", "torchrelay.switching"):
        switcher.load("late", timeout_s=WAIT_S)
    assert "loading model 'late': " in caplog.text
    switcher.unload("late")
    store.remove("late")
    task: Future[int] = Future()
    with caplog.at_level("INFO", "torchrelay.switching"), pytest.raises(TimeoutError):
        _reports.wait_reporting(task, 0.01, lambda: "training task 't': at step 3 of 7")
    assert "training task 't': at step 3 of 7, after 0 s" in caplog.text


def test_inputs_are_checked_against_the_model_that_they_reach(
    switcher: Switcher, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CapacityError, match="a request at most"):
        switcher.infer("nothing", {"x": torch.ones(1 << 14, 64)})
    made = switcher._request

    def late(*args: Any, **kwargs: Any) -> Any:
        request = made(*args, **kwargs)
        store.add("late", models.chain, inputs={"x": X}, replace=True)
        switcher.load("late", timeout_s=WAIT_S)
        return request

    monkeypatch.setattr(switcher, "_request", late)
    with pytest.raises(ArgumentError, match=r"model .* takes torch"):
        switcher.infer("late", {"x": torch.ones(1, 63)})
    with pytest.raises(ArgumentError, match="takes the inputs x; got y"):
        switcher.submit("late", {"y": torch.ones(1, 64)})
    switcher.unload("late")
    store.remove("late")


def test_a_model_is_profiled_with_its_example(switcher: Switcher, store: ModelStore) -> None:
    guessed = (torch.float32, (-1, -1))
    store.add("folded", models.folded, inputs={"x": guessed})
    with pytest.raises(ModelError, match=r"x of shape \(1, 1\).*example = \[\.\.\.\] beside shape"):
        switcher.load("folded", timeout_s=WAIT_S)
    store.add("folded", models.folded, inputs={"x": (*guessed, (1 << 20, 8))}, replace=True)
    with pytest.raises(CapacityError, match="the example inputs of model 'folded' take"):
        switcher.load("folded", timeout_s=WAIT_S)
    store.add("folded", models.folded, inputs={"x": (*guessed, (2, 24))}, replace=True)
    switcher.load("folded", timeout_s=WAIT_S)
    assert switcher.infer("folded", {"x": torch.ones(1, 16)})["output"].shape == (1, 2, 8)
    switcher.unload("folded")
    store.remove("folded")


def test_a_model_that_fails_gets_its_own_error_and_harms_nobody(switcher: Switcher) -> None:
    def call(what: int) -> dict[str, torch.Tensor]:
        return switcher.infer("faulty", {"x": torch.ones(1, 4), "what": torch.tensor(what)})

    deaths = switcher.status()["worker_deaths"]
    with pytest.raises(ModelError, match="ValueError: asked to fail"):
        call(1)
    with pytest.raises(CapacityError, match="larger request_bytes"):
        call(4)
    with pytest.raises(ModelError, match="returned str without a tensor"):
        call(5)
    with pytest.raises(ModelError, match=r"UnreadableError: \(its message cannot be read"):
        call(11)
    with pytest.raises(PeerLostError, match=r"^of the model's own$"):
        call(12)
    assert call(0)["output"].shape == (1, 4)
    assert switcher.status()["worker_deaths"] == deaths


def computing(switcher: Switcher) -> list[int]:
    return [one["pid"] for one in switcher.status()["workers"] if one["state"] == "running"]


@contextmanager
def stopped_worker(switcher: Switcher) -> Iterator[None]:
    """A request that computes until the end of the block: its worker is stopped."""
    running = switcher.submit("slow", slow_inputs(4.0))
    eventually(lambda: bool(computing(switcher)))
    (pid,) = computing(switcher)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
        assert not running.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    running.result(WAIT_S)


def test_inputs_may_change_once_submit_has_returned(switcher: Switcher) -> None:
    x = torch.ones(1, 64)
    expected = switcher.infer("chain0", {"x": x})["output"]
    with stopped_worker(switcher):
        future = switcher.submit("chain0", {"x": x})
        x.zero_()
    assert torch.equal(future.result(WAIT_S).outputs["output"], expected)


def test_inputs_that_cannot_be_read_are_an_error_and_the_next_request_is_served(
    switcher: Switcher,
) -> None:
    x = torch.ones(1, 64)
    with stopped_worker(switcher):
        spoiled = switcher.submit("chain0", {"x": x}, copy=False)
        waiting = switcher.submit("chain1", {"x": torch.ones(1, 64)})
        x.resize_(1 << 14, 64)  # more than a request may have
    with pytest.raises(ArgumentError, match="inputs of model 'chain0' could not be read"):
        spoiled.result(WAIT_S)
    assert waiting.result(WAIT_S).outputs["output"].shape == (1, 64)
    assert not any(model["pinned"] for model in switcher.status()["models"])


def test_outputs_are_on_the_host_whatever_the_default_device_is(switcher: Switcher) -> None:
    x = torch.ones(1, 64)
    expected = switcher.infer("chain0", {"x": x})["output"]
    with torch.device("meta"):
        output = switcher.infer("chain0", {"x": x})["output"]
    assert torch.equal(output, expected)


def test_calls_that_would_wait_for_their_own_thread_are_refused(switcher: Switcher) -> None:
    ones = {"x": torch.ones(1, 64)}
    refusals: list[str] = []

    async def guest() -> Reply:
        calls = (lambda: switcher.infer("chain0", ones), lambda: switcher.load("chain0"))
        for call in (*calls, switcher.close):
            try:
                call()
            except UnavailableError as error:
                refusals.append(str(error))
        assert switcher.status()["models"] and switcher.is_ready("chain0")
        return await switcher.submit("chain0", ones)

    assert switcher.run(guest()).result(WAIT_S).outputs["output"].shape == (1, 64)
    assert len(refusals) == 3 and all("await submit()" in one for one in refusals)


def test_a_callback_may_wait_for_other_requests(switcher: Switcher) -> None:
    ones = {"x": torch.ones(1, 64)}
    shapes: list[torch.Size] = []

    def call_all(future: Future[Reply]) -> None:
        shapes.append(future.result().outputs["output"].shape)
        switcher.load("chain1", timeout_s=WAIT_S)
        shapes.append(switcher.infer("chain1", ones)["output"].shape)
        shapes.append(switcher.submit("chain0", ones).result(WAIT_S).outputs["output"].shape)
        assert switcher.status()["models"]

    with stopped_worker(switcher):
        future = switcher.submit("chain0", ones)
        future.add_done_callback(call_all)
    eventually(lambda: len(shapes) == 3)
    future.add_done_callback(call_all)  # it is done: here
    assert shapes == [(1, 64)] * 6


def test_a_callback_may_close_the_switcher(store: ModelStore) -> None:
    switcher = Switcher(store, arena_bytes=1 << 20, threads=1, workers=1, start_timeout_s=WAIT_S)
    switcher.load("chain0", timeout_s=WAIT_S)
    (pid,) = [worker["pid"] for worker in switcher.status()["workers"]]
    switcher.submit("chain0", {"x": torch.ones(1, 64)}).add_done_callback(
        lambda _: switcher.close()
    )
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(UnavailableError, match="closed"):
        switcher.status()


def test_a_coroutine_of_any_event_loop_awaits_requests(switcher: Switcher) -> None:
    async def ask() -> None:
        ones = {"x": torch.ones(1, 64)}
        replies = await asyncio.gather(*[switcher.submit(name, ones) for name in NAMES[:3]])
        assert [reply.model for reply in replies] == NAMES[:3]
        with stopped_worker(switcher):
            waiting = switcher.submit("chain0", ones)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waiting, 0.01)
            assert waiting.cancelled()

    asyncio.run(ask())


def test_a_signal_handler_may_wait_for_other_requests(switcher: Switcher) -> None:
    """In the middle of `infer`, which goes on after it."""
    shapes: list[torch.Size] = []

    def handle(*_: object) -> None:
        shapes.append(switcher.infer("chain0", {"x": torch.ones(1, 64)})["output"].shape)

    def interrupt() -> None:
        eventually(lambda: bool(computing(switcher)))
        signal.pthread_kill(main, signal.SIGUSR1)

    main, before = threading.get_ident(), signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert switcher.infer("slow", slow_inputs(1.0))["output"].shape == (1, 8)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert shapes == [(1, 64)]


def test_ctrl_c_takes_a_request_off_the_queue(switcher: Switcher) -> None:
    def interrupt() -> None:
        eventually(lambda: bool(switcher.status()["queue"]))
        signal.pthread_kill(main, signal.SIGUSR1)

    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    main, before = threading.get_ident(), signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    try:
        with stopped_worker(switcher):
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                switcher.infer("chain0", {"x": torch.ones(1, 64)})
            assert not switcher.status()["queue"]
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_fake_tensor_mode_in_one_thread_harms_nobody(switcher: Switcher, store: ModelStore) -> None:
    ones = {"x": torch.ones(1, 64)}
    for name in ("chain0", "chain1"):
        switcher.infer(name, ones)
    with FakeTensorMode():
        for call in (switcher.infer, switcher.submit):
            with pytest.raises(ArgumentError, match="outside of FakeTensorMode"):
                call("chain2", ones)
        with pytest.raises(ArgumentError, match="outside of FakeTensorMode"):
            switcher.load("chain2")
        switcher.unload("chain2")
        assert switcher.status()["models"]
    switcher.load("chain2", timeout_s=WAIT_S)
    with stopped_worker(switcher):
        waiting, cancelled = (switcher.submit("chain2", ones) for _ in range(2))
        with FakeTensorMode():
            cancelled.cancel()
    assert waiting.result(WAIT_S).outputs["output"].shape == (1, 64)


def test_waits_for_several_futures_end_when_one_is_cancelled(switcher: Switcher) -> None:
    ones = {"x": torch.ones(1, 64)}
    with stopped_worker(switcher):
        first, second = (switcher.submit("chain0", ones) for _ in range(2))
        assert first.cancel() and first.cancel()
        assert next(as_completed([first, second], 60)) is first
    assert wait([first, second], WAIT_S).not_done == set()


def test_priority_deadline_limit_and_cancelling(switcher: Switcher) -> None:
    with stopped_worker(switcher):
        done: list[str] = []
        ones = {"x": torch.ones(1, 64)}
        low = switcher.submit("chain0", ones)
        low.add_done_callback(lambda _: done.append("low"))
        high = switcher.submit("chain1", ones, priority=5)
        high.add_done_callback(lambda _: done.append("high"))
        late = switcher.submit("chain2", ones, deadline_s=0.01)
        cancelled = switcher.submit("chain3", ones)
        assert cancelled.cancel()
        with pytest.raises(OperationTimeoutError, match="missed its deadline"):
            late.result(WAIT_S)
        mine = [switcher.submit("chain0", ones) for _ in range(4)]
        assert mine[0].cancel()  # as for a client that has gone: its place is free at once
        many = [switcher.submit("chain0", ones) for _ in range(8)]
        with pytest.raises(OverloadedError, match="requests are waiting, the limit"):
            many[-1].result(WAIT_S)
    for future in (low, high, *mine[1:]):
        future.result(WAIT_S)
    eventually(lambda: len(done) == 2)
    assert done == ["high", "low"]
    for future in many:
        if future.exception(WAIT_S) is not None:
            assert isinstance(future.exception(), OverloadedError)


def test_loading_again_serves_the_new_version_and_unloading_frees_the_arena(
    switcher: Switcher, store: ModelStore
) -> None:
    ones = {"x": torch.ones(1, 64)}
    old = switcher.infer("chain3", ones)["output"]
    store.add("chain3", models.chain, kwargs={"depth": 12}, inputs={"x": X}, seed=77, replace=True)
    switcher.load("chain3", timeout_s=WAIT_S)
    reply = switcher.submit("chain3", ones).result(WAIT_S)
    assert reply.version == 2 and not torch.equal(reply.outputs["output"], old)
    switcher.unload("chain3")
    with pytest.raises(NotFoundError):
        switcher.infer("chain3", ones)
    eventually(lambda: all(block["model"] != "chain3" for block in switcher.status()["blocks"]))
    add(store, "chain3")
    switcher.load("chain3", timeout_s=WAIT_S)
    assert torch.equal(switcher.infer("chain3", ones)["output"], old)


def test_a_pinned_model_stays_while_others_take_turns(
    switcher: Switcher, store: ModelStore
) -> None:
    computing = switcher.submit("slow", slow_inputs(0.2))
    switcher.load("chain0", pinned=True, timeout_s=WAIT_S)  # whose place the other may be in
    try:
        eventually(lambda: switcher.status()["blocks"][0]["model"] == "chain0")
        for name in NAMES[:4] * 2:
            inputs = inputs_of(name, random.Random(0))
            with torch.inference_mode():
                expected = eager(name)(**inputs)
            torch.testing.assert_close(switcher.infer(name, inputs)["output"], expected)
            assert switcher.is_resident("chain0")
        assert computing.done()
        with pytest.raises(CapacityError, match=r"'chain1', pinned, leaves .*; model '.*' takes"):
            switcher.load("chain1", pinned=True)
        with pytest.raises(CapacityError, match="beside pinned models; start with larger"):
            switcher.load("large")
    finally:
        switcher.load("chain0", timeout_s=WAIT_S)
    for name in ("chain2", "chain3"):
        switcher.infer(name, {"x": torch.ones(1, 64)})
    assert not switcher.is_resident("chain0")


def test_requests_leave_no_memory_behind(switcher: Switcher) -> None:
    """What is not given back grows in every round; imports and workers that start grow in one."""

    def anonymous_bytes() -> dict[int, int]:
        pids = [os.getpid(), *(worker["pid"] for worker in switcher.status()["workers"])]
        texts = {pid: Path(f"/proc/{pid}/status").read_text() for pid in pids}
        return {pid: int(text.split("RssAnon:")[1].split()[0]) << 10 for pid, text in texts.items()}

    x = {"x": torch.ones(1000, 64)}
    travels = 2 * x["x"].nbytes  # the input and the output

    def grown_by(count: int) -> dict[int, int]:
        before = anonymous_bytes()
        for turn in range(count):  # a cold one every so often
            switcher.infer(f"chain{turn // 10 % 4}", x)
        return {pid: now - before[pid] for pid, now in anonymous_bytes().items() if pid in before}

    grown_by(60)  # allocators and caches fill
    rounds = []
    for _ in range(4):
        rounds.append(grown_by(300))
        if max(rounds[-1].values()) < 60 * travels:
            return
    pytest.fail(f"more than a fifth of what has passed stays in every round: {rounds}")


def test_replies_that_are_kept_stay_as_they_were(switcher: Switcher) -> None:
    """Large outputs lie in memory shared with the worker, which later requests must not touch."""
    rows = [torch.full((1300 + turn, 64), float(turn)) for turn in range(12)]
    kept = [switcher.infer("chain0", {"x": x})["output"] for x in rows]
    copies = [output.clone() for output in kept]
    assert all(output.nbytes > _request_buffer._LEND_BYTES for output in kept)
    for name in NAMES[:4]:
        for x in rows:
            switcher.infer(name, {"x": x})
    for x, output, copy in zip(rows, kept, copies, strict=True):
        assert torch.equal(output, copy)
        assert torch.equal(output, switcher.infer("chain0", {"x": x})["output"])


def test_compiled_and_autocast_models_keep_their_bits_over_switches(
    switcher: Switcher, store: ModelStore
) -> None:
    names = ("autocast", "compiled")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    references: dict[str, torch.nn.Module] = {}
    for name in names:
        store.add(name, getattr(models, name), inputs={"x": X})
        switcher.load(name, timeout_s=WAIT_S)
        torch.manual_seed(0)
        references[name] = getattr(models, name)().eval()
    for turn in range(6):
        name, x = names[turn % 2], torch.randn(2, 64)
        switcher.infer("chain0", {"x": x})
        switcher.infer("mixed0", {"tokens": torch.ones(1, 3, dtype=torch.int64)})
        with torch.inference_mode():
            expected = references[name](x)
        assert torch.equal(switcher.infer(name, {"x": x})["output"], expected)
    torch.set_num_threads(threads)
    for name in names:
        switcher.unload(name)
        store.remove(name)


def test_a_forked_process_is_refused_and_leaves_the_switcher_alone(switcher: Switcher) -> None:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        child = os.fork()
    if not child:
        try:
            switcher.infer("chain0", {"x": torch.ones(1, 64)})
        except UnavailableError as error:
            os.write(writer, str(error).encode())
        switcher.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert b"this one was forked" in pipe.read()
    assert switcher.infer("chain0", {"x": torch.ones(1, 64)})["output"].shape == (1, 64)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.timeout(600)
def test_training_preempted_fifty_times_ends_with_the_bits_of_an_uninterrupted_run(
    switcher: Switcher, tmp_path: Path
) -> None:
    # The task keeps its pace until it was preempted fifty times, and then runs without pauses.
    steps, pacing = 1500, tmp_path / "pacing"
    pacing.touch()
    uninterrupted = switcher.train("alone", models.Training, steps=steps, seed=5).result(WAIT_S)
    kwargs = {"pace_s": 0.05, "while_exists": str(pacing)}
    handle = switcher.train("shared", models.Training, kwargs=kwargs, steps=steps, seed=5)
    ones = {"x": torch.ones(1, 64)}
    for count in range(50):
        eventually(lambda: bool(switcher.status()["training"]))
        switcher.infer("chain0", ones)
        eventually(lambda count=count: handle.preemptions > count)  # type: ignore[misc]
    assert not handle.done and handle.step < steps
    pacing.unlink()
    assert same(handle.result(WAIT_S), uninterrupted)
    assert handle.preemptions >= 50
    with pytest.raises(ModelError, match="step 2 of broken failed: ValueError: no more data"):
        switcher.train("broken", models.BrokenTraining, steps=5).result(WAIT_S)
    with pytest.raises(ArgumentError, match="without step"):
        switcher.train("wrong", models.chain, steps=5).result(WAIT_S)


def test_a_state_that_cannot_be_read_back_is_found_after_the_first_step(
    switcher: Switcher, tmp_path: Path
) -> None:
    kwargs = {"keeps": "numpy"}
    done = switcher.train("numpy", models.Training, kwargs=kwargs, steps=6, seed=5, save_every=2)
    assert done.result(WAIT_S)["best"]["all"].tolist() == [0, 1, 2]
    refused = switcher.train("object", models.Training, kwargs={"keeps": "object"}, steps=1000)
    with pytest.raises(ModelError, match=r"state of object after step 1 cannot be saved and read"):
        refused.result(WAIT_S)
    assert refused.state() is None
    with pytest.raises(NotFoundError, match="has saved no state yet: pass save_every"):
        refused.save(tmp_path / "state.pt")


def test_after_a_late_error_the_last_state_is_to_be_had_and_a_file_goes_on(
    switcher: Switcher, tmp_path: Path
) -> None:
    failed = switcher.train("broken", models.BrokenTraining, steps=5, save_every=1)
    with pytest.raises(ModelError, match="step 2 of broken failed"):
        failed.result(WAIT_S)
    assert failed.step == 2 and failed.state() is not None
    half = switcher.train("half", models.Training, steps=3, seed=5)
    half.result(WAIT_S)
    half.save(tmp_path / "state.pt")
    resumed = switcher.train("on", models.Training, steps=6, seed=5, resume=tmp_path / "state.pt")
    whole = switcher.train("whole", models.Training, steps=6, seed=5)
    assert same(resumed.result(WAIT_S), whole.result(WAIT_S))
    (tmp_path / "damaged.pt").write_bytes((tmp_path / "state.pt").read_bytes()[:1000])
    torch.save({"task": {}, "random": {}, "step": "last"}, tmp_path / "other.pt")
    for name in ("damaged.pt", "missing.pt", "other.pt"):
        with pytest.raises(StorageError, match="is no state of"):
            switcher.train("wrong", models.Training, steps=6, resume=tmp_path / name)


def test_training_goes_on_if_requests_come_faster_than_its_factory_builds(
    switcher: Switcher,
) -> None:
    # Long steps: a request preempts them also where this process is held up.
    handle = switcher.train("slow", models.slow_training, kwargs={"pace_s": 1.0}, steps=3)
    while not handle.done:
        switcher.infer("chain0", {"x": torch.ones(1, 64)})
        eventually(lambda: bool(switcher.status()["training"]) or handle.done)
    assert handle.step == 3 and handle.preemptions > 0


def test_a_worker_outlives_the_thread_that_noticed_the_loss_of_the_last(
    switcher: Switcher,
) -> None:
    inputs = {"x": torch.ones(1, 64)}
    before = switcher.status()
    for worker in before["workers"]:
        os.kill(worker["pid"], signal.SIGKILL)
    thread = threading.Thread(target=switcher.infer, args=["chain0", inputs])
    thread.start()
    thread.join()
    deaths = before["worker_deaths"] + len(before["workers"])
    eventually(lambda: switcher.status()["worker_deaths"] == deaths)
    switcher.infer("chain0", inputs)
    assert switcher.status()["worker_deaths"] == deaths


def test_closing_answers_what_is_queued_and_refuses_what_comes_later(store: ModelStore) -> None:
    switcher = Switcher(store, arena_bytes=1 << 20, threads=1, start_timeout_s=WAIT_S)
    switcher.load("slow", timeout_s=WAIT_S)
    queued = [switcher.submit("slow", slow_inputs(seconds)) for seconds in (1.0, 0.0, 0.0)]
    closing = threading.Thread(target=switcher.close, kwargs={"grace_s": WAIT_S})
    closing.start()
    eventually(lambda: switcher._daemon.is_draining)
    with pytest.raises(UnavailableError, match=r"shutting down|closed"):
        switcher.infer("slow", slow_inputs(0.0))
    for future in queued:
        assert future.result(WAIT_S).outputs["output"].shape == (1, 8)
    closing.join()


def test_closing_without_grace_ends_what_computes(store: ModelStore) -> None:
    switcher = Switcher(store, arena_bytes=1 << 20, threads=1, start_timeout_s=WAIT_S)
    switcher.load("slow", timeout_s=WAIT_S)
    computing, waiting = (switcher.submit("slow", slow_inputs(600.0)) for _ in range(2))
    switcher.close(grace_s=0.0)
    for future in (computing, waiting):
        with pytest.raises(UnavailableError, match="closed before it was done"):
            future.result(WAIT_S)


def test_nothing_is_left_and_a_closed_switcher_says_so(store: ModelStore) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier tests left in cycles must not be freed in between
    before = descriptors(), threading.active_count()
    with Switcher(store, arena_bytes=1 << 20, threads=1, workers=1, start_timeout_s=WAIT_S) as made:
        made.load("chain0")
        made.infer("chain0", {"x": torch.ones(1, 64)})
        (pid,) = [worker["pid"] for worker in made.status()["workers"]]
    assert descriptors() <= before[0] and threading.active_count() <= before[1]
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(UnavailableError, match="closed"):
        made.infer("chain0", {"x": torch.ones(1, 64)})
    with pytest.raises(UnavailableError, match="closed"):
        made.status()
