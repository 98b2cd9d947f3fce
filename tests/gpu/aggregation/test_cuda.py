"""CUDA tensors through pinned staging."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.world import World

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)


@pytest.mark.processes(2)
def test_collectives_of_cuda_tensors(world: World) -> None:
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=world.size)
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for size in (1, 1000, 1_000_000):
        tensor = torch.full((size,), float(world.rank + 1), device=device)
        dist.all_reduce(tensor)
        assert tensor.eq(3).all()
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.eq(6).all()
        outs = [torch.empty(size, device=device) for _ in range(2)]
        dist.all_gather(outs, tensor * world.rank)
        assert outs[0].eq(0).all() and outs[1].eq(6).all()
        dist.broadcast(tensor.mul_(world.rank), 1)
        assert tensor.eq(6).all()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.ones(1_000_000, device=device)
        torch.cuda._sleep(10_000_000)
        late += 1
        dist.all_reduce(late)
        assert late.eq(4).all()


@pytest.mark.processes(2)
def test_futures_on_another_stream(world: World) -> None:
    """The thread that completes a future is on the default stream, which is busy here."""
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=world.size)
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.ones(1_000_000, device=device)
        side.synchronize()
        torch.cuda.default_stream().wait_stream(side)
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.cuda._sleep(500_000_000)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None and work.get_future().wait()[0].eq(2).all()
        torch.cuda._sleep(500_000_000)
        tensor.fill_(world.rank + 5)  # before the result, although it comes by another stream
        work = dist.broadcast(tensor, 0, async_op=True)
        assert work is not None and work.get_future().wait()[0].eq(5).all()


@pytest.mark.processes(2)
def test_ddp_on_cuda(world: World) -> None:
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=world.size)
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    plain = torch.nn.Linear(100, 100, device=device)
    module = torch.nn.parallel.DistributedDataParallel(plain, device_ids=[device])
    module(torch.full((4, 100), float(world.rank), device=device)).sum().backward()
    assert plain.weight.grad is not None and plain.weight.grad.eq(2).all()


@pytest.mark.processes(1)
def test_cuda_tensors_go_to_nccl_beside_sml(world: World) -> None:
    dist.init_process_group(
        "cuda:nccl,cpu:sml", store=world.connect(60), rank=world.rank, world_size=world.size
    )
    device = torch.device("cuda", torch.cuda.current_device())
    on_gpu, on_host = torch.ones(100, device=device), torch.ones(100)
    for tensor in (on_gpu, on_host):
        dist.all_reduce(tensor)
        assert tensor.eq(1).all()
    outs = [torch.zeros(100, device=device)]
    dist.all_gather(outs, on_gpu)
    assert outs[0].eq(1).all()
    module = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(8, 8, device=device), device_ids=[device]
    )
    module(torch.ones(4, 8, device=device)).sum().backward()
