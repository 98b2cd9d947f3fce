"""Training with the same seeded batches for any number of processes; each trains its share of every
batch.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay import _torch, errors
from torchrelay.demo.evaluation import with_reciprocals
from torchrelay.demo.model import ComplEx, entities_of
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.triples import Graph
from torchrelay.errors import ArgumentError
from torchrelay.parameters import Embedding, IntentLoader, TableWeight
from torchrelay.world import World

__all__ = ["Batches", "Trainer", "compare_all_reduce", "compare_lookups", "compare_steps"]

_ROUNDS = 13


@dataclass(frozen=True)
class Batches:
    """The batches of training: this rank's share of each, and its own negatives."""

    triples: Tensor
    entities: int
    batch_size: int
    negatives: int
    seed: int
    world: World

    @classmethod
    def of(cls, graph: Graph, options: DemoOptions, world: World) -> Batches:
        triples = with_reciprocals(graph.train, len(graph.relations))
        # Every rank takes the same number of facts, so that the mean of their gradients is the
        # batch's.
        batch_size = min(options.batch_size, len(triples)) // world.size * world.size
        if batch_size == 0:
            raise ArgumentError(
                f"{world.size} processes need at least {world.size} facts in a batch; there are "
                f"{len(triples)}, of which --batch-size takes {options.batch_size}"
            )
        negatives = min(options.negatives, len(graph.entities))
        return cls(triples, len(graph.entities), batch_size, negatives, options.seed, world)

    @property
    def steps(self) -> int:
        """Return the steps of an epoch; facts that do not fill a batch are left out."""
        return len(self.triples) // self.batch_size

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield triples ``(batch_size / ranks, 3)`` and negatives ``(k,)`` of each step of an
        epoch.
        """
        shuffle = torch.Generator().manual_seed(self._seed(number, 0))
        draw = torch.Generator().manual_seed(self._seed(number, 1 + self.world.rank))
        order = torch.randperm(len(self.triples), generator=shuffle)
        for step in range(self.steps):
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            share = self.triples[batch[self.world.rank :: self.world.size]]
            yield share, torch.randperm(self.entities, generator=draw)[: self.negatives]

    def _seed(self, epoch: int, stream: int) -> int:
        """Return a seed that differs for all epochs and streams, and from those of the next
        seed.
        """
        return (self.seed * 1_000_003 + epoch) * 10_007 + stream


class Trainer:
    """A model, wrapped by DistributedDataParallel over ``group``, and its optimizer.

    The optimizer steps all parameters, or all but the entities where they are in a table, which has
    an optimizer of its own.

    Args:
        group: the process group that sums the gradients; None for the default one.
    """

    def __init__(
        self, model: ComplEx, options: DemoOptions, group: dist.ProcessGroup | None = None
    ) -> None:
        self._parallel = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True, static_graph=True
        )
        self._options = options
        self._entities = model.entities
        dense = [one for one in model.parameters() if not isinstance(one, TableWeight)]
        self._optimizer = torch.optim.Adagrad(dense, lr=options.learning_rate, fused=True)

    def step(self, triples: Tensor, negatives: Tensor) -> float:
        """Run one step; return this rank's loss.

        Raises:
            ArgumentError: the loss is not finite.
            TorchRelayError: the group could not sum the gradients, for example because a rank died.
        """
        loss = self._parallel(triples, negatives, self._options.regularisation)
        self._optimizer.zero_grad()
        self._backward(loss)
        self._optimizer.step()
        value = float(loss.item())
        if not math.isfinite(value):
            raise ArgumentError(
                "the loss is not finite any more: the model has diverged; try a lower "
                "--learning-rate"
            )
        return value

    @staticmethod
    def _backward(loss: Tensor) -> None:
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            name, message = _torch.callback_error(error) or ("", "")
            kind = getattr(errors, name, None)
            if kind is None:
                raise
            raise kind(message) from error

    def train(self, batches: Batches, on_epoch: Callable[[int, float], None]) -> None:
        """Train all epochs; call ``on_epoch`` with the epoch, from 1, and its mean loss after each
        epoch.
        """
        epochs = range(1, self._options.epochs + 1)
        steps: Iterable[tuple[Tensor, Tensor]]
        steps = itertools.chain.from_iterable(map(batches.epoch, epochs))
        if isinstance(self._entities, Embedding):  # announce the entities of steps ahead of time
            steps = IntentLoader(steps, lambda step: entities_of(*step), table=self._entities.table)
        total = len(epochs) * batches.steps
        losses = []
        for done, step in enumerate(steps):
            self._set_learning_rate(1 - done / total)
            losses.append(self.step(*step))
            if len(losses) == batches.steps:
                on_epoch(1 + done // batches.steps, statistics.fmean(losses))
                losses.clear()

    def _set_learning_rate(self, share: float) -> None:
        rate = self._options.learning_rate * share
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if isinstance(self._entities, Embedding):
            self._entities.table.set_learning_rate(rate)


def compare_steps(
    models: Mapping[str, ComplEx],
    batches: Batches,
    options: DemoOptions,
    groups: Mapping[str, dist.ProcessGroup],
) -> dict[str, float]:
    """Return the median seconds of a training step of each model, over the group of its name."""
    calls = {name: Trainer(model, options, groups[name]).step for name, model in models.items()}
    return _in_turns(calls, batches)


def compare_lookups(
    embedding: Embedding,
    rows: Tensor,
    batches: Batches,
    options: DemoOptions,
    group: dist.ProcessGroup,
) -> dict[str, float]:
    """Return the median seconds of the work of a step on entities: lookup, gradients, update.

    ``table`` does it by ``embedding``; ``sparse`` as torch does, with ``nn.Embedding(sparse=True)``
    in DistributedDataParallel over ``group`` and its sparse Adagrad, starting from ``rows``.
    """
    theirs = nn.Embedding.from_pretrained(rows.clone(), freeze=False, sparse=True)  # type: ignore[no-untyped-call]
    parallel = DistributedDataParallel(theirs, process_group=group)
    optimizer = torch.optim.Adagrad(theirs.parameters(), lr=options.learning_rate)
    # Without this choice torch warns.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]

    def look_up(module: nn.Module, triples: Tensor, negatives: Tensor) -> None:
        found = module(entities_of(triples, negatives))
        found.backward(torch.full_like(found, 1e-3))

    def sparse(triples: Tensor, negatives: Tensor) -> None:
        optimizer.zero_grad()
        look_up(parallel, triples, negatives)
        optimizer.step()

    return _in_turns({"table": partial(look_up, embedding), "sparse": sparse}, batches)


def compare_all_reduce(
    size: int, groups: Mapping[str, dist.ProcessGroup], batches: Batches
) -> dict[str, float]:
    """Return the median seconds of an all-reduce of ``size`` float32 over each group."""
    gradients = torch.zeros(size)

    def reduce(group: dist.ProcessGroup, *_: Tensor) -> None:
        dist.all_reduce(gradients, group=group)

    return _in_turns({name: partial(reduce, group) for name, group in groups.items()}, batches)


def _in_turns(
    calls: Mapping[str, Callable[[Tensor, Tensor], object]], batches: Batches
) -> dict[str, float]:
    """Return the median seconds of each call for a step, which all ranks start together."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    steps = itertools.cycle(batches.epoch(0))
    for number, step in enumerate(itertools.islice(steps, _ROUNDS)):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call(*step)
            if number:  # the first one sets things up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}
