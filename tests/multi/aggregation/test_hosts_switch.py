"""all_reduce over two hosts through a switch: against exact sums and Gloo's, within the error
bound.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torchrelay.aggregation
from torchrelay import _communicators
from torchrelay.aggregation import LinkStats, Options
from torchrelay.aggregation.switch import SwitchServer, UdpDataPlane
from torchrelay.world import World

ReduceOp = dist.ReduceOp
HOSTS = 2
# Pieces of 128 KiB.
SMALL = {"num_worker_threads": 2, "max_outstanding_packets": 16, "packet_numel": 64}
COUNT = 100_003  # several pieces of float32, and no multiple of anything


@contextlib.contextmanager
def switched(
    world: World, hosts: str = "aabb", drop: float = 0.0, **settings: Any
) -> Iterator[tuple[SwitchServer | None, Options]]:
    """The default group is ``sml`` over ``hosts`` with a switch that rank 0 runs.

    Yields the switch's server (None on other ranks) and the group's options.
    """
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    _communicators._CHUNK_BYTES = 65536
    store = world.connect(60)
    with contextlib.ExitStack() as stack:
        server = None
        if world.rank == 0:
            plane = UdpDataPlane(port=0, drop_ingress=drop, drop_egress=drop, drop_seed=1)
            server = stack.enter_context(SwitchServer(plane))
            store.set("switch", server.address)
        options = Options(switch=store.get("switch").decode(), **{**SMALL, **settings})
        dist.init_process_group(
            "sml", store=store, rank=world.rank, world_size=world.size, pg_options=options
        )
        yield server, options
        dist.barrier()  # rank 0 serves the switch until all are done
        dist.destroy_process_group()


def links(group: Any = None) -> dict[str, LinkStats]:
    group = dist.group.WORLD if group is None else group
    return {link.transport: link for link in group.stats().links}


def switch_bytes(group: Any = None) -> int:
    return links(group)["switch"].sent_bytes


def bound(inputs: list[torch.Tensor], placement: str = "aabb") -> torch.Tensor:
    """What a sum of float32 ``inputs`` may differ from the exact one.

    The hosts' own sums are quantized in blocks: n^2 * 2^e / 2^32, with 2^e above their values.
    Twice 2^-24 for each rounding to float32: within a host, and of the result.
    """
    sums = [
        torch.stack(
            [x.double() for x, host in zip(inputs, placement, strict=True) if host == name]
        ).sum(0)
        for name in sorted(set(placement))
    ]
    n, largest = len(sums), torch.stack([each.abs().max() for each in sums]).max()
    exponent = torch.floor(torch.log2(largest)) + 1
    magnitude = torch.stack([x.double().abs() for x in inputs]).sum(0)
    return n**2 * 2.0**exponent / 2**32 + magnitude * 2.0**-22


def gloo_sum(tensor: torch.Tensor, gloo: Any, op: Any = ReduceOp.SUM) -> torch.Tensor:
    copy = tensor.clone()
    dist.all_reduce(copy, op, group=gloo)
    return copy


def assert_same_on_all(tensor: torch.Tensor, gloo: Any) -> None:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor, group=gloo)
    bits = [copy.view(torch.uint8) for copy in copies]
    assert all(torch.equal(each, bits[0]) for each in bits)


@pytest.mark.processes(4)
def test_dtypes_and_ops(world: World) -> None:
    """On two hosts of two ranks each; what the switch does not sum goes over TCP."""
    with switched(world, "abab"):
        gloo = dist.new_group(backend="gloo")
        generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            parts = 4 if op == ReduceOp.AVG else 1
            inputs = [torch.randn(COUNT, generator=generator) * 100 for generator in generators]
            exact = torch.stack([x.double() for x in inputs]).sum(0) / parts
            before = switch_bytes()
            got = inputs[world.rank].clone()
            dist.all_reduce(got, op)
            assert ((got.double() - exact).abs() <= bound(inputs, "abab") / parts).all()
            assert switch_bytes() - before == (got.nbytes if world.rank < 2 else 0)
            assert_same_on_all(got, gloo)
            if op == ReduceOp.SUM:
                difference = (got - gloo_sum(inputs[world.rank], gloo)).abs()
                assert (difference <= 2 * bound(inputs, "abab")).all()

            for dtype, error in ((torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
                narrow = [x.to(dtype) for x in inputs]
                exact = torch.stack([x.double() for x in narrow]).sum(0) / parts
                got = narrow[world.rank].clone()
                before = switch_bytes()
                dist.all_reduce(got, op)
                magnitude = torch.stack([x.double().abs() for x in narrow]).sum(0) / parts
                assert (
                    (got.double() - exact).abs() <= magnitude * error + bound(narrow, "abab")
                ).all()
                assert switch_bytes() - before == (4 * COUNT if world.rank < 2 else 0)
                assert_same_on_all(got, gloo)

            integers = [
                torch.randint(-(2**31), 2**31, (COUNT,), generator=generator, dtype=torch.int32)
                for generator in generators
            ]
            wrapped = torch.stack(integers).sum(0, dtype=torch.int32)
            got = integers[world.rank].clone()
            dist.all_reduce(got, op)
            assert torch.equal(
                got, wrapped if parts == 1 else wrapped.div(4, rounding_mode="trunc").int()
            )

        before = switch_bytes()
        for dtype, op in (
            (torch.float32, ReduceOp.MAX),
            (torch.int32, ReduceOp.PRODUCT),
            (torch.int32, ReduceOp.BXOR),
            (torch.float64, ReduceOp.SUM),
            (torch.int64, ReduceOp.SUM),
            (torch.uint8, ReduceOp.MIN),
            (torch.bool, ReduceOp.SUM),
        ):
            mine = torch.randint(0, 5, (5003,), generator=generators[world.rank]).to(dtype)
            got = mine.clone()
            dist.all_reduce(got, op)
            assert torch.equal(
                got, gloo_sum(mine, gloo, ReduceOp.MAX if dtype is torch.bool else op)
            )
        to_root = torch.full((5003,), 1.0)
        dist.reduce(to_root, 1)
        assert to_root.eq(4 if world.rank == 1 else 1).all()
        assert switch_bytes() == before
        links_ = links()
        assert (
            list(links_) == ["shm", "switch", "tcp"]
            and "all_reduce with SUM" in links_["switch"].reason
        )
        assert links_["tcp"].reason == "what the switch does not sum"
        assert links_["switch"].busy_s > 0 or world.rank >= 2


@pytest.mark.processes(4)
def test_averages_of_float16_do_not_overflow(world: World) -> None:
    with switched(world, "aaba"):
        gloo = dist.new_group(backend="gloo")
        inputs = torch.rand(4, COUNT, generator=torch.Generator().manual_seed(7)) * 60_000
        got, before = inputs[world.rank].half(), switch_bytes()
        dist.all_reduce(got, ReduceOp.AVG)
        want = inputs.half().double().mean(0)
        torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=1e-2)
        assert switch_bytes() - before == (4 * COUNT if world.rank in (0, 2) else 0)
        assert_same_on_all(got, gloo)


@pytest.mark.processes(2)
def test_averages_of_inference_tensors(world: World) -> None:
    with switched(world, "ab"):
        for dtype in (torch.float32, torch.float16, torch.int32):
            normal = torch.full((1000,), 2 * world.rank + 1, dtype=dtype)
            with torch.inference_mode():
                inference = normal.clone()
                works = [
                    dist.all_reduce(tensor, ReduceOp.AVG, async_op=True)
                    for tensor in (inference, normal)
                ]
            for work in works:
                work.wait()
            with torch.inference_mode():
                dist.all_reduce(normal, ReduceOp.AVG)
            dist.all_reduce(inference, ReduceOp.AVG)
            assert inference.is_inference() and not normal.is_inference()
            assert inference.eq(2).all() and normal.eq(2).all()


@pytest.mark.processes(4)
def test_numbers_that_cannot_be_quantized(world: World) -> None:
    """NaN, Inf, large, tiny and denormal numbers, and zeros, beside others in the same tensor."""
    with switched(world, num_worker_threads=1):
        gloo = dist.new_group(backend="gloo")
        specials = {
            3: [float("nan"), 1.0, 2.0, 3.0],
            1000: [float("inf"), 1.0, 1.0, 1.0],
            2000: [-float("inf"), 1.0, -float("inf"), 1.0],
            3000: [float("inf"), 1.0, -float("inf"), 1.0],  # NaN
            4000: [2.0**126, 1.0, 2.0**126, 1.0],
            5000: [3e38, 0.0, 3e38, 0.0],  # Inf
        }
        tensor = torch.full((8192,), 1.0)
        for index, values in specials.items():
            tensor[index] = values[world.rank]
        got, want = tensor.clone(), gloo_sum(tensor, gloo)
        dist.all_reduce(got)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=4 * 2.0**3 / 2**32, equal_nan=True)
        assert got[3000].isnan() and got[1000] == got[5000] == float("inf") and got[4] == 4
        assert_same_on_all(got, gloo)
        for scale in (1e-30, 2.0**-126, 1e-42, 0.0):
            mine = torch.linspace(-1, 1, 6400) * scale
            got = mine.clone()
            dist.all_reduce(got)
            # The smallest denormal, rounded in each step.
            error = 4 * 2.0**3 * scale / 2**32 + 4 * 2.0**-149
            exact = 4 * mine.double()
            assert ((got.double() - exact).abs() <= error + exact.abs() * 2.0**-22).all(), scale


@pytest.mark.processes(4)
def test_exact_leaves_floats_to_tcp(world: World) -> None:
    with switched(world, exact=True):
        for dtype in (torch.float32, torch.float16):
            inputs = [
                torch.randn(9001, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(4)
            ]
            by_host = [
                (inputs[0].float() + inputs[1]).to(dtype),
                (inputs[2].float() + inputs[3]).to(dtype),
            ]
            got = inputs[world.rank].clone()
            dist.all_reduce(got)
            assert torch.equal(got, (by_host[0].float() + by_host[1]).to(dtype))
        assert switch_bytes() == 0 and "of int32 through" in links()["switch"].reason
        integers = torch.full((9001,), world.rank + 1, dtype=torch.int32)
        dist.all_reduce(integers)
        assert integers.eq(10).all() and switch_bytes() == (
            integers.nbytes if world.rank in (0, 2) else 0
        )


@pytest.mark.processes(4)
def test_subgroups_async_handles_and_losses(world: World) -> None:
    """Groups have sessions of their own; one packet in a hundred is lost in each direction."""
    with switched(world, drop=0.01) as (server, options):
        near, far = dist.new_group([0, 1], backend="sml"), dist.new_group([1, 2], backend="sml")
        wide = dist.new_group([0, 1, 3], backend="sml", pg_options=options)
        assert server is None or len(server.stats().sessions) == 2
        works = []
        tensors = [
            torch.full((20_000 + i,), float(world.rank + i), dtype=torch.float32) for i in range(6)
        ]
        for tensor in tensors:
            works.append(dist.all_reduce(tensor, async_op=True))
        if world.rank != 2:
            mine = torch.full((30_000,), 10**world.rank, dtype=torch.int32)
            works.append(dist.all_reduce(mine, group=wide, async_op=True))
        for work in reversed(works):
            work.wait()
        for i, tensor in enumerate(tensors):
            assert (tensor - (6 + 4 * i)).abs().max() <= 4 * 2.0**5 / 2**32
        if world.rank != 2:
            assert mine.eq(1011).all() and (switch_bytes(wide) > 0) == (world.rank in (0, 3))
        if world.rank in (1, 2):
            ones = torch.ones(5000)
            dist.all_reduce(ones, group=far)  # no switch was given for it
            assert ones.eq(2).all() and "switch" not in links(far)
        if world.rank < 2:
            ones = torch.ones(5000)
            dist.all_reduce(ones, group=near)
            assert ones.eq(2).all() and near.stats().plane == "shm"
        total = torchrelay.aggregation.stats()["hosts"]
        assert [link.transport for link in total.links].count("switch") == 1
        dist.barrier()
        if server is not None:
            counts = server.stats().counts
            assert all(
                counts[name] > 0 for name in ("dropped_ingress", "dropped_egress", "answered_again")
            )


@pytest.mark.processes(3)
def test_uneven_hosts_the_log_and_a_forked_child(world: World) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchrelay.aggregation")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with switched(world, "aba", packet_numel=256) as (server, _):
        if server is not None:
            (line,) = [text for text in records if text.startswith("sml: ")]
            assert (
                "2 + 1 ranks on 2 hosts" in line
                and f"through {server.address}, TCP for the rest" in line
            )
        for count in (65, 1000, 262_145):
            tensor = torch.full((count,), 2**world.rank, dtype=torch.int32)
            dist.all_reduce(tensor)
            assert tensor.eq(7).all()
        child = os.fork()
        if child == 0:
            dist.destroy_process_group()  # must neither end the parent's part nor hang
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, ReduceOp.AVG)
        assert tensor.eq(1).all()


@pytest.mark.processes(4)
def test_ddp_reaches_gloos_loss(world: World) -> None:
    def train(group: Any) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )
        parallel = DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(world.rank))
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(parallel(inputs), inputs[:, :1])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    with switched(world):
        gloo = dist.new_group(backend="gloo")
        ours, weights = train(None)
        assert switch_bytes() > 0 or world.rank in (1, 3)
        theirs, _ = train(gloo)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours[-1] < 0.5 * ours[0]
        assert_same_on_all(weights, gloo)


def hybrid_shard() -> list[torch.Tensor]:
    """FSDP2 that shards within a host and replicates over hosts, where gradients are summed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [
        cast(DTensor, parameter).full_tensor().detach().clone() for parameter in model.parameters()
    ]


def tensor_parallel() -> list[torch.Tensor]:
    """DTensor's partial sums over all ranks."""
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    columns: Any = distribute_tensor(whole, mesh, [Shard(1)])
    rows = distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    product = columns @ rows
    assert product.placements[0].is_partial()
    return [product.redistribute(placements=[Replicate()]).to_local(), columns.sum().full_tensor()]


@pytest.mark.processes(4)
def test_fsdp2_and_dtensor_equal_gloo(world: World) -> None:
    with switched(world) as (_, options):
        # Meshes make their groups with the default options.
        for name, value in options.settings.items():
            os.environ[f"TORCHRELAY_AGGREGATION_{name.upper()}"] = str(value)
        ours = [hybrid_shard(), tensor_parallel()]
        sent = [link.sent_bytes for link in torchrelay.aggregation.stats()["hosts"].links]
        assert sent[1] > 64 * 64 * 4 or world.rank in (1, 3)
        bits = torch.cat([tensor.reshape(-1) for tensors in ours for tensor in tensors])
        assert_same_on_all(bits, dist.new_group(backend="gloo"))
    store = dist.PrefixStore("gloo", world.connect(60))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=4)
    for got, want in zip(ours, [hybrid_shard(), tensor_parallel()], strict=True):
        # A few sums of values up to 2^7, each within 4 * 2^7 / 2^32 of the exact one.
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)
