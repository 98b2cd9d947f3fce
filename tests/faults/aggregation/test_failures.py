"""Failures of ``sml`` are heard: through every way torch calls a backend, on every rank, naming who
is missing.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.errors import MismatchError, OperationTimeoutError, PeerLostError
from torchrelay.world import World
from waiting import eventually

if TYPE_CHECKING:
    from ranks import RunProcesses

TIMEOUT_S = 30.0


def start(world: World, timeout_s: float = TIMEOUT_S) -> None:
    """Make the group; timeout_s: of its calls. To meet, the ranks have time enough."""
    dist.init_process_group(
        "sml",
        store=world.connect(60),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def heard(call: Callable[[], Any]) -> str:
    """What a failing call says. Whatever passes through autograd or a torch future becomes a
    RuntimeError.
    """
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def all_reduce() -> None:
    dist.all_reduce(torch.ones(100_000))


def all_reduce_async() -> None:
    dist.all_reduce(torch.ones(100_000), async_op=True).wait()


def future() -> None:
    dist.all_reduce(torch.ones(100_000), async_op=True).get_future().wait()


def functional() -> None:
    from torch.distributed import _functional_collectives as functional_collectives

    assert dist.group.WORLD is not None
    result = functional_collectives.all_reduce(torch.ones(100_000), "sum", dist.group.WORLD)
    functional_collectives.wait_tensor(result)


def ddp_step(model: torch.nn.Module) -> None:
    model(torch.ones(2, 300)).sum().backward()


def message() -> None:
    dist.recv(torch.empty(100_000), 1)


CALLS = {f.__name__: f for f in (all_reduce, all_reduce_async, future, functional, message)}


def _lose_a_peer(world: World, how: str) -> str:
    start(world)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
    ddp_step(model)
    all_reduce()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return heard(lambda: ddp_step(model)) if how == "ddp" else heard(CALLS[how])


@pytest.mark.parametrize("how", [*CALLS, "ddp"])
def test_a_killed_rank_is_named_through(how: str, run_processes: RunProcesses) -> None:
    results = run_processes(_lose_a_peer, 3, how=how)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank].error is None, results[rank].error
        assert re.search(
            r"rank 1 (\(process \d+\) has died|is lost)|rank 1 has left", results[rank].value
        ), results[rank].value
        if how in ("all_reduce", "all_reduce_async", "message"):
            assert results[rank].value.startswith("PeerLostError")


def _die_in_the_middle(world: World) -> tuple[str, tuple[int, ...]]:
    start(world)
    tensor = torch.ones(8_000_000)
    if world.rank == 2:
        pid = os.getpid()
        if os.fork() == 0:  # a child that outlives nothing: it only kills
            time.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
    try:
        while True:
            dist.all_reduce(tensor)
    except PeerLostError as error:
        return str(error), error.ranks


def test_a_rank_killed_in_mid_collective_is_named(run_processes: RunProcesses) -> None:
    results = run_processes(_die_in_the_middle, 3)
    for rank in (0, 1):
        assert results[rank].ok, results[rank].error
        message_, ranks = results[rank].value
        assert ranks == (2,) and f"rank {rank}, all_reduce" in message_


@pytest.mark.processes(3)
def test_different_calls_raise_on_every_rank_and_name_the_difference(world: World) -> None:
    start(world)
    odd = world.rank == 1
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: dist.all_reduce(torch.ones(9 if odd else 10)), "9 x float32"),
        (
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32)),
            "int32",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
            "MAX",
        ),
        (lambda: dist.broadcast(torch.ones(4), 1 if odd else 0), "root 1"),
        (lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(3)), "barrier"),
        (lambda: dist.all_reduce(torch.ones(5 if odd else 4), async_op=True).wait(), "5 x float32"),
        (
            lambda: dist.all_gather(
                [torch.empty(2) for _ in range(3)], torch.ones(3 if odd else 2)
            ),
            "rank 1 sends 12 bytes",
        ),
        (
            lambda: dist.all_to_all_single(
                torch.empty(3), torch.ones(3), [1, 1, 1], [2, 1, 0] if odd else [1, 1, 1]
            ),
            "do not agree on sizes",
        ),
        (
            lambda: dist.reduce_scatter(torch.empty(2 + odd), [torch.ones(2 + odd)] * 3),
            "reduce_scatter of 3 x",
        ),
    ]
    for call, text in cases:
        with pytest.raises(MismatchError, match=text):
            call()
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)  # the group goes on
        assert tensor.eq(3).all()


@pytest.mark.processes(2)
def test_a_message_of_another_size_fails_the_receive(world: World) -> None:
    start(world)
    if world.rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        with pytest.raises(MismatchError, match="12 bytes of float32"):
            dist.recv(torch.empty(4), 0)
    dist.barrier()


@pytest.mark.processes(3)
def test_a_late_rank_is_named(world: World) -> None:
    start(world, timeout_s=1.0)
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 2:
        store.wait(["done/0", "done/1"], timedelta(seconds=60))
        with pytest.raises(OperationTimeoutError, match="gave up waiting for rank 2"):
            dist.barrier()
        return
    with pytest.raises(OperationTimeoutError, match="rank 2") as caught:
        cast(Any, dist.group.WORLD).monitored_barrier()
    assert caught.value.ranks == (2,)
    store.set(f"done/{world.rank}", "")
    with pytest.raises(OperationTimeoutError, match="failed before"):
        dist.all_reduce(torch.ones(2))
    store.wait(["done/0", "done/1"], timedelta(seconds=60))


@pytest.mark.processes(2)
def test_nothing_arrives(world: World) -> None:
    start(world, timeout_s=0.5)
    if world.rank == 0:
        with pytest.raises(OperationTimeoutError, match="recv from rank 1, tag 0"):
            dist.recv(torch.empty(3), 1)
    else:
        with pytest.raises(OperationTimeoutError, match="wait"):
            cast(dist.Work, dist.irecv(torch.empty(3), 0)).wait(timedelta(seconds=0.1))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done/{world.rank}", "")
    store.wait(["done/0", "done/1"], timedelta(seconds=60))


@pytest.mark.processes(2)
def test_nothing_arrives_and_nobody_waits(world: World) -> None:
    start(world, timeout_s=0.5)
    first, second = (cast(dist.Work, dist.irecv(torch.empty(3), 1 - world.rank)) for _ in range(2))
    assert f"recv from rank {1 - world.rank}, tag 0" in heard(first.get_future().wait)
    eventually(second.is_completed)
    assert isinstance(second.exception(), OperationTimeoutError)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done/{world.rank}", "")
    store.wait(["done/0", "done/1"], timedelta(seconds=60))


@pytest.mark.processes(2)
def test_a_rank_that_leaves_is_named(world: World) -> None:
    start(world)
    dist.barrier()
    if world.rank == 0:
        with pytest.raises(PeerLostError, match="rank 1 has left") as caught:
            dist.all_reduce(torch.ones(3))
        assert caught.value.ranks == (1,)


@pytest.mark.processes(2)
def test_destroying_a_group_ends_a_call_in_another_thread(world: World) -> None:
    start(world)
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        group = cast(Any, dist.group.WORLD)
        before = group.stats().jobs
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(all_reduce)
            eventually(lambda: group.stats().jobs != before)
            dist.destroy_process_group()
        with pytest.raises(PeerLostError, match="was destroyed on this rank"):
            call.result()
        store.set("destroyed", "")
    else:
        store.wait(["destroyed"], timedelta(seconds=60))


@pytest.mark.processes(2)
def test_names_in_messages_are_those_of_the_whole_world(world: World) -> None:
    start(world)
    group = dist.new_group([1, 0], backend="sml")
    if world.rank == 1:
        dist.destroy_process_group(group)
        dist.distributed_c10d._get_default_store().set("left", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["left"])
        with pytest.raises(PeerLostError, match="rank 1 has left"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


@pytest.mark.processes(2)
def test_ctrl_c_ends_a_wait(world: World) -> None:
    start(world)
    if world.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, lambda *_: signal.default_int_handler(signal.SIGINT, None))
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))
        dist.distributed_c10d._get_default_store().set("stopped", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["stopped"])
        # Between hosts, what rank 0 sent before may be all that the first call needs.
        with pytest.raises(PeerLostError, match="rank 0"):
            _reduce_twice()


def handle_in_the_next_call(handler: Callable[[], object]) -> None:
    """Run ``handler`` as a signal handler once this rank is in its next call."""
    group = cast(Any, dist.group.WORLD)
    before = group.stats().jobs
    signal.signal(signal.SIGALRM, lambda *_: handler())

    def send() -> None:
        eventually(lambda: group.stats().jobs != before)
        os.kill(os.getpid(), signal.SIGALRM)

    threading.Thread(target=send).start()


@pytest.mark.processes(2)
def test_ctrl_c_ends_a_call_behind_another(world: World) -> None:
    start(world)
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        first = cast(dist.Work, dist.all_reduce(torch.ones(3), async_op=True))
        handle_in_the_next_call(lambda: signal.default_int_handler(signal.SIGINT, None))
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))
        with pytest.raises(PeerLostError, match="rank 0 was interrupted in all_reduce"):
            first.wait()
        store.set("stopped", "")
    else:
        store.wait(["stopped"], timedelta(seconds=60))
        with pytest.raises(PeerLostError, match="rank 0 was interrupted in all_reduce"):
            _reduce_twice()


@pytest.mark.processes(2)
def test_a_signal_handler_may_destroy_the_group(world: World) -> None:
    start(world)
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        handle_in_the_next_call(dist.destroy_process_group)
        with pytest.raises(PeerLostError, match="destroy"):
            dist.all_reduce(torch.ones(3))
        store.set("destroyed", "")
    else:
        store.wait(["destroyed"], timedelta(seconds=60))


@pytest.mark.processes(2)
def test_a_signal_handler_makes_no_call_within_another(world: World) -> None:
    start(world)
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        handle_in_the_next_call(lambda: store.set("said", heard(all_reduce)))
    else:
        assert b"UnavailableError: a signal handler" in store.get("said")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()


kept: Any


def _reduce_twice() -> None:
    for _ in range(2):
        dist.all_reduce(torch.ones(3))


def _exit_with_work_in_progress(world: World) -> None:
    start(world)
    global kept  # noqa: PLW0603 - a Work that outlives its group, up to the end of the interpreter
    kept = dist.all_reduce(torch.ones(10), async_op=True), dist.irecv(torch.ones(3), 1 - world.rank)
    if world.rank == 0:
        kept[0].wait()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(PeerLostError, match="destroyed"):
        kept[1].wait()


def test_processes_end_cleanly_with_work_in_progress(run_processes: RunProcesses) -> None:
    for result in run_processes(_exit_with_work_in_progress, 2):
        assert result.ok, result.error


def _fork_and_go_on(world: World) -> None:
    start(world)
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    dist.isend(torch.ones(3), 1 - world.rank)
    dist.recv(torch.ones(3), 1 - world.rank)
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()  # in the child: must not end the parent's part, nor hang
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()


def test_a_forked_child_may_drop_the_group(run_processes: RunProcesses) -> None:
    for result in run_processes(_fork_and_go_on, 2):
        assert result.ok, result.error


def _wait_for_a_rank_that_never_comes(world: World) -> str:
    if world.rank == 1:
        store = world.connect(60)
        store.wait(["done"], timedelta(seconds=60))
        return ""
    store = world.connect(60)
    said = heard(
        lambda: dist.init_process_group(
            "sml", store=store, rank=0, world_size=2, timeout=timedelta(seconds=2)
        )
    )
    store.set("done", "")
    return said


def test_a_rank_that_never_comes_is_named(run_processes: RunProcesses) -> None:
    results = run_processes(_wait_for_a_rank_that_never_comes, 2)
    assert "OperationTimeoutError" in results[0].value and "rank" in results[0].value
