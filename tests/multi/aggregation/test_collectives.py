"""Every collective of c10d on ``sml``, against values that each rank computes by itself, and
against Gloo.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation
from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.world import World

ReduceOp = dist.ReduceOp
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
# In one step, in blocks, and neither a multiple of anything.
SIZES = (1, 300, 9001)


@contextmanager
def groups(world: World) -> Iterator[dist.ProcessGroup]:
    """The default group is ``sml``, with small slots; yields a Gloo group of the same ranks."""
    os.environ.update(
        TORCHRELAY_AGGREGATION_SLOT_BYTES="16384", TORCHRELAY_AGGREGATION_ONE_SHOT_BYTES="2048"
    )
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=world.size)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def make(rank: int, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` holds: small whole numbers, so that sums and products are exact in any
    order.
    """
    generator = torch.Generator().manual_seed(rank * 7919 + 13)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    values = torch.randint(
        low,
        2 if dtype is torch.bool else 4,
        (shape,) if isinstance(shape, int) else shape,
        generator=generator,
    )
    if dtype.is_complex:
        return torch.complex(values.double(), values.flip(0).double()).to(dtype)
    return values.to(dtype)


def expected(op: object, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction in float64 or int64, then rounded once."""
    dtype = tensors[0].dtype
    wide = torch.stack(tensors).to(
        torch.complex128
        if dtype.is_complex
        else torch.float64
        if dtype.is_floating_point
        else torch.int64
    )
    if dtype is torch.bool:
        table = {
            ReduceOp.SUM: "amax",
            ReduceOp.MAX: "amax",
            ReduceOp.BOR: "amax",
            ReduceOp.PRODUCT: "amin",
            ReduceOp.MIN: "amin",
            ReduceOp.BAND: "amin",
        }
        if op == ReduceOp.BXOR:
            return wide.sum(0).remainder(2).bool()
        return getattr(wide, table[op])(0).bool()
    if op == ReduceOp.SUM:
        out = wide.sum(0)
    elif op == ReduceOp.AVG:
        out = wide.sum(0).to(dtype).to(wide.dtype) if dtype in INTS else wide.sum(0)
        out = (
            out / len(tensors)
            if dtype not in INTS
            else torch.div(out, len(tensors), rounding_mode="trunc")
        )
    elif op == ReduceOp.PRODUCT:
        out = wide.prod(0)
    elif op == ReduceOp.MIN:
        out = wide.amin(0)
    elif op == ReduceOp.MAX:
        out = wide.amax(0)
    else:
        out = wide[0]
        function = {
            ReduceOp.BAND: torch.bitwise_and,
            ReduceOp.BOR: torch.bitwise_or,
            ReduceOp.BXOR: torch.bitwise_xor,
        }[op]
        for other in wide[1:]:
            out = function(out, other)
    return out.to(dtype)


def cases() -> Iterator[tuple[torch.dtype, object]]:
    for dtype in (*FLOATS, *INTS):
        for op in ARITHMETIC + (BITWISE if dtype in INTS else ()):
            yield dtype, op
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *BITWISE):
        yield torch.bool, op
    for dtype in (torch.complex64, torch.complex128):
        yield dtype, ReduceOp.SUM


def check(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    # An average is divided in float32, then rounded: bfloat16 may differ from float64's answer by
    # its last bit.
    torch.testing.assert_close(
        got,
        want,
        rtol=1e-2 if want.dtype in (torch.bfloat16, torch.float16) else 1e-6,
        atol=0,
        msg=lambda m: f"{what}: {m}",
    )


@pytest.mark.processes(3)
def test_reductions_of_every_dtype_and_op(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        for dtype, op in cases():
            for size in SIZES:
                inputs = [make(r, size, dtype) for r in range(n)]
                want = expected(op, inputs)
                mine = inputs[me].clone()
                dist.all_reduce(mine, op)
                check(mine, want, ("all_reduce", dtype, op, size))
                mine = inputs[me].clone()
                dist.reduce(mine, 1, op)
                check(mine, want if me == 1 else inputs[me], ("reduce", dtype, op, size))
                blocks = [[make(r * 100 + b, size, dtype) for b in range(n)] for r in range(n)]
                out = torch.empty(size, dtype=dtype)
                dist.reduce_scatter(out, [b.clone() for b in blocks[me]], op)
                check(
                    out,
                    expected(op, [blocks[r][me] for r in range(n)]),
                    ("reduce_scatter", dtype, op, size),
                )
                out = torch.empty(size, dtype=dtype)
                dist.reduce_scatter_tensor(out, torch.cat(blocks[me]), op)
                check(
                    out,
                    expected(op, [blocks[r][me] for r in range(n)]),
                    ("reduce_scatter_tensor", dtype, op, size),
                )


@pytest.mark.processes(3)
def test_copies_of_every_dtype(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        extra = [torch.float8_e4m3fn, torch.uint16]
        for dtype in (*FLOATS, *INTS, torch.bool, torch.complex64, torch.complex128, *extra):
            for size in SIZES:
                inputs = [make(r, size, torch.uint8).to(dtype) for r in range(n)]

                def same(a: torch.Tensor, b: torch.Tensor) -> bool:
                    return a.dtype == b.dtype and torch.equal(
                        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
                    )

                mine = inputs[me].clone()
                dist.broadcast(mine, 2)
                assert same(mine, inputs[2])
                outs = [torch.zeros(size, dtype=dtype) for _ in range(n)]
                dist.all_gather(outs, inputs[me])
                assert all(map(same, outs, inputs))
                whole = torch.zeros(n * size, dtype=dtype)
                dist.all_gather_into_tensor(whole, inputs[me])
                assert all(map(same, whole.chunk(n), inputs))
                outs = [torch.zeros(size, dtype=dtype) for _ in range(n)]
                dist.gather(inputs[me], outs if me == 1 else None, dst=1)
                assert me != 1 or all(map(same, outs, inputs))
                out = torch.zeros(size, dtype=dtype)
                dist.scatter(out, list(inputs) if me == 0 else None, src=0)
                assert same(out, inputs[me])
                outs = [torch.zeros(size, dtype=dtype) for _ in range(n)]
                dist.all_to_all(outs, list(inputs))
                assert all(same(o, inputs[me]) for o in outs)
                whole = torch.zeros(n * size, dtype=dtype)
                dist.all_to_all_single(
                    whole, torch.cat([i.view(torch.uint8) for i in inputs]).view(dtype)
                )
                assert all(same(o, inputs[me]) for o in whole.chunk(n))


@pytest.mark.processes(2)
def test_gloo_gives_the_same(world: World) -> None:
    with groups(world) as gloo:
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
                for size in (5, 70_000):
                    ours, theirs = make(world.rank, size, dtype), make(world.rank, size, dtype)
                    dist.all_reduce(ours, op)
                    dist.all_reduce(theirs, op, group=gloo)
                    assert torch.equal(ours, theirs), (dtype, op, size)
        splits = [[1, 4], [2, 3]]
        sent = torch.arange(5 * 6.0).view(5, 6) + 100 * world.rank
        took = [row[world.rank] for row in splits]
        outs = [torch.zeros(sum(took), 6) for _ in range(2)]
        for out, group in zip(outs, (None, gloo), strict=True):
            dist.all_to_all_single(out, sent, took, splits[world.rank], group=group)
        assert torch.equal(*outs)


@pytest.mark.processes(3)
def test_odd_tensors(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        grid = torch.arange(12.0).view(3, 4)
        for view in (grid.t(), grid[:, ::2], grid.t().unsqueeze(1), grid[1:, 1]):
            mine = (grid * (me + 1)).as_strided(view.shape, view.stride(), view.storage_offset())
            dist.all_reduce(mine)
            assert torch.equal(mine, view * (n * (n + 1) // 2))
            mine = (grid * (me + 1)).as_strided(view.shape, view.stride(), view.storage_offset())
            work = dist.all_reduce(mine, async_op=True)
            work.wait()
            assert torch.equal(mine, view * 6)
            outs = [
                torch.zeros(grid.shape).as_strided(view.shape, view.stride(), view.storage_offset())
                for _ in range(n)
            ]
            dist.all_gather(outs, (view * (me + 1)))
            assert all(torch.equal(o, view * (r + 1)) for r, o in enumerate(outs))
            got = torch.zeros(grid.shape).as_strided(
                view.shape, view.stride(), view.storage_offset()
            )
            peer, source = (me + 1) % n, (me - 1) % n
            works = [dist.isend(view * (me + 1), peer), dist.irecv(got, source)]
            for w in works:
                w.wait()
            assert torch.equal(got, view * (source + 1))
        zero_dim = torch.tensor(float(me))
        dist.all_reduce(zero_dim)
        assert zero_dim.shape == () and zero_dim == 3
        empty = torch.empty(0, 5)
        dist.all_reduce(empty)
        dist.broadcast(empty, 1)
        dist.all_gather([torch.empty(0, 5) for _ in range(n)], empty)
        dist.all_to_all_single(torch.empty(0), torch.empty(0))
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
        leaf = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            dist.all_reduce(leaf)
        assert leaf.eq(3).all()
        uneven = [torch.zeros(r + 1) for r in range(n)]
        dist.all_gather(uneven, torch.full((me + 1,), float(me)))
        assert all(t.eq(r).all() for r, t in enumerate(uneven))


@pytest.mark.processes(2)
def test_premultiplied_sums(world: World) -> None:
    with groups(world):
        factor = 0.5 + world.rank
        op = dist._make_nccl_premul_sum(factor)
        for dtype in FLOATS:
            mine = torch.full((7,), 2.0, dtype=dtype)
            dist.all_reduce(mine, op)
            assert mine.eq(2 * 0.5 + 2 * 1.5).all()
            source = torch.full((14,), 2.0, dtype=dtype)
            out = torch.empty(7, dtype=dtype)
            dist.reduce_scatter_tensor(out, source, op)
            assert out.eq(4).all() and source.eq(2).all()
        with pytest.raises(ArgumentError, match="floating"):
            dist.all_reduce(torch.ones(2, dtype=torch.int32), op)


@pytest.mark.processes(2)
def test_wrong_arguments_fail_before_anything_is_sent(world: World) -> None:
    with groups(world):
        group = dist.group.WORLD
        with pytest.raises(ArgumentError, match="integer"):
            dist.all_reduce(torch.ones(2), ReduceOp.BAND)
        with pytest.raises(ArgumentError, match=r"torch\.bool"):
            dist.all_reduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG)
        with pytest.raises(UnsupportedError, match="float8"):
            dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
        with pytest.raises(UnsupportedError, match="dense"):
            dist.broadcast(torch.eye(2).to_sparse(), 0)
        with pytest.raises(ArgumentError, match="one dtype"):
            group._allgather_base(torch.empty(4), torch.ones(2, dtype=torch.int32))
        with pytest.raises(ArgumentError, match="2 ranks"):
            group._allgather_base(torch.empty(5), torch.ones(2))
        with pytest.raises(ArgumentError, match="splits"):
            dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 2], [2, 2])
        with pytest.raises(ArgumentError, match="tag"):
            group.send([torch.ones(2)], 1 - world.rank, -1)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()


@pytest.mark.processes(4)
def test_overlapping_subgroups(world: World) -> None:
    with groups(world):
        members = [[0, 1], [1, 2, 3], [0, 2], [3]]
        made = [dist.new_group(ranks, backend="sml") for ranks in members]
        for round_ in range(20):
            for ranks, group in zip(members, made, strict=True):
                if world.rank in ranks:
                    tensor = torch.full((round_ + 1,), float(world.rank))
                    dist.all_reduce(tensor, group=group)
                    assert tensor.eq(sum(ranks)).all()
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.eq(4).all()


@pytest.mark.processes(2)
def test_handles_in_any_order(world: World) -> None:
    with groups(world):
        tensors = [
            torch.full((size,), float(world.rank + 1)) for size in (10, 300_000, 1, 50_000) * 5
        ]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        last = torch.ones(4)
        dist.all_reduce(last)  # comes after those in progress
        for i in (7, 0, 19, 3):
            works[i].wait()
            works[i].wait()
            assert works[i].is_completed() and works[i].is_success() and tensors[i].eq(3).all()
        assert [t.shape for t in works[5].result()] == [tensors[5].shape]
        future = works[6].get_future()
        assert torch.equal(future.wait()[0], tensors[6])
        assert all(w.is_completed() for w in works)  # `last` was the last
        assert all(t.eq(3).all() for t in tensors)
        dropped = torch.ones(1_000_000)
        del works
        dist.all_reduce(torch.ones(1_000_000), async_op=True)  # nobody keeps tensor or Work
        dist.all_reduce(dropped)
        assert dropped.eq(2).all()


@pytest.mark.processes(2)
def test_an_async_call_does_not_wait_for_the_others(world: World) -> None:
    with groups(world):
        store = dist.distributed_c10d._get_default_store()
        tensor = torch.ones(100_000)
        if world.rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            assert not work.is_completed()
            store.set("called", "")
        else:
            store.wait(["called"])
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.eq(2).all()


@pytest.mark.processes(2)
def test_coalesced_forms(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        tensors = [torch.full((k,), float(me)) for k in (3, 40_000, 1)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert all(t.eq(1).all() for t in tensors)
        outs = [torch.empty(n * k) for k in (3, 5)]
        with dist._coalescing_manager():
            for out, k in zip(outs, (3, 5), strict=True):
                dist.all_gather_into_tensor(out, torch.full((k,), float(me)))
        assert all(c.eq(r).all() for out in outs for r, c in enumerate(out.chunk(n)))
        outs = [torch.empty(k) for k in (3, 5)]
        with dist._coalescing_manager():
            for out in outs:
                dist.reduce_scatter_tensor(out, torch.ones(n * out.numel()))
        assert all(out.eq(n).all() for out in outs)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            got = torch.empty(4)
            dist.isend(torch.full((4,), float(me)), 1 - me)
            dist.irecv(got, 1 - me)
        manager.wait()
        assert got.eq(1 - me).all()
        rows = [[torch.empty(2), torch.empty(3)] for _ in range(n)]
        dist.group.WORLD.allgather_coalesced(
            rows, [torch.full((2,), float(me)), torch.full((3,), 10.0 + me)]
        ).wait()
        assert all(a.eq(r).all() and b.eq(10 + r).all() for r, (a, b) in enumerate(rows))


@pytest.mark.processes(3)
def test_messages(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        for size in (0, 1, 1000, 300_000):
            got = torch.empty(size)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.full((size,), float(me)), (me + 1) % n),
                    dist.P2POp(dist.irecv, got, (me - 1) % n),
                ]
            )
            for work in works:
                work.wait()
            assert got.eq((me - 1) % n).all()
        # Everybody sends first: a blocking send would never return.
        works = [
            dist.isend(torch.full((200_000,), float(me)), peer, tag=7)
            for peer in range(n)
            if peer != me
        ]
        for peer in reversed([r for r in range(n) if r != me]):
            got = torch.empty(200_000)
            assert dist.recv(got, peer, tag=7) == peer
            assert got.eq(peer).all()
        for work in works:
            work.wait()
        if me == 0:
            seen = set()
            for _ in range(n - 1):
                got = torch.empty(2, dtype=torch.int64)
                seen.add(dist.recv(got))
            assert seen == {1, 2}
        else:
            dist.send(torch.tensor([me, me]), 0)
        if me == 1:
            dist.send_object_list([{"a": 1}, "b"], 2)
        if me == 2:
            objects = [None, None]
            dist.recv_object_list(objects, 1)
            assert objects == [{"a": 1}, "b"]


@pytest.mark.processes(3)
def test_objects_and_barriers(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        gathered = [None] * n
        dist.all_gather_object(gathered, {"rank": me, "blob": "x" * (me * 1000)})
        assert [g["rank"] for g in gathered] == [0, 1, 2]
        objects = [me, "text", None] if me == 1 else [None] * 3
        dist.broadcast_object_list(objects, src=1)
        assert objects == [1, "text", None]
        into = [None]
        dist.scatter_object_list(into, ["a", "b", "c"] if me == 0 else None, src=0)
        assert into == ["abc"[me]]
        collected = [None] * n if me == 2 else None
        dist.gather_object(me * 2, collected, dst=2)
        assert me != 2 or collected == [0, 2, 4]
        dist.barrier()
        dist.barrier(async_op=True).wait()
        dist.group.WORLD.monitored_barrier()


@pytest.mark.processes(2)
def test_results_are_the_same_bits_on_all_ranks_and_every_time(world: World) -> None:
    with groups(world):
        for size in (100, 100_003):
            for dtype in FLOATS:
                first = None
                for _ in range(3):
                    tensor = torch.randn(
                        size, generator=torch.Generator().manual_seed(world.rank)
                    ).to(dtype)
                    dist.all_reduce(tensor)
                    copies = [torch.empty_like(tensor) for _ in range(2)]
                    dist.all_gather(copies, tensor)
                    assert torch.equal(*copies)
                    first = tensor if first is None else first
                    assert torch.equal(tensor, first)


@pytest.mark.processes(2)
def test_many_groups_leave_no_descriptors(world: World) -> None:
    with groups(world):
        dist.barrier()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(30):
            group = dist.new_group(backend="sml")
            dist.all_reduce(torch.ones(5), group=group, async_op=True).wait()
            dist.isend(torch.ones(3), 1 - world.rank, group=group)
            dist.recv(torch.ones(3), 1 - world.rank, group=group)
            dist.destroy_process_group(group)
            del group
        gc.collect()
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_one_process_is_a_world(world: World) -> None:
    dist.init_process_group("sml", store=world.connect(), rank=0, world_size=1)
    try:
        tensor = torch.arange(5.0)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        out = torch.empty(5)
        dist.all_to_all_single(out, tensor)
        dist.group.WORLD._reduce_scatter_base(out, tensor).wait()
        gathered = [torch.empty(5)]
        dist.all_gather(gathered, tensor)
        dist.barrier()
        assert (
            torch.equal(tensor, torch.arange(5.0))
            and torch.equal(gathered[0], tensor)
            and torch.equal(out, tensor)
        )
    finally:
        dist.destroy_process_group()


def test_the_backend_is_registered() -> None:
    assert dist.Backend("sml") == "sml"
    torchrelay.aggregation.register()
