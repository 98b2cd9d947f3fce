"""What bench_checkpoint.py runs in fresh processes: saving a model, and loading a shard of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench_deferred import SEED, builder, measured, part

from torchrelay.checkpoint import load, save
from torchrelay.deferred import deferred_init

__all__ = ["load_eager", "load_shard", "save_model"]

SHARDS = 16


def save_model(model: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(SEED)
    state = builder(model)().state_dict()
    save(state, f"{folder}/model")
    dcp.save(state, checkpoint_id=f"{folder}/model-dcp", no_dist=True)
    torch.save(
        {key: value[part(value, SHARDS) or ...] for key, value in state.items()},
        f"{folder}/shard.pt",
    )
    return {}


def load_shard(model: str, folder: str) -> dict[str, Any]:
    """Deferred, and one shard of each tensor allocated and read."""
    build = builder(model)

    def work() -> torch.nn.Module:
        module = deferred_init(build)
        load(module, f"{folder}/model", shard=lambda _, tensor: part(tensor, SHARDS))
        return module

    module, figures = measured(work)
    return checked(module.state_dict(), folder, figures)


def load_eager(model: str, folder: str) -> dict[str, Any]:
    """Built eagerly and read whole by DCP, after which a rank would keep its shard."""
    build = builder(model)

    def work() -> torch.nn.Module:
        module = build()
        dcp.load(module.state_dict(), checkpoint_id=f"{folder}/model-dcp", no_dist=True)
        return module

    module, figures = measured(work)
    shard = {key: value[part(value, SHARDS) or ...] for key, value in module.state_dict().items()}
    return checked(shard, folder, figures)


def checked(shard: dict[str, torch.Tensor], folder: str, figures: dict[str, Any]) -> dict[str, Any]:
    expected = torch.load(f"{folder}/shard.pt")
    wrong = [key for key, value in expected.items() if not torch.equal(shard[key], value)]
    if wrong or len(shard) != len(expected):
        raise SystemExit(
            f"{len(wrong)} of {len(expected)} tensors are not those that were saved: {wrong[:5]}"
        )
    return {
        **figures,
        "model_bytes": sum({t.data_ptr(): t.nbytes for t in shard.values()}.values()),
    }
