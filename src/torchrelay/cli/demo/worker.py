"""What each process of the main job runs, under torchrun: ``python -m torchrelay.cli.demo.worker OPTIONS``."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from rich.console import Console

import torchrelay.aggregation  # noqa: F401 - registers the backend sml
from torchrelay.cli.demo import report
from torchrelay.cli.demo.evaluation import (
    Answers,
    Metrics,
    Scorer,
    frequency_scorer,
    rank_answers,
    sum_metrics,
    with_reciprocals,
)
from torchrelay.cli.demo.model import ComplEx
from torchrelay.cli.demo.options import Options
from torchrelay.cli.demo.predictions import predict
from torchrelay.cli.demo.report import Stage
from torchrelay.cli.demo.training import Batches, Trainer, compare_all_reduce, compare_steps
from torchrelay.cli.demo.triples import Graph, read_graph
from torchrelay.deferred import deferred_init, materialize_module
from torchrelay.errors import ArgumentError, ConfigError, DataError, TorchRelayError
from torchrelay.world import World

__all__ = ["Job", "main"]

# torchrun kills what is left 30 s after it asked for the end.
_LAST_WORDS_S = 15.0


class Job:
    """The stages, in order, as one rank goes through them."""

    def __init__(self, options: Options, world: World) -> None:
        self.options, self.world = options, world
        self.console = Console() if world.rank == 0 else None
        self.stages: list[Stage] = []

    def run(self) -> None:
        self._start()
        graph = self._read()
        model = self._build(graph)
        batches = Batches.of(graph, self.options, self.world)
        self._train(model, batches)
        self._evaluate(model, graph)
        self._show_predictions(model, graph)
        whole_s = self.options.reading_s + time.time() - self.options.launched_at
        self.stages.append(Stage("all of it", whole_s))
        self._print(report.stages_table(self.stages))

    def _start(self) -> None:
        # The first deferred module loads torch's fake tensors, which takes seconds, whatever its size.
        materialize_module(deferred_init(ComplEx, 1, 1, 1))
        dist.barrier()
        self.stages.append(
            Stage(f"start {self.world.size} processes", time.time() - self.options.launched_at)
        )

    def _read(self) -> Graph:
        start = time.perf_counter()
        graph = read_graph(self.options.data, allow_unseen=self.options.allow_unseen)
        name = "read the graph, kept from an earlier run" if self.options.cached else "read the graph"
        self.stages.append(Stage(name, self.options.reading_s + time.perf_counter() - start))
        self._print(f"[bold]{self.options.data}[/bold]")
        self._print(
            f"{len(graph.entities):,} entities, {len(graph.relations)} relations; facts: "
            f"{len(graph.train):,} train, {len(graph.valid):,} valid, {len(graph.test):,} test"
        )
        if graph.unseen:
            self._print(f"{graph.unseen} facts of valid and test have an entity that train lacks")
        return graph

    def _build(self, graph: Graph) -> ComplEx:
        """The model, built deferred; beside it the eager one, to which it is equal bit for bit."""
        sizes = (len(graph.entities), len(graph.relations), self.options.dim)
        torch.manual_seed(self.options.seed)
        start = time.perf_counter()
        model: ComplEx = deferred_init(ComplEx, *sizes)
        materialize_module(model)
        deferred_s = time.perf_counter() - start
        torch.manual_seed(self.options.seed)
        start = time.perf_counter()
        eager = ComplEx(*sizes)
        eager_s = time.perf_counter() - start
        equal = all(map(torch.equal, model.parameters(), eager.parameters()))
        usual = "eager; equal bit for bit" if equal else "eager; NOT EQUAL, please report this"
        self.stages.append(Stage("build the model, deferred and materialised", deferred_s, usual, eager_s))
        return model

    def _train(self, model: ComplEx, batches: Batches) -> None:
        epochs = self.options.epochs
        start = time.perf_counter()
        with report.TrainingProgress(self.console, epochs, batches.steps) as progress:
            Trainer(model, self.options).train(batches, progress.step)
        seconds = time.perf_counter() - start
        self.stages.append(Stage(f"train {epochs} epochs of {batches.steps} steps, DDP over sml", seconds))
        groups = {name: dist.new_group(backend=name) for name in ("sml", "gloo")}
        step = compare_steps(model, batches, self.options, groups)
        self.stages.append(Stage("  a step (median)", step["sml"], "DDP over gloo", step["gloo"]))
        reduce = compare_all_reduce(model, groups)
        self.stages.append(Stage("  its all-reduce alone", reduce["sml"], "gloo", reduce["gloo"]))

    def _evaluate(self, model: ComplEx, graph: Graph) -> None:
        start = time.perf_counter()
        answers = Answers(graph)
        baseline = frequency_scorer(graph)
        rows = {
            "valid": self._measure(model.score_all, graph, graph.valid, answers),
            "test": self._measure(model.score_all, graph, graph.test, answers),
            "test, most frequent answer": self._measure(baseline, graph, graph.test, answers),
        }
        self.stages.append(Stage("evaluate on valid and test", time.perf_counter() - start))
        self._print(report.metrics_table(rows))

    def _measure(self, score: Scorer, graph: Graph, triples: torch.Tensor, answers: Answers) -> Metrics:
        """Metrics of all questions; each rank answers its share."""
        questions = with_reciprocals(triples, len(graph.relations))
        share = questions[self.world.rank :: self.world.size]
        sums = sum_metrics(rank_answers(score, share, answers))
        dist.all_reduce(sums)
        return Metrics.from_sums(sums)

    def _show_predictions(self, model: ComplEx, graph: Graph) -> None:
        if self.console is not None:
            self.console.print(report.predictions_table(predict(model, graph, self.options.seed)))

    def _print(self, what: object) -> None:
        if self.console is not None:
            self.console.print(what)


@contextmanager
def _process_group(timeout_s: float) -> Iterator[None]:
    dist.init_process_group("sml", timeout=timedelta(seconds=timeout_s))
    yield
    # Not after an error: with a dead peer there is nothing to take leave of.
    dist.destroy_process_group()


def _last_words(_number: int, _frame: FrameType | None) -> None:
    """torchrun ends the ranks that are left as soon as one has died; they stay long enough to say which."""
    signal.setitimer(signal.ITIMER_REAL, _LAST_WORDS_S)


def main() -> None:
    """Exit code 0; 1 after an error, printed as one sentence with the rank; 2 if the caller's input caused it."""
    signal.signal(signal.SIGTERM, _last_words)
    world = World.from_environment()
    options = Options.from_json(sys.argv[1])
    try:
        with _process_group(options.timeout_s):
            Job(options, world).run()
    except TorchRelayError as error:
        # One write, so that the lines of ranks that fail at the same moment stay apart; print makes two.
        sys.stderr.write(f"torchrelay demo, rank {world.rank}: {error}\n")
        sys.exit(2 if isinstance(error, ArgumentError | ConfigError | DataError) else 1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
