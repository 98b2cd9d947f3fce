"""The checkpoint lines of torchdistX's README, on two ranks, with a model of ShardedTensors.

The README's first import is not Python (``from torchdistx.checkpoint as cp``); everything after it
is as printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.world import World


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
@pytest.mark.processes(2)
def test_the_readme_lines_run(tmp_path: Path, world: World) -> None:
    import torch.distributed as dist
    from torch.distributed._shard import shard_parameter
    from torch.distributed._shard.sharded_tensor import state_dict_hook
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    from torchrelay import compat

    compat.install("torchdistx")
    import torchdistx.checkpoint as cp  # type: ignore[import-not-found]

    dist.init_process_group("gloo", store=world.connect(), rank=world.rank, world_size=world.size)

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Linear(6, 10)
        whole = model.weight.detach().clone()
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
        shard_parameter(model, "weight", spec)
        model._register_state_dict_hook(state_dict_hook)
        return model, whole

    model, whole = made(0)
    fs_writer = cp.FileSystemWriter(path=f"{tmp_path}/checkpoint/")
    cp.save_state_dict(state_dict=model.state_dict(), storage_writer=fs_writer)

    other, _ = made(1)
    state = other.state_dict()
    cp.load_state_dict(
        state_dict=state, storage_reader=cp.FileSystemReader(f"{tmp_path}/checkpoint")
    )
    (shard,) = state["weight"].local_shards()
    assert torch.equal(shard.tensor, whole[5 * world.rank : 5 * world.rank + 5])
    assert torch.equal(state["bias"], model.bias)

    plain = {"weight": torch.zeros(10, 6), "bias": torch.zeros(10)}
    cp.load_state_dict(plain, cp.FileSystemReader(f"{tmp_path}/checkpoint"))
    assert torch.equal(plain["weight"], whole)
    with pytest.raises(NotImplementedError, match="rank 0 coordinates"):
        cp.save_state_dict(plain, fs_writer, coordinator_rank=1)
