"""A transformer built without memory, then four ranks' shards of it, each equal to the eager
model's rows.

python examples/deferred_shards.py
"""

from __future__ import annotations

import torch
from torch import nn

from torchrelay.deferred import deferred_init, materialize_module

RANKS = 4


def build() -> nn.Module:
    """Four encoder layers, about 12.6 million parameters."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=4)


def rows_of(rank: int, tensor: torch.Tensor) -> tuple[slice, ...]:
    """The rows of ``tensor`` that ``rank`` holds."""
    each = -(-tensor.shape[0] // RANKS)
    return (slice(rank * each, (rank + 1) * each),)


def main() -> None:
    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    whole = deferred_init(build)
    print("one layer's weight:", whole.get_parameter("layers.0.linear1.weight"))
    for rank in range(RANKS):
        torch.manual_seed(0)
        module = deferred_init(build)
        materialize_module(module, shard=lambda name, tensor, rank=rank: rows_of(rank, tensor))
        parameters = dict(eager.named_parameters())
        same = all(
            torch.equal(p, parameters[name][rows_of(rank, parameters[name])])
            for name, p in module.named_parameters()
        )
        count = sum(p.numel() for p in module.parameters())
        print(f"rank {rank}: {count:,} numbers, equal to the eager model's: {same}")


if __name__ == "__main__":
    main()
