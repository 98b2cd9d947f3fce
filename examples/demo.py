"""The demo as a program: learn the code graph of Python's standard library, on one process or
several::

    python examples/demo.py [EPOCHS]
    torchrun --standalone --nproc-per-node 2 examples/demo.py [EPOCHS]

``torchrelay demo`` does the same, with the usual way timed beside it.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from torchrelay.deferred import deferred_init, materialize_module
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
from torchrelay.demo.model import ComplEx
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.training import Batches, Trainer
from torchrelay.demo.triples import Graph
from torchrelay.parameters import Table, optim
from torchrelay.world import World


def build(graph: Graph, dim: int, table: Table) -> ComplEx:
    """The model: relations in every process, entities in the table, to which each process brings
    its share.
    """
    entities = len(graph.entities)
    first, last = (entities * (table.worker_index + i) // table.workers for i in (0, 1))
    # No memory is taken and no number drawn until the module is materialised; then it equals the
    # eager one.
    torch.manual_seed(0)
    model = deferred_init(ComplEx, entities, len(graph.relations), dim)
    mine = (slice(first, last),)
    materialize_module(model, shard=lambda name, _: mine if name == "entities.weight" else None)
    table.set(torch.arange(first, last), model.rows)
    model.move_entities(table)
    table.sync()
    return model


def main(epochs: int) -> None:
    world = World.from_environment()
    options = DemoOptions(epochs=epochs)
    graph = standard_library_graph()

    # The same for one process as for many; under torchrun, init_process_group("sml") alone does it
    # too.
    dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=world.size)
    adagrad = optim.adagrad(options.learning_rate)
    with Table.create(
        len(graph.entities), 2 * options.dim, optimizer=adagrad, apply_gradients="backward"
    ) as table:
        model = build(graph, options.dim, table)
        Trainer(model, options).train(
            Batches(graph, options, world), on_epoch=lambda epoch, loss: None
        )
        table.sync()
        model = model.gathered()

    # Each rank answers its share of the questions; sums of shares add up.
    questions = with_reciprocals(graph.test, len(graph.relations))[world.rank :: world.size]
    scorers: dict[str, Scorer] = {
        "the model": model.score_all,
        "the most frequent answer": MostFrequent.of(graph),
    }
    for name, scorer in scorers.items():
        sums = sum_metrics(rank_answers(scorer, questions, Answers(graph)))
        dist.all_reduce(sums)
        metrics = RankingMetrics.from_sums(sums)
        if world.rank == 0:
            print(f"test MRR of {name}: {metrics.mrr:.4f} ({metrics.questions:,} questions)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else DemoOptions.epochs)
