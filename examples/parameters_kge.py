"""Knowledge-graph embeddings (ComplEx) in a parameter table, on the code graph of Python's standard
library::

    python examples/parameters_kge.py
    torchrun --standalone --nproc-per-node 2 examples/parameters_kge.py
    torchrun --standalone --nproc-per-node 2 examples/parameters_kge.py --node-per-process
    python examples/parameters_kge.py --data WN18RR --allow-unseen --epochs 20

Entities and relations are rows of one table, which Adagrad inside the table updates. Processes of
one host share its memory; with ``--node-per-process`` each is a node of its own, as if on another
host. The loader announces the keys of the next batches, negatives included, so that training finds
them in its own memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchrelay.demo.code_graph import standard_library_graph
from torchrelay.demo.evaluation import (
    Answers,
    MostFrequent,
    RankingMetrics,
    Scorer,
    rank_answers,
    sum_metrics,
    with_reciprocals,
)
from torchrelay.demo.model import ComplEx, log_sum_exp_of_product
from torchrelay.demo.triples import Graph, read_graph
from torchrelay.parameters import Embedding, IntentLoader, KeyInit, Table, optim

BATCH_SIZE, NEGATIVES, TOGETHER, N3_WEIGHT, SHOWN = 512, 512, 8, 0.05, 6


def read(data: Path | None, allow_unseen: bool) -> Graph:
    """The graph in ``data``, or the code graph."""
    if data is None:
        return standard_library_graph()
    return read_graph(data, allow_unseen=allow_unseen)


@dataclass
class Batch:
    """Facts ``(b, 3)`` of an epoch, and the rows of the table that a step on them uses."""

    epoch: int
    facts: Tensor
    entities: int
    relations: int

    def keys(self) -> Tensor:
        """Subjects, objects; then relations, which follow the entities, and their reciprocals."""
        s, r, o = self.facts.unbind(1)
        return torch.cat([s, o, self.entities + r, self.entities + self.relations + r])


class Batches:
    """This worker's share of all epochs."""

    def __init__(self, graph: Graph, worker_index: int, workers: int, epochs: int) -> None:
        self.sizes = len(graph.entities), len(graph.relations)
        # A worker takes the facts about its own subjects, so that it mostly shares objects with
        # others.
        self.facts = graph.train[graph.train[:, 0] % workers == worker_index]
        # Workers make the same number of steps, so that their clocks stay together.
        self.steps = max(1, len(graph.train) // (BATCH_SIZE * workers))
        self.epochs = epochs
        self.generator = torch.Generator().manual_seed(worker_index)

    def __iter__(self) -> Iterator[Batch]:
        for epoch in range(1, self.epochs + 1):
            order = self._order()
            for step in range(self.steps):
                mine = order[torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE) % len(order)]
                yield Batch(epoch, self.facts[mine], *self.sizes)

    def _order(self) -> Tensor:
        """A random order in which facts about one object stand together, some at a time: its row is
        needed less often.
        """
        objects, index, counts = torch.unique(
            self.facts[:, 2], return_inverse=True, return_counts=True
        )
        shuffled = torch.randperm(len(self.facts), generator=self.generator)
        shuffled = shuffled[index[shuffled].argsort(stable=True)]
        within = torch.arange(len(shuffled)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        group = index[shuffled] + within // TOGETHER * len(objects)
        place = torch.randperm(int(group.max()) + 1, generator=self.generator)
        return shuffled[place[group].argsort(stable=True)]


def draw_negatives(table: Table, announce: bool) -> Tensor:
    """Entities for the next step that this node has now, and, announced, keeps until then: hardly a
    message.
    """
    keys = table.sample(NEGATIVES)
    if announce:
        table.intent(keys, table.clock + 1)
    return keys


def loss_of(rows: Tensor, batch: Batch, negatives: Tensor, model: ComplEx) -> Tensor:
    """Cross-entropy of each object, and of each subject, against shared negatives; and N3 (Lacroix
    et al., 2018).
    """
    size = len(batch.facts)
    s, o, r, reciprocal, others = torch.split(rows, [size, size, size, size, len(negatives)])
    query = torch.cat([model.query(s, r), model.query(o, reciprocal)])
    right = (query * torch.cat([o, s])).sum(1)
    expected = torch.cat([batch.facts[:, 2], batch.facts[:, 0]])
    clash = (expected.unsqueeze(1) == negatives).nonzero()  # a negative may be the answer itself
    wrong = log_sum_exp_of_product(query, others, *clash.unbind(1))
    factors = torch.cat([s, o, r, reciprocal]).view(4 * size, 2, -1)
    n3 = (factors.square().sum(1) + 1e-12).pow(1.5).sum()
    return (torch.logaddexp(right, wrong) - right).mean() + N3_WEIGHT * n3 / (2 * size)


class Progress:
    """A line an epoch, from worker 0."""

    def __init__(self, table: Table, steps: int) -> None:
        self.table, self.steps = table, steps
        self.started_s, self.before, self.losses = (
            time.perf_counter(),
            table.metrics(),
            list[Tensor](),
        )

    def step(self, epoch: int, loss: Tensor) -> None:
        self.losses.append(loss)
        if len(self.losses) < self.steps:
            return
        seconds, now = time.perf_counter() - self.started_s, self.table.metrics()
        if self.table.worker_index == 0:
            mean = torch.stack(self.losses).mean()
            print(
                f"epoch {epoch}: loss {mean:.3f}, {seconds:.2f} s, {now - self.before}", flush=True
            )
        self.started_s, self.before, self.losses = time.perf_counter(), now, []


@torch.no_grad()
def gathered(graph: Graph, table: Table, dim: int) -> ComplEx:
    """The model, out of the table."""
    entities, relations = len(graph.entities), len(graph.relations)
    table.sync()
    model = ComplEx(entities, relations, dim)
    model.rows.copy_(table.pull(torch.arange(entities)))
    model.relations.copy_(table.pull(torch.arange(entities, table.num_keys)))
    return model


def evaluate(score: Scorer, graph: Graph, table: Table, questions: int) -> RankingMetrics:
    """Filtered ranking of a sample of the test facts, shared among all workers."""
    test = with_reciprocals(graph.test, len(graph.relations))
    sample = test[torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:questions]]
    ranks = rank_answers(score, sample[table.worker_index :: table.workers], Answers(graph))
    with Table.create(1, 5, dtype=torch.float64, name="ranks") as sums:
        sums.push(torch.tensor([0]), sum_metrics(ranks).view(1, -1))
        sums.sync()
        return RankingMetrics.from_sums(sums.pull(torch.tensor([0])).squeeze(0))


@torch.no_grad()
def show(model: ComplEx, graph: Graph) -> None:
    """Answers to some questions of the test, for a person to judge."""
    chosen = graph.test[
        torch.randperm(len(graph.test), generator=torch.Generator().manual_seed(1))[:SHOWN]
    ]
    for (s, r, o), scores in zip(
        chosen.tolist(), model.score_all(chosen[:, 0], chosen[:, 1]), strict=True
    ):
        known = graph.train[(graph.train[:, 0] == s) & (graph.train[:, 1] == r), 2]
        scores[known] = -torch.inf
        answers = ", ".join(graph.entities[i] for i in scores.topk(3).indices.tolist())
        print(
            f"{graph.entities[s]} {graph.relations[r]} ... {answers}; expected {graph.entities[o]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with train.txt, valid.txt, test.txt")
    parser.add_argument("--allow-unseen", action="store_true")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--techniques", default="all")
    parser.add_argument("--no-intents", action="store_true")
    parser.add_argument("--node-per-process", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)

    graph = read(options.data, options.allow_unseen)
    rows = len(graph.entities) + 2 * len(graph.relations)
    model = ComplEx(1, 1, options.dim)
    with Table.create(
        rows,
        2 * options.dim,
        optimizer=optim.adagrad(options.learning_rate),
        apply_gradients="backward",  # asynchronous: no worker waits for another's batch
        init=KeyInit("normal", 0.0, 0.01, seed=1),
        techniques=options.techniques,
        node_of_rank=(lambda rank: rank) if options.node_per_process else None,
    ) as table:
        table.enable_sampling_support("local", max=len(graph.entities), seed=table.worker_index)
        embedding = Embedding(rows, 2 * options.dim, table=table)
        batches = Batches(graph, table.worker_index, table.workers, options.epochs)
        loader = batches if options.no_intents else IntentLoader(batches, Batch.keys, table=table)
        progress = Progress(table, batches.steps)
        upcoming = draw_negatives(table, announce=not options.no_intents)
        for batch in loader:
            negatives, upcoming = upcoming, draw_negatives(table, announce=not options.no_intents)
            loss = loss_of(embedding(torch.cat([batch.keys(), negatives])), batch, negatives, model)
            loss.backward()  # type: ignore[no-untyped-call]
            progress.step(batch.epoch, loss.detach())
        model = gathered(graph, table, options.dim)
        metrics = evaluate(model.score_all, graph, table, options.questions)
        baseline = evaluate(MostFrequent.of(graph), graph, table, options.questions)
        if table.worker_index == 0:
            show(model, graph)
            print(
                f"test: MRR {metrics.mrr:.3f}, hits@10 {metrics.hits[2]:.3f}, {metrics.questions} "
                "questions; "
                f"the most frequent answers: MRR {baseline.mrr:.3f}"
            )
        table.sync()


if __name__ == "__main__":
    main()
