"""Sums that are compressed between hosts: equal bits on all ranks, within the stated bound; a hook
for DDP whose errors do not accumulate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from multi.aggregation.collectives import make, same
from multi.aggregation.test_hosts import place
from torchrelay.aggregation import CompressionState, Options, all_reduce_, compression_hook
from torchrelay.errors import ArgumentError, ConfigError, MismatchError, UnsupportedError
from torchrelay.world import World

ReduceOp = dist.ReduceOp
PLACEMENTS = ("aab", "abc")
INLINE_BYTES = 2048  # of a payload that travels in the ranks' descriptions, exactly


@contextmanager
def group(world: World, hosts: str, **settings: Any) -> Iterator[Any]:
    """The default group, of ``sml`` over ``hosts``."""
    place(world, hosts)
    store = world.connect(60)
    options = Options(**settings)
    dist.init_process_group(
        "sml", store=store, rank=world.rank, world_size=world.size, pg_options=options
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def given(rank: int, size: int, seed: int = 0) -> torch.Tensor:
    """What ``rank`` adds: magnitudes differ from run to run, and every rank has zeros."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    scales = torch.logspace(-6, 6, size // 300 + 1).repeat_interleave(300)[:size]
    return torch.randn(size, generator=generator) * scales * (torch.arange(size) % 7 != rank)


def bound(hosts: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The stated error of a sum: 1/126 of the largest magnitudes of the hosts' sums, each among the
    256 elements that are encoded together.
    """
    total = torch.zeros(inputs[0].numel(), dtype=torch.float64)
    for host in sorted(set(hosts)):
        ranks = [rank for rank, at in enumerate(hosts) if at == host]
        own = torch.stack([inputs[rank].double().view(-1) for rank in ranks]).sum(0).abs()
        total += torch.nn.functional.max_pool1d(own[None], 511, 1, 255)[0] / 126
    return total


def rounding(inputs: list[torch.Tensor]) -> torch.Tensor:
    """The error of adding up in float32."""
    return torch.stack(inputs).double().abs().sum(0) * 1e-6


def on_all_ranks(tensor: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    mine = tensor.contiguous().view(torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(each, mine) for each in everyones)


@pytest.mark.parametrize("hosts", PLACEMENTS)
@pytest.mark.parametrize("compression", ["int8", "bf16"])
@pytest.mark.processes(3, together=True)
def test_sums_are_within_the_bound(world: World, compression: str, hosts: str) -> None:
    with group(world, hosts, compression=compression):
        for size in (1, 512, 513, 30_011):
            inputs = [given(rank, size) for rank in range(3)]
            exact = torch.stack(inputs).double().sum(0)
            limit = bound(hosts, inputs) * (4 * size > INLINE_BYTES) + rounding(inputs)
            mean, root = inputs[world.rank].clone(), inputs[world.rank].clone()
            forms: list[Callable[[torch.Tensor], Any]] = [
                dist.all_reduce,
                all_reduce_,
                lambda tensor: cast(Any, dist.all_reduce(tensor, async_op=True)).wait(),
            ]
            totals = [inputs[world.rank].clone() for _ in forms]
            for form, total in zip(forms, totals, strict=True):
                form(total)
                assert same(total, totals[0])
            assert ((totals[0] - exact).abs() <= limit).all()
            dist.all_reduce(mean, ReduceOp.AVG)
            assert ((mean * 3.0 - exact).abs() <= limit).all()
            dist.reduce(root, 1)
            assert ((root - exact).abs() <= limit).all() == (world.rank == 1)
            assert on_all_ranks(totals[0]) and on_all_ranks(mean)
            blocks = [given(rank, 3 * size) for rank in range(3)]
            part = torch.empty(size)
            dist.reduce_scatter(part, list(blocks[world.rank].clone().chunk(3)))
            own = slice(world.rank * size, (world.rank + 1) * size)
            want = torch.stack(blocks).double().sum(0)
            limit = bound(hosts, blocks) + rounding(blocks)
            assert ((part - want[own]).abs() <= limit[own]).all()


@pytest.mark.processes(3, together=True)
def test_what_is_encoded(world: World) -> None:
    size = 65536
    with group(world, "aba", compression="int8") as world_group:
        exactly = [
            *[(dtype, ReduceOp.SUM) for dtype in (torch.float64, torch.int32, torch.int64)],
            (torch.float32, ReduceOp.MAX),
            (torch.float32, ReduceOp.PRODUCT),
        ]
        halves = [(dtype, ReduceOp.SUM) for dtype in (torch.float16, torch.bfloat16)]
        for dtype, op in [*exactly, *halves, (torch.float32, ReduceOp.SUM)]:
            inputs = [make(rank, size, dtype) for rank in range(3)]
            before = world_group.stats().links[-1].sent_bytes
            total = inputs[world.rank].clone()
            dist.all_reduce(total, op)
            sent_bytes = world_group.stats().links[-1].sent_bytes - before
            wide = torch.stack(inputs).double()
            want = {ReduceOp.SUM: wide.sum(0), ReduceOp.MAX: wide.amax(0)}.get(op, wide.prod(0))
            if (dtype, op) in exactly:
                assert torch.equal(total.double(), want), (dtype, op)
                assert world.rank == 2 or sent_bytes > total.nbytes
            else:
                assert ((total - want).abs() <= bound("aba", inputs) + 0.06).all()
                assert sent_bytes < 1.2 * size
        missing = torch.ones(size)
        missing[world.rank * 1000] = float("nan") if world.rank == 0 else float("inf")
        dist.all_reduce(missing)
        assert missing.isfinite().sum() == size - 3 and missing[[0, 1000, 2000]].isnan().all()
        assert missing[3000:].eq(3).all() and on_all_ranks(missing)


@pytest.mark.processes(3, together=True)
def test_nothing_is_encoded_within_a_host(world: World) -> None:
    with group(world, "aaa", compression="int8"):
        inputs = [given(rank, 5000) for rank in range(3)]
        total = inputs[world.rank].clone()
        dist.all_reduce(total)
        assert torch.equal(total, inputs[0] + inputs[1] + inputs[2])


class Tower(torch.nn.Module):
    """Several layers, in buckets of DDP that differ in size."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = (32, 128, 64, 96, 8)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(size, after, dtype=dtype) for size, after in itertools.pairwise(sizes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def wrap(model: torch.nn.Module, state: CompressionState | None) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    if state is not None:
        ddp.register_comm_hook(state, compression_hook)
    return ddp


def train(ddp: torch.nn.Module, rank: int, steps: int) -> float:
    """Train by SGD; return the mean loss of the last steps."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 32, generator=generator)
        loss = (ddp(x) - x[:, :8].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("hosts", ["aab", "abc"])
@pytest.mark.processes(3, together=True)
def test_a_hook_of_ddp(world: World, hosts: str) -> None:
    """The same loss as without; what is lost is known; the state continues in another process."""
    losses = {}
    with group(world, hosts):
        for compression in ("none", "int8", "bf16"):
            model = Tower()
            state = None if compression == "none" else CompressionState(model, compression)
            ddp = wrap(model, state)
            losses[compression] = train(ddp, world.rank, 60)
            assert all(on_all_ranks(parameter.detach()) for parameter in model.parameters())
            if state is None:
                continue
            lost = state.state_dict()
            assert lost.keys() == dict(model.named_parameters()).keys()
            encodes = hosts != "aab" or world.rank != 1  # one rank for each of the other host
            assert any(each.any() for each in lost.values()) == encodes
            copies = [Tower() for _ in range(2)]
            saved = {name: each.clone() for name, each in lost.items()}
            for copy in copies:
                copy.load_state_dict(model.state_dict())
                loaded = CompressionState(copy, compression)
                if copy is copies[1]:  # which forgets it
                    saved = {name: torch.zeros_like(each) for name, each in saved.items()}
                loaded.load_state_dict(saved)
                train(wrap(copy, loaded), world.rank, 1)
            first, second = (next(copy.parameters()) for copy in copies)
            assert not torch.equal(first, second)
    assert abs(losses["int8"] / losses["none"] - 1) < 0.02
    assert abs(losses["bf16"] / losses["none"] - 1) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compression", ["int8", "bf16"])
@pytest.mark.processes(3, together=True)
def test_errors_do_not_accumulate(world: World, compression: str, dtype: torch.dtype) -> None:
    """The sum of many averaged gradients is off by no more than one of them, also where DDP orders
    its buckets anew.
    """
    steps, hosts = 25, "aab"
    with group(world, hosts):
        model = Tower(dtype)
        ddp = wrap(model, CompressionState(model, compression))
        parameters = list(model.parameters())
        exact = [torch.zeros_like(each, dtype=torch.float64) for each in parameters]
        summed = [torch.zeros_like(each, dtype=torch.float64) for each in parameters]
        largest = 0.0
        for step in range(steps):
            gradients = []
            for rank in range(3):
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(99 * step + rank))
                loss = model(x.to(dtype)).square().mean()
                gradients.append(torch.autograd.grad(loss, parameters))
                if rank == world.rank:
                    mine = x.to(dtype)
            ddp.zero_grad()
            ddp(mine).square().mean().backward()
            for i, parameter in enumerate(parameters):
                average = sum(gradient[i].double() for gradient in gradients) / 3
                largest = max(largest, float(cast(torch.Tensor, average).abs().max()))
                exact[i] += average
                summed[i] += cast(torch.Tensor, parameter.grad).double()
        rounding = steps * largest * (2**-9 if dtype is torch.bfloat16 else 2**-20)
        limit = 4 * largest / 126 + rounding  # hosts' sums are at most about twice the average
        for total, want in zip(summed, exact, strict=True):
            assert (total - want).abs().max() <= limit


@pytest.mark.processes(3, together=True)
def test_mistakes(world: World) -> None:
    with pytest.raises(ConfigError, match="must be one of none, int8, bf16"):
        Options(compression="int4")
    with pytest.raises(ArgumentError, match="compression is int8 or bf16, not 'int4'"):
        CompressionState(Tower(), "int4")
    mixed = "none" if world.rank == 1 else "int8"
    with pytest.raises(MismatchError, match="compression"), group(world, "aab", compression=mixed):
        pass
    with (
        pytest.raises(ConfigError, match="the switch or compression, but not both"),
        group(world, "aab", compression="int8", switch="127.0.0.1:9"),
    ):
        pass


def backward(ddp: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    ddp(torch.ones(4, 32, dtype=dtype)).sum().backward()


@pytest.mark.processes(3, together=True)
def test_mistakes_with_the_hook(world: World) -> None:
    with group(world, "aab"):
        model = Tower(torch.float64)
        with pytest.raises(UnsupportedError, match="float64 cannot be compressed"):
            backward(wrap(model, CompressionState(model)), torch.float64)
        with pytest.raises(ArgumentError, match="was made for another model"):
            backward(wrap(Tower(), CompressionState(Tower())))
        state = CompressionState(Tower())
        with pytest.raises(ArgumentError, match=r"has nose of shape \(2,\), and the model none"):
            state.load_state_dict({"nose": torch.ones(2)})
        gloo = dist.new_group(backend="gloo")
        model = Tower()
        ddp = DistributedDataParallel(model, process_group=gloo)
        ddp.register_comm_hook(CompressionState(model, group=gloo), compression_hook)
        with pytest.raises(ArgumentError, match="it needs a group of sml"):
            backward(ddp)
        model = Tower()
        ddp = wrap(model, CompressionState(model) if world.rank == 0 else None)
        with pytest.raises(RuntimeError, match="with compression int8; rank 1 made all_reduce"):
            backward(ddp)
