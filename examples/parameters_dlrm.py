"""Click prediction as DLRM does it: bags of categories in a parameter table, a dense part in
DistributedDataParallel over ``sml``::

    python examples/parameters_dlrm.py
    torchrun --standalone --nproc-per-node 2 examples/parameters_dlrm.py

The clicks are made: each category has a hidden weight, and a bag is clicked if its weights and the
dense features outweigh the rest.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay.parameters import EmbeddingBag, KeyInit, optim

CATEGORIES, DIM, DENSE, BATCH, BAG, STEPS = 5_000, 16, 8, 512, 6, 150


class Model(nn.Module):
    """The dense part: it sees the sum of a bag's embeddings and the dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(2 * DIM + 1, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, bags: Tensor, dense: Tensor) -> Tensor:
        """Return the logit of each click, ``(b,)``."""
        features = self.bottom(dense)
        interaction = (bags * features).sum(1, keepdim=True)
        logits: Tensor = self.top(torch.cat([bags, features, interaction], 1)).squeeze(1)
        return logits


def make_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return categories ``(BATCH, BAG)``, dense features and clicks."""
    hidden = torch.randn(CATEGORIES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    categories = (CATEGORIES * torch.rand(BATCH, BAG, generator=generator) ** 3).long()
    dense = torch.randn(BATCH, DENSE, generator=generator)
    return categories, dense, (hidden[categories].sum(1) + dense[:, 0] > 0).float()


def main() -> None:
    dist.init_process_group("sml")  # under torchrun; without it, a group of one process
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    init = KeyInit("normal", 0.0, 0.05)
    bags = EmbeddingBag(CATEGORIES, DIM, mode="sum", optimizer=optim.adagrad(0.2), init=init)
    rows = bags.table.optimizer()
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        categories, dense, clicks = make_batch(1 + step * size + rank)
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(bags(categories), dense), clicks
        )
        optimizer.zero_grad()
        rows.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rows.step()  # the owner of each row applies Adagrad
    with torch.no_grad():
        categories, dense, clicks = make_batch(1_000_000 + rank)
        right = ((model(bags(categories), dense) > 0) == (clicks > 0)).float().mean()
    dist.all_reduce(right, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"{right:.1%} of unseen clicks predicted; {bags.table.metrics()}")
    assert right > 0.75
    bags.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
