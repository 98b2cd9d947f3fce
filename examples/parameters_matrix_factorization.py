r"""Matrix factorisation of ratings whose users and items are zipf-distributed, in a parameter
table::

    python examples/parameters_matrix_factorization.py
    torchrun --standalone --nproc-per-node 2 examples/parameters_matrix_factorization.py \
        --node-per-process

The ratings are made: two random factors of rank 8 and noise. So the error that is left is known:
the noise. Each worker has its own users and shares the items, the case for which the manager moves
the rows of users to their worker and copies those of frequent items.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from torchrelay.parameters import Embedding, IntentLoader, KeyInit, Table, optim

USERS, ITEMS, RANK, RATINGS, BATCH_SIZE, NOISE = 20_000, 5_000, 8, 400_000, 4096, 0.1


def zipf(size: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` numbers below ``size``, the k-th likeliest with weight 1 / k."""
    weights = 1 / torch.arange(1, size + 1).double()
    return torch.randperm(size, generator=generator)[
        torch.multinomial(weights, count, replacement=True, generator=generator)
    ]


def make_ratings(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Users, items and ratings, ``(RATINGS,)`` each; every tenth is for the test."""
    generator = torch.Generator().manual_seed(seed)
    users, items = zipf(USERS, RATINGS, generator), zipf(ITEMS, RATINGS, generator)
    left = torch.randn(USERS, RANK, generator=generator) / RANK**0.5
    right = torch.randn(ITEMS, RANK, generator=generator)
    noise = NOISE * torch.randn(RATINGS, generator=generator)
    return users, items, (left[users] * right[items]).sum(1) + noise


class Batches:
    """This worker's users' ratings of an epoch: keys of users, keys of items, ratings."""

    def __init__(self, table: Table, test: bool = False) -> None:
        users, items, ratings = make_ratings()
        in_test = torch.arange(RATINGS) % 10 == 0
        mine = (in_test == test) & (users % table.workers == table.worker_index)
        self.data = users[mine], USERS + items[mine], ratings[mine]
        # Workers make the same number of steps, so that their clocks stay together.
        self.steps = int(0.85 * (~in_test).sum() / table.workers) // BATCH_SIZE
        self.generator = torch.Generator().manual_seed(table.worker_index)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        order = torch.randperm(len(self.data[0]), generator=self.generator)
        for step in range(self.steps):
            batch = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
            yield tuple(part[batch] for part in self.data)  # type: ignore[misc]


def predict(embedding: Embedding, users: Tensor, items: Tensor) -> Tensor:
    left, right = embedding(torch.cat([users, items])).chunk(2)
    ratings: Tensor = torch.linalg.vecdot(left, right)
    return ratings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--node-per-process", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with Table.create(
        USERS + ITEMS,
        RANK,
        optimizer=optim.adagrad(0.2),
        apply_gradients="backward",  # asynchronous: no worker waits for another's batch
        init=KeyInit("normal", 0.0, 0.3, seed=1),
        node_of_rank=(lambda rank: rank) if options.node_per_process else None,
    ) as table:
        embedding = Embedding(USERS + ITEMS, RANK, table=table)
        batches = Batches(table)
        loader = IntentLoader(batches, lambda batch: torch.cat(batch[:2]), table=table)
        for epoch in range(1, options.epochs + 1):
            started_s, before, losses = time.perf_counter(), table.metrics(), []
            for users, items, ratings in loader:
                loss = (predict(embedding, users, items) - ratings).square().sum()
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach() / len(ratings))
            if table.worker_index == 0:
                error, seconds = torch.stack(losses).mean().sqrt(), time.perf_counter() - started_s
                print(
                    f"epoch {epoch}: error {error:.3f}, {seconds:.1f} s, "
                    f"{table.metrics() - before}",
                    flush=True,
                )
        table.sync()
        with torch.no_grad():
            users, items, ratings = Batches(table, test=True).data
            error = (predict(embedding, users, items) - ratings).square().mean().sqrt()
        if table.worker_index == 0:
            baseline = ratings.square().mean().sqrt()
            print(f"test: error {error:.3f}, of guessing 0 {baseline:.3f}, of the noise {NOISE}")
        table.sync()


if __name__ == "__main__":
    main()
