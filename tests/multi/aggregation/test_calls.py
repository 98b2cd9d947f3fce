"""The ways to call a group directly, and sums of sparse tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError
from torchrelay.world import World

MINUTE = timedelta(seconds=60)


def start(world: World) -> dist.ProcessGroup:
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=world.size)
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.mark.processes(2)
def test_a_group_takes_plain_arguments(world: World) -> None:
    """Each form is tried on Gloo too: what c10d accepts there is accepted here."""
    for group in (start(world), dist.new_group(backend="gloo")):
        tensor = torch.full((3,), float(world.rank + 1))
        group.allreduce(tensor).wait()
        assert tensor.eq(3).all()
        group.allreduce([tensor]).wait()
        assert tensor.eq(6).all()
        group.allreduce(tensor, dist.ReduceOp.MAX).wait()
        assert tensor.eq(6).all()
        group.allreduce([tensor], dist.ReduceOp.PRODUCT, MINUTE).wait()
        assert tensor.eq(36).all()
        group.allreduce(tensor, op=dist.ReduceOp.MIN, timeout=MINUTE).wait()
        assert tensor.eq(36).all()
        group.allreduce([tensor], opts=dist.AllreduceOptions()).wait()
        assert tensor.eq(72).all()

        tensor.fill_(world.rank)
        group.broadcast(tensor, 1).wait()
        assert tensor.eq(1).all()
        options = dist.BroadcastOptions()
        options.rootRank = 1
        group.broadcast([tensor.mul_(world.rank + 1)], options).wait()
        assert tensor.eq(2).all()
        group.reduce(tensor, 0, dist.ReduceOp.SUM, MINUTE).wait()
        assert world.rank != 0 or tensor.eq(4).all()

        pieces = [torch.empty(2), torch.empty(2)]
        group.allgather(pieces, torch.full((2,), float(world.rank))).wait()
        assert pieces[0].eq(0).all() and pieces[1].eq(1).all()
        group.allgather(pieces, torch.full((2,), float(world.rank)), timeout=MINUTE).wait()
        assert pieces[1].eq(1).all()
        output = torch.empty(2)
        group.reduce_scatter(output, pieces, dist.ReduceOp.SUM).wait()
        assert output.eq(2 * world.rank).all()
        group.reduce_scatter([output], [pieces], dist.ReduceScatterOptions()).wait()
        assert output.eq(2 * world.rank).all()


@pytest.mark.processes(2)
def test_gather_scatter_and_all_to_all_take_plain_arguments(world: World) -> None:
    """On Gloo too, as above."""
    for group in (start(world), dist.new_group(backend="gloo")):
        own = torch.full((2,), float(world.rank + 1))
        pieces = [torch.zeros(2), torch.zeros(2)] if world.rank == 1 else []
        for more in ((), (MINUTE,)):
            group.gather(pieces, own, 1, *more).wait()
            assert [piece.tolist() for piece in pieces] == (
                [[1, 1], [2, 2]] if world.rank == 1 else []
            )
        gathering = dist.GatherOptions()
        gathering.rootRank = 1
        group.gather([pieces] if pieces else [], [own.mul_(3)], gathering).wait()
        group.gather([pieces] if pieces else [], [own], opts=gathering).wait()
        assert [piece.tolist() for piece in pieces] == ([[3, 3], [6, 6]] if world.rank == 1 else [])

        output = torch.zeros(2)
        group.scatter(output, pieces, 1).wait()
        assert output.eq(3 * (world.rank + 1)).all()
        group.scatter(output.zero_(), pieces, root=1, timeout=MINUTE).wait()
        assert output.eq(3 * (world.rank + 1)).all()
        scattering = dist.ScatterOptions()
        scattering.rootRank = 1
        group.scatter([output.zero_()], [pieces] if pieces else [], scattering).wait()
        assert output.eq(3 * (world.rank + 1)).all()

        for more in ((), (MINUTE,)):
            group.alltoall_base(output.zero_(), own, [1, 1], [1, 1], *more).wait()
            assert output.tolist() == [3, 6]
        group.alltoall_base(output.zero_(), own, [], [], timeout=MINUTE).wait()
        assert output.tolist() == [3, 6]


@pytest.mark.processes(2)
def test_one_tensor_is_needed_for_each_rank(world: World) -> None:
    group = start(world)
    tensor = torch.ones(2)
    with pytest.raises(ArgumentError, match="gather: 1 outputs for a group of 2 ranks"):
        group.gather([tensor], tensor, world.rank)
    with pytest.raises(ArgumentError, match="scatter: 3 inputs for a group of 2 ranks"):
        group.scatter(tensor, [tensor] * 3, world.rank)
    with pytest.raises(ArgumentError, match="all_gather: 1 outputs"):
        group.allgather([tensor], tensor)
    with pytest.raises(ArgumentError, match="all_to_all: 0 inputs"):
        group.alltoall([tensor, tensor], [])


def sparse(rank: int, dense: tuple[int, ...], dtype: torch.dtype, count: int) -> torch.Tensor:
    """``count`` entries, some of them at the same place, of a matrix of 50 rows."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 50, (1, count), generator=generator)
    values = torch.randint(-4, 5, (count, *dense), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (50, *dense), check_invariants=True)


@pytest.mark.processes(3)
def test_sparse_tensors_are_added(world: World) -> None:
    start(world)
    for dense in ((), (4,)):
        for dtype in (torch.float32, torch.int64):
            counts = [7, 0, 90]
            tensor = sparse(world.rank, dense, dtype, counts[world.rank])
            dist.all_reduce(tensor)
            want: Any = sum(sparse(r, dense, dtype, counts[r]).to_dense() for r in range(3))
            assert tensor.is_coalesced() and torch.equal(tensor.to_dense(), want)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(tensor.to_dense(), 3 * want)


@pytest.mark.processes(2)
def test_buffers_are_on_the_cpu_whatever_the_default_device(world: World) -> None:
    group = start(world)  # of c10d's functions, some take the mode away
    odd = torch.ones(3, 4).t()
    tensor, *others = (sparse(rank, (), torch.float32, 5) for rank in (world.rank, 0, 1))
    with torch.device("meta"):
        group.allreduce(odd).wait()
        group.allreduce(tensor).wait()
    assert odd.eq(2).all()
    assert torch.equal(tensor.to_dense(), others[0].to_dense() + others[1].to_dense())


@pytest.mark.processes(2)
def test_ddp_trains_a_sparse_embedding(world: World) -> None:
    """As over Gloo, bit for bit."""
    start(world)
    weights = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        torch.manual_seed(0)
        plain: Any = torch.nn.Sequential(
            torch.nn.Embedding(30, 4, sparse=True), torch.nn.Linear(4, 2)
        )
        module = torch.nn.parallel.DistributedDataParallel(plain, process_group=group)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            rows = torch.arange(5) * (world.rank + 1) + step
            module(rows).square().sum().backward()
            optimizer.step()
        weights.append(plain[0].weight.detach().clone())
    assert torch.equal(*weights)


@pytest.mark.processes(2)
def test_what_sparse_tensors_cannot_do_is_said(world: World) -> None:
    start(world)
    with pytest.raises(UnsupportedError, match="MAX of torch"):
        dist.all_reduce(sparse(0, (), torch.float32, 3), dist.ReduceOp.MAX)
    with (
        pytest.raises(UnsupportedError, match="sparse_csr"),
        pytest.warns(UserWarning, match="beta"),
    ):
        dist.all_reduce(torch.eye(3).to_sparse_csr())
    with pytest.raises(UnsupportedError, match="sparse_coo"):
        dist.broadcast(sparse(0, (), torch.float32, 3), 0)
    with pytest.raises(MismatchError, match="differ in shape"):
        dist.all_reduce(sparse(0, (2 + world.rank,), torch.float32, 3))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()
