"""Options, statistics, and the dummy plane."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from ranks import python
from torchrelay import aggregation
from torchrelay.errors import ConfigError
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses


def start(world: World, options: aggregation.Options | None = None) -> None:
    dist.init_process_group(
        "sml", store=world.connect(60), rank=world.rank, world_size=world.size, pg_options=options
    )


@pytest.mark.processes(2)
def test_the_dummy_plane_answers_alone(world: World) -> None:
    start(world, aggregation.Options(plane="dummy"))
    tensor = torch.full((3,), 2.0)
    dist.all_reduce(tensor)
    assert tensor.eq(4).all()
    dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True).wait()
    assert tensor.eq(4).all()
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    assert tensor.eq(16).all()
    outs = [torch.zeros(2) for _ in range(2)]
    dist.all_gather(outs, torch.ones(2))
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.zeros(2), torch.ones(2)])
    assert out.eq(2 * world.rank).all()
    dist.broadcast(tensor, 1)
    dist.scatter(out, [torch.ones(2), torch.ones(2)] if world.rank == 0 else None)
    dist.gather(out, outs if world.rank == 0 else None)
    dist.all_to_all(outs, [torch.ones(2), torch.ones(2)])
    dist.reduce(tensor, 0)
    work: Any = dist.irecv(tensor, 1 - world.rank)
    if world.rank == 0:
        dist.send(tensor, 1)  # nobody needs to receive
    work.wait()
    assert work.get_future().wait()[0] is not None
    dist.barrier()
    assert aggregation.stats()["dummy"].jobs >= 11


@pytest.mark.processes(2)
def test_autograd_does_not_record_the_dummy_plane(world: World) -> None:
    start(world, aggregation.Options(plane="dummy"))
    parameter = torch.nn.Parameter(torch.ones(3))
    dist.all_reduce(parameter)
    assert parameter.eq(2).all() and parameter.is_leaf
    outs = [torch.zeros(3) for _ in range(2)]
    dist.all_gather(outs, parameter)
    assert all(out.eq(2).all() and not out.requires_grad for out in outs)
    with torch.inference_mode():
        inference = torch.ones(3)
    dist.all_reduce(inference)
    dist.scatter(inference, [outs[0], outs[1]] if world.rank == 0 else None)
    assert inference.eq(2).all()


@pytest.mark.processes(2)
def test_ddp_over_the_dummy_plane_is_one_process_training(world: World) -> None:
    start(world, aggregation.Options(plane="dummy", dummy_bandwidth=1000.0))
    torch.manual_seed(0)
    plain = torch.nn.Linear(50, 50)
    module = torch.nn.parallel.DistributedDataParallel(plain)
    module(torch.ones(2, 50)).sum().backward()
    assert plain.weight.grad is not None and plain.weight.grad.eq(2).all()
    assert aggregation.stats()["dummy"].waiting_s > 50 * 50 * 4 * 8 / 1e9


@pytest.mark.processes(2)
def test_statistics(world: World) -> None:
    start(world)
    before = aggregation.stats()["shm"]
    dist.all_reduce(torch.ones(100))
    dist.all_reduce(torch.ones(1000), async_op=True).wait()
    dist.barrier()
    after = aggregation.stats()["shm"]
    assert after.jobs - before.jobs == 3
    assert after.payload_bytes - before.payload_bytes == 4400
    assert after.waiting_s >= before.waiting_s >= 0
    group = dist.new_group(backend="sml", pg_options=aggregation.Options(plane="dummy"))
    dist.all_reduce(torch.ones(2), group=group)
    assert aggregation.stats()["dummy"].payload_bytes == 8


def _planes(world: World) -> list[str]:
    start(world)
    return list(aggregation.stats())


def _bad_setting(world: World) -> str:
    try:
        start(world)
    except ConfigError as error:
        return str(error)
    return ""


def test_settings_come_from_the_environment(run_processes: RunProcesses) -> None:
    environ = {"TORCHRELAY_AGGREGATION_PLANE": "dummy"}
    for result in run_processes(_planes, 2, environ=environ):
        assert result.value == ["dummy"], result.error
    for result in run_processes(
        _bad_setting, 2, environ={"TORCHRELAY_AGGREGATION_PLANE": "tofino"}
    ):
        assert "TORCHRELAY_AGGREGATION_PLANE" in result.value


SCRIPT = """
import torch, torch.distributed as dist
import torch_switchml
dist.init_process_group(backend="sml", init_method="env://")
tensor = torch.ones(5, dtype=torch.int32)
dist.all_reduce(tensor)
assert tensor.eq(dist.get_world_size()).all()
dist.destroy_process_group()
print("switched")
"""


@pytest.mark.timeout(400)
def test_a_script_of_the_original_runs_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with python(*launcher, "-m", "torchrelay.compat", str(script)) as job:
        output, _ = job.communicate(timeout=300)
    assert job.returncode == 0 and output.count("switched") == 2, output
