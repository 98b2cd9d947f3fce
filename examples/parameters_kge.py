"""Knowledge-graph embeddings (ComplEx) in a parameter table, on the code graph of Python's standard library::

    python examples/parameters_kge.py
    torchrun --standalone --nproc-per-node 2 examples/parameters_kge.py
    torchrun --standalone --nproc-per-node 2 examples/parameters_kge.py --node-per-process
    python examples/parameters_kge.py --data WN18RR --allow-unseen --epochs 20

Entities and relations are rows of one table, which Adagrad inside the table updates. Processes of one host share
its memory; with ``--node-per-process`` each is a node of its own, as if on another host. The loader announces the
keys of the next batches, negatives included, so that training finds them in its own memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.cli.demo.code_graph import prune, read_code_graph, split_facts, standard_library
from torchrelay.cli.demo.evaluation import Answers, Metrics, rank_answers, sum_metrics, with_reciprocals
from torchrelay.cli.demo.model import ComplEx
from torchrelay.cli.demo.triples import Graph, read_graph, write_facts
from torchrelay.parameters import Embedding, IntentLoader, KeyInit, Table, optim

BATCH_SIZE, NEGATIVES, N3_WEIGHT = 512, 512, 0.01


def read(data: Path | None, allow_unseen: bool) -> Graph:
    """The graph in ``data``, or the code graph."""
    if data is not None:
        return read_graph(data, allow_unseen=allow_unseen)
    facts = prune(read_code_graph(standard_library()), at_least=3)
    with tempfile.TemporaryDirectory() as folder:
        for split, share in split_facts(facts, share=0.05, seed=0).items():
            write_facts(Path(folder, f"{split}.txt"), share)
        return read_graph(Path(folder))


class Batches:
    """This worker's share of an epoch: triples ``(b, 3)`` with their negatives ``(k,)``."""

    def __init__(self, graph: Graph, table: Table) -> None:
        self.triples = with_reciprocals(graph.train, len(graph.relations))
        self.entities = len(graph.entities)
        self.table, self.epoch = table, 0

    def __len__(self) -> int:
        return len(self.triples) // (BATCH_SIZE * self.table.workers)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.epoch += 1
        order = torch.randperm(len(self.triples), generator=torch.Generator().manual_seed(self.epoch))
        mine = order[self.table.worker_index :: self.table.workers]
        for step in range(len(self)):
            batch = self.triples[mine[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]]
            yield batch, torch.randint(self.entities, (NEGATIVES,))


def keys_of(batch: tuple[Tensor, Tensor], entities: int) -> Tensor:
    """Rows of subjects, objects and negatives, then of relations, which follow the entities in the table."""
    triples, negatives = batch
    return torch.cat([triples[:, 0], triples[:, 2], negatives, triples[:, 1] + entities])


def loss_of(rows: Tensor, batch: tuple[Tensor, Tensor], model: ComplEx) -> Tensor:
    """Cross-entropy of each object against the shared negatives, and the N3 regulariser (Lacroix et al., 2018)."""
    triples, negatives = batch
    size = len(triples)
    subjects, objects, others, relations = torch.split(rows, [size, size, len(negatives), size])
    query = model.query(subjects, relations)
    wrong = query @ others.T
    wrong = wrong.masked_fill(negatives == triples[:, 2:], -torch.inf)  # a negative may be the object itself
    scores = torch.cat([(query * objects).sum(1, keepdim=True), wrong], dim=1)
    factors = torch.cat([subjects, objects, relations]).view(3 * size, 2, -1)
    n3 = (factors.square().sum(1) + 1e-12).pow(1.5).sum() / size
    return functional.cross_entropy(scores, torch.zeros(size, dtype=torch.int64)) + N3_WEIGHT * n3


@torch.no_grad()
def evaluate(model: ComplEx, graph: Graph, table: Table, questions: int) -> Metrics:
    """Filtered ranking of a sample of the test facts, shared among all workers."""
    table.sync()
    model.rows.data = table.pull(torch.arange(len(graph.entities)))
    model.relations.data = table.pull(torch.arange(len(graph.entities), table.num_keys))
    test = with_reciprocals(graph.test, len(graph.relations))
    sample = test[torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:questions]]
    ranks = rank_answers(model.score_all, sample[table.worker_index :: table.workers], Answers(graph))
    with Table.create(1, 5, dtype=torch.float64, name="ranks") as sums:
        sums.push(torch.tensor([0]), sum_metrics(ranks).view(1, -1))
        sums.sync()
        return Metrics.from_sums(sums.pull(torch.tensor([0])).squeeze(0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with train.txt, valid.txt, test.txt")
    parser.add_argument("--allow-unseen", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--questions", type=int, default=4000)
    parser.add_argument("--techniques", default="all")
    parser.add_argument("--no-intents", action="store_true")
    parser.add_argument("--node-per-process", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)

    graph = read(options.data, options.allow_unseen)
    entities, relations = len(graph.entities), len(graph.relations)
    model = ComplEx(entities, relations, options.dim)
    rows = entities + 2 * relations
    with Table.create(
        rows,
        2 * options.dim,
        optimizer=optim.adagrad(options.learning_rate),
        init=KeyInit("normal", 0.0, 0.01, seed=1),
        techniques=options.techniques,
        node_of_rank=(lambda rank: rank) if options.node_per_process else None,
    ) as table:
        embedding = Embedding(rows, 2 * options.dim, table=table)
        batches = Batches(graph, table)
        loader = (
            batches
            if options.no_intents
            else IntentLoader(batches, lambda batch: keys_of(batch, entities), table=table)
        )
        for epoch in range(1, options.epochs + 1):
            started_s, before, losses = time.perf_counter(), table.metrics(), []
            for batch in loader:
                loss = loss_of(embedding(keys_of(batch, entities)), batch, model)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            seconds = time.perf_counter() - started_s
            if table.worker_index == 0:
                mean = torch.stack(losses).mean()
                print(
                    f"epoch {epoch}: loss {mean:.3f}, {seconds:.1f} s, {table.metrics() - before}", flush=True
                )
        metrics = evaluate(model, graph, table, options.questions)
        if table.worker_index == 0:
            print(
                f"test: MRR {metrics.mrr:.3f}, hits@10 {metrics.hits[2]:.3f}, {metrics.questions} questions"
            )
        table.sync()


if __name__ == "__main__":
    main()
