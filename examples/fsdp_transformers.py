"""FSDP2 and a transformers model that is never built whole: deferred, sharded, saved, and resumed
from its checkpoint without being initialised::

    torchrun --standalone --nproc-per-node 2 examples/fsdp_transformers.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from torchrelay import checkpoint
from torchrelay.deferred import deferred_init, materialize_module

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def sharded_model() -> LlamaForCausalLM:
    """Return the model, cut over all ranks, without values."""
    torch.manual_seed(0)
    model = deferred_init(LlamaForCausalLM, CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, first: int, last: int
) -> float:
    """Run the steps from ``first`` to ``last``; return this rank's loss of the last one."""
    for step in range(first, last):
        # The data of a step depends on nothing but the step and the rank.
        seed = step * dist.get_world_size() + dist.get_rank()
        tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    dist.init_process_group("sml")
    with tempfile.TemporaryDirectory() as mine:
        folders = [mine]
        dist.broadcast_object_list(folders)  # rank 0's
        path = f"{folders[0]}/step-5"

        model = sharded_model()
        materialize_module(model)  # each rank computes its shards only
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, 0, 5)
        checkpoint.save({"model": model, "optimizer": optimizer, "step": 5}, path)
        expected = train(model, optimizer, 5, 10)

        model = sharded_model()
        checkpoint.load({"model": model}, path)  # straight into the shards
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = {"optimizer": optimizer, "step": 0}
        checkpoint.load(state, path)
        loss = train(model, optimizer, int(state["step"]), 10)  # type: ignore[call-overload]
        print(f"rank {dist.get_rank()}: loss {loss:.6f}; without the interruption {expected:.6f}")
        assert loss == expected
        dist.barrier()  # before rank 0 removes its folder
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
