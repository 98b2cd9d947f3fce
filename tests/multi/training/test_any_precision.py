from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchrelay.training._any_precision import AnyPrecisionAdamW
from torchrelay.world import World


def _train(model: nn.Module, **options: Any) -> list[torch.Tensor]:
    """Gradients are the same on all ranks, so that averaging two of them is exact."""
    optimizer = AnyPrecisionAdamW(model.parameters(), lr=0.01, weight_decay=0.1, **options)
    for step in range(5):
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(
            next(model.parameters()).dtype
        )
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    state = [tensor for param in model.parameters() for tensor in optimizer.state[param].values()]
    return [*(param.detach() for param in model.parameters()), *state]


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)


@pytest.mark.processes(2)
def test_fully_sharded_parameters_move_as_whole_ones(world: World) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", store=world.connect(30), rank=world.rank, world_size=world.size)
    for dtype, kahan in ((torch.float32, False), (torch.bfloat16, True)):
        whole = _train(_model(dtype), use_kahan_summation=kahan)
        sharded_model = _model(dtype)
        fully_shard(sharded_model)
        sharded = _train(sharded_model, use_kahan_summation=kahan)
        assert any(isinstance(tensor, DTensor) for tensor in sharded)
        full = [
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in sharded
        ]
        assert all(torch.equal(a, b) for a, b in zip(full, whole, strict=True))
