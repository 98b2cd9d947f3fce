"""Training with the same seeded batches for any number of processes; each trains its share of every
batch.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

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

__all__ = ["Batches", "SparseEntities", "Trainer", "compare", "look_up"]

_ROUNDS = 13

Call = Callable[[Tensor, Tensor], object]
"""Takes triples and negatives of a step."""


class Batches:
    """The batches of training: this rank's share of each, and its own negatives.

    Raises:
        ArgumentError: there are fewer facts in a batch than ranks.
    """

    def __init__(self, graph: Graph, options: DemoOptions, world: World) -> None:
        self._world, self._seed = world, options.seed
        self._triples = with_reciprocals(graph.train, len(graph.relations))
        self._entities = len(graph.entities)
        self._negatives = min(options.negatives, self._entities)
        # Every rank takes the same number of facts, so that the mean of their gradients is the
        # batch's.
        num_facts = len(self._triples)
        self._batch_size = min(options.batch_size, num_facts) // world.size * world.size
        if self._batch_size == 0:
            raise ArgumentError(
                f"{world.size} processes need at least {world.size} facts in a batch; there are "
                f"{num_facts}, of which --batch-size takes {options.batch_size}"
            )
        # In an epoch. Facts that do not fill a batch are left out.
        self.steps = num_facts // self._batch_size

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield triples ``(batch_size / ranks, 3)`` and negatives ``(k,)`` of each step of an
        epoch.
        """
        shuffle, draw = (self._generator(number, stream) for stream in (0, 1 + self._world.rank))
        order = torch.randperm(len(self._triples), generator=shuffle)
        for batch in torch.split(order, self._batch_size)[: self.steps]:
            share = self._triples[batch[self._world.rank :: self._world.size]]
            yield share, torch.randperm(self._entities, generator=draw)[: self._negatives]

    def _generator(self, epoch: int, stream: int) -> torch.Generator:
        """Return one that differs for all epochs and streams, and from those of the next seed."""
        return torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) * 10_007 + stream)


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

    def train(
        self,
        batches: Batches,
        on_epoch: Callable[[int, float], None],
        on_step: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Train all epochs; call ``on_epoch`` with the epoch, from 1, and its mean loss after each
        epoch, and ``on_step`` with the steps that are done, and all.
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
            on_step(done + 1, total)
            if len(losses) == batches.steps:
                on_epoch(1 + done // batches.steps, statistics.fmean(losses))
                losses.clear()

    def _set_learning_rate(self, share: float) -> None:
        rate = self._options.learning_rate * share
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if isinstance(self._entities, Embedding):
            self._entities.table.set_learning_rate(rate)


class SparseEntities:
    """The usual way to do the work of a step on entities: ``nn.Embedding(sparse=True)``, starting
    from ``rows``, in DistributedDataParallel over ``group``, with torch's sparse Adagrad.
    """

    def __init__(self, rows: Tensor, options: DemoOptions, group: dist.ProcessGroup) -> None:
        embedding = nn.Embedding.from_pretrained(rows.clone(), freeze=False, sparse=True)  # type: ignore[no-untyped-call]
        self._parallel = DistributedDataParallel(embedding, process_group=group)
        self._optimizer = torch.optim.Adagrad(embedding.parameters(), lr=options.learning_rate)
        # Without this choice torch warns.
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]

    def step(self, triples: Tensor, negatives: Tensor) -> None:
        self._optimizer.zero_grad()
        look_up(self._parallel, triples, negatives)
        self._optimizer.step()


def look_up(entities: nn.Module, triples: Tensor, negatives: Tensor) -> None:
    """Look up the entities of a step, and pass back a gradient."""
    found = entities(entities_of(triples, negatives))
    found.backward(torch.full_like(found, 1e-3))


def compare(ours: Call, usual: Call, batches: Batches) -> tuple[float, float]:
    """Return the median seconds of two calls for a step, which all ranks start together."""
    seconds: dict[Call, list[float]] = {ours: [], usual: []}
    steps = itertools.cycle(batches.epoch(0))
    for number, step in enumerate(itertools.islice(steps, _ROUNDS)):
        for call, times in seconds.items():
            dist.barrier()
            start = time.perf_counter()
            call(*step)
            if number:  # the first one sets things up
                times.append(time.perf_counter() - start)
    return statistics.median(seconds[ours]), statistics.median(seconds[usual])
