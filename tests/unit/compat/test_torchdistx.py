"""torchdistX's optimizers and hooks under its own names, as scripts and transformers import
them.
"""

from __future__ import annotations

import subprocess

import preloaded

SCRIPT = """
from torchrelay.compat import install
install("torchdistx")
from torchdistx.gossip_grad import GossipGraDState, Topology, get_num_modules, gossip_grad_hook
from torchdistx.optimizers import AnyPrecisionAdamW
from torchdistx.optimizers.anyprecision_optimizer import AnyPrecisionAdamW as same
from torchdistx.slowmo import slowmo_comm, slowmo_optimizer
import torchdistx.slowmo.slowmo_comm
assert same is AnyPrecisionAdamW
assert torchdistx.slowmo.slowmo_comm is slowmo_comm
slowmo_comm.SlowMoState, slowmo_comm.slowmo_hook, slowmo_optimizer.SlowMomentumOptimizer

import torch
param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
optimizer = AnyPrecisionAdamW([param], use_kahan_summation=True, momentum_dtype=torch.float32)
param.grad = torch.ones_like(param)
optimizer.step()
print(sorted(optimizer.state[param]))
"""


def test_a_script_that_imports_torchdistx() -> None:
    command = [preloaded.python(), "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['compensation', 'exp_avg', 'exp_avg_sq', 'step']"


def test_the_slow_step_comes_where_torchdistx_has_it() -> None:
    """After f + 1 steps, with one process: averaging changes nothing, the slow momentum does."""
    import torch
    import torch.distributed as dist

    from torchrelay.compat.torchdistx.slowmo.slowmo_optimizer import SlowMomentumOptimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        param = torch.nn.Parameter(torch.zeros(1))
        optimizer = SlowMomentumOptimizer(
            torch.optim.SGD([param], lr=1.0), slowmo_freq=3, slowmo_factor=0.5, slowmo_lr=2.0
        )
        seen = []
        for _ in range(7):
            param.grad = torch.ones(1)
            optimizer.step()
            seen.append(param.item())
    finally:
        dist.destroy_process_group()
    # At step 4: u = (0 + 4) / 1 = 4, x = 0 - 2 * 4; at step 7: u = 0.5 * 4 + (-8 + 11) = 5, x = -8
    # - 2 * 5.
    assert seen == [-1, -2, -3, -8, -9, -10, -18]


def test_attributes_that_scripts_for_torchdistx_use() -> None:
    import pytest
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    from torchrelay.compat.torchdistx.gossip_grad import GossipGraDState
    from torchrelay.compat.torchdistx.slowmo.slowmo_comm import SlowMoState
    from torchrelay.compat.torchdistx.slowmo.slowmo_optimizer import SlowMomentumOptimizer

    def made(averager: type | None = None) -> tuple[torch.nn.Parameter, SlowMomentumOptimizer]:
        param = torch.nn.Parameter(torch.zeros(1))
        optimizer = SlowMomentumOptimizer(torch.optim.SGD([param], lr=1.0), 3, 0.5, 2.0)
        if averager is not None:
            optimizer.averager = averager(period=3)
        return param, optimizer

    def run(param: torch.nn.Parameter, optimizer: SlowMomentumOptimizer, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            param.grad = torch.ones(1)
            optimizer.step()
            seen.append(param.item())
        return seen

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        param, optimizer = made()
        assert (
            optimizer.averager.step,
            optimizer.averager.period,
            optimizer.averager.warmup_steps,
        ) == (
            0,
            3,
            0,
        )
        assert "SGD" in repr(optimizer) and optimizer.state is optimizer._base_optim.state
        seen = run(param, optimizer, 7)
        assert optimizer.averager.step == optimizer.state_dict()["step"] == 7
        assert run(*made(PeriodicModelAverager), 7) == seen

        other, resumed = made()
        other.data.copy_(param)
        resumed.load_state_dict(optimizer.state_dict())
        assert resumed.averager.step == 7
        assert run(other, resumed, 3) == run(param, optimizer, 3)
        with pytest.raises(ValueError, match="slowmo_freq"):
            SlowMomentumOptimizer(torch.optim.SGD([param], lr=1.0), slowmo_freq=0)

        for state in (SlowMoState(), SlowMoState(sync_grads=False), GossipGraDState(1)):
            assert isinstance(state, DefaultState) and state.process_group is not None
            assert state.world_size == state.gradient_predivide_factor == 1
            assert state.gradient_postdivide_factor == 1
        gossip = GossipGraDState(2)
        assert (gossip.gossip_period, gossip.iter, gossip.num_modules) == (1, 0, 2)
        with pytest.raises(ValueError, match="num_modules"):
            GossipGraDState(0)
    finally:
        dist.destroy_process_group()


def test_arguments_that_torchdistx_takes_by_position() -> None:
    import torch

    from torchrelay.compat.torchdistx.deferred_init import (
        deferred_init,
        is_deferred,
        materialize_module,
    )

    module = deferred_init(torch.nn.BatchNorm1d, 3)
    materialize_module(module, True)
    assert not is_deferred(module.get_buffer("running_mean")) and is_deferred(module.weight)
    materialize_module(module, False, lambda one: False)
    assert is_deferred(module.weight)
