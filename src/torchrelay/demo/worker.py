"""The program of each process of the demo, under torchrun: ``python -m torchrelay.demo.worker
OPTIONS``.
"""

from __future__ import annotations

import copy
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from rich.console import Console
from rich.markup import escape

from torchrelay import aggregation, mpi
from torchrelay.checkpoint import load, save
from torchrelay.deferred import deferred_init, materialize_module
from torchrelay.demo import report
from torchrelay.demo.calibration import Calibration, Sum, calibrate
from torchrelay.demo.code_graph import standard_library, standard_library_graph
from torchrelay.demo.evaluation import (
    Answers,
    RankingMetrics,
    Scorer,
    frequency_scorer,
    rank_answers,
    sum_metrics,
    with_reciprocals,
)
from torchrelay.demo.model import ComplEx
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.report import Listing, Report, Stage
from torchrelay.demo.serving import MostFrequent, compare_switches
from torchrelay.demo.training import (
    Batches,
    Trainer,
    compare_all_reduce,
    compare_lookups,
    compare_steps,
)
from torchrelay.demo.triples import Graph, read_graph
from torchrelay.errors import TorchRelayError
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.world import World

__all__ = ["Job", "main"]

# torchrun kills what is left 30 s after it asked for the end.
_LAST_WORDS_S = 15.0

# The parameter that goes into the table instead of into every process.
_IN_TABLE = "entities.weight"


class Job:
    """The stages of the demo on one rank, in order."""

    def __init__(self, options: DemoOptions, world: World, folder: str) -> None:
        self.options, self.world = options, world
        # Rank 0's, who makes and removes the folder; it sends them to the others.
        self._saved, self._saved_by_torch = f"{folder}/checkpoint", f"{folder}/checkpoint.pt"
        self.console = Console() if world.rank == 0 else None
        self.stages: list[Stage] = []
        self.report = Report()

    def run(self) -> Graph:
        """Run the stages that need every process."""
        self._start()
        graph = self._read()
        batches = Batches.of(graph, self.options, self.world)
        with self._table(graph) as table:
            model = self._build(graph, table)
            trained = self._checkpoint(self._train(model, batches, table), graph, table)
            self._compare(model, trained, batches, table)
        self._evaluate(trained, graph)
        self._calibrate(trained, graph)
        self._resources = self._used(graph)
        return graph

    def finish(self, graph: Graph) -> None:
        """Run what needs no process group, on rank 0: serving, and the report."""
        if self.options.serve:
            self._serve(graph)
        self._stage("all of it", time.time() - self.options.launched_at)
        self._list(report.stages_listing(self.stages))
        self._list(self._resources)
        self.report.write(self.options.report)
        self._print(f"report: {self.options.report}")

    def _start(self) -> None:
        # The first deferred module loads torch's fake tensors, which takes seconds, whatever its
        # size.
        materialize_module(deferred_init(ComplEx, 1, 1, 1))
        dist.barrier()
        self._stage(f"start {self.world.size} processes", time.time() - self.options.launched_at)

    def _read(self) -> Graph:
        data = self.options.data
        note = " of the standard library" if data is None else ""
        with self._timed(f"read the graph{note}"):
            if data is None:
                made = [standard_library_graph() if self.world.rank == 0 else None]
                dist.broadcast_object_list(made, src=0)
                (graph,) = made
                assert graph is not None
            else:
                graph = read_graph(data, allow_unseen=self.options.allow_unseen)
        self._say(str(data or standard_library()))
        self._say(
            f"{len(graph.entities):,} entities, {len(graph.relations)} relations; facts: "
            f"{len(graph.train):,} train, {len(graph.valid):,} valid, {len(graph.test):,} test"
        )
        if graph.unseen:
            self._say(f"{graph.unseen} facts of valid and test have an entity that train lacks")
        return graph

    @contextmanager
    def _table(self, graph: Graph) -> Iterator[Table]:
        """Create the table of the entities' embeddings, shared by the processes of this host."""
        with self._timed("make the table of the entities"):
            table = Table.create(
                len(graph.entities),
                2 * self.options.dim,
                optimizer=optim.adagrad(self.options.learning_rate),
                name="entities",
                apply_gradients="backward",  # by each process, without waiting for the others
            )
        yield table
        # Not after an error, as for the process group.
        table.close()

    def _build(self, graph: Graph, table: Table) -> ComplEx:
        """Build the model deferred, with this process's entities straight into the table.

        Compares it bit for bit with the model built eagerly.
        """
        sizes = (len(graph.entities), len(graph.relations), self.options.dim)
        rank, size = self.world.rank, self.world.size
        first, last = (sizes[0] * end // size for end in (rank, rank + 1))
        torch.manual_seed(self.options.seed)
        start = time.perf_counter()
        model: ComplEx = deferred_init(ComplEx, *sizes)
        share = (slice(first, last),)
        materialize_module(model, shard=lambda name, _: share if name == _IN_TABLE else None)
        table.set(torch.arange(first, last), model.rows)
        model.move_entities(table)
        table.sync()
        deferred_s = time.perf_counter() - start
        torch.manual_seed(self.options.seed)
        start = time.perf_counter()
        eager = ComplEx(*sizes)
        eager_s = time.perf_counter() - start
        usual = _compared("eager", model.gathered(), eager)
        name = "build the model deferred, a share of it each"
        self._stage(name, deferred_s, usual, eager_s)
        return model

    def _train(self, model: ComplEx, batches: Batches, table: Table) -> ComplEx:
        """Train the model; return a copy that needs no table."""
        epochs = self.options.epochs
        with self._timed(f"train {epochs} epochs of {batches.steps} steps"):
            Trainer(model, self.options).train(batches, self._epoch)
            table.sync()
        if table.server.num_nodes > 1:
            self._say(f"entities' embeddings: {table.metrics()}")
        return model.gathered()

    def _epoch(self, epoch: int, loss: float) -> None:
        self.report.losses.append(loss)
        self._print(f"epoch {epoch} of {self.options.epochs}: mean loss {loss:.4f}")

    def _checkpoint(self, trained: ComplEx, graph: Graph, table: Table) -> ComplEx:
        """Save the table and the models and load them again; return the loaded model."""
        dist.broadcast_object_list(places := [self._saved, self._saved_by_torch], src=0)
        self._saved, self._saved_by_torch = places
        sizes = (len(graph.entities), len(graph.relations), self.options.dim)
        rows = table.rows()
        table.sync()
        state = {"table": table, "model": trained, "baseline": MostFrequent.of(graph)}
        ours_s = self._together(lambda: save(state, self._saved))
        usual_s = self._together(lambda: self._torch_save(trained, rows))
        usual = "torch.save by one process"
        self._stage("save a checkpoint, a part each", ours_s, usual, usual_s)

        usual_s = self._together(lambda: self._torch_load(ComplEx(*sizes), table))
        model: ComplEx = deferred_init(ComplEx, *sizes)
        ours_s = self._together(lambda: load({"table": table, "model": model}, self._saved))
        usual = _compared("torch.load", model, trained, torch.equal(table.rows(), rows))
        table.sync()
        self._stage("load it, the model not initialised", ours_s, usual, usual_s)
        return model

    def _torch_save(self, trained: ComplEx, rows: torch.Tensor) -> None:
        if self.world.rank == 0:
            with open(self._saved_by_torch, "wb") as file:
                torch.save({"table": rows, "model": trained.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())

    def _torch_load(self, model: ComplEx, table: Table) -> None:
        state = torch.load(self._saved_by_torch, weights_only=True)
        model.load_state_dict(state["model"])
        table.load_state_dict({"rows": state["table"]})

    @staticmethod
    def _together(stage: Callable[[], object]) -> float:
        """Return the seconds until the last process is done."""
        dist.barrier()
        start = time.perf_counter()
        stage()
        dist.barrier()
        return time.perf_counter() - start

    def _compare(self, model: ComplEx, trained: ComplEx, batches: Batches, table: Table) -> None:
        """Compare the parts of a step with the usual ways. Trains the model, not the copy."""
        groups = {name: dist.new_group(backend=name) for name in ("sml", "gloo")}
        models = {"sml": model, "gloo": copy.deepcopy(trained)}
        step = compare_steps(models, batches, self.options, groups)
        name = "  a step: table, DDP over sml (median)"
        self._stage(name, step["sml"], "nn.Embedding, DDP over gloo", step["gloo"])
        assert isinstance(model.entities, Embedding)
        lookups = compare_lookups(
            model.entities, trained.rows, batches, self.options, groups["gloo"]
        )
        name = "  its entities: look up, push, Adagrad"
        usual = "nn.Embedding(sparse=True), DDP over gloo, Adagrad"
        self._stage(name, lookups["table"], usual, lookups["sparse"])
        reduce = compare_all_reduce(trained.relations.numel(), groups, batches)
        name = "  its all-reduce of the relations"
        self._stage(name, reduce["sml"], "gloo", reduce["gloo"])

    def _evaluate(self, model: ComplEx, graph: Graph) -> None:
        with self._timed("evaluate on valid and test"):
            answers = Answers(graph)
            baseline = frequency_scorer(graph)
            rows = {
                "valid": self._measure(model.score_all, graph, graph.valid, answers),
                "test": self._measure(model.score_all, graph, graph.test, answers),
                "test, most frequent answer": self._measure(baseline, graph, graph.test, answers),
            }
        self._list(report.metrics_listing(rows))

    def _measure(
        self, score: Scorer, graph: Graph, triples: torch.Tensor, answers: Answers
    ) -> RankingMetrics:
        """Return the metrics over all questions; each rank answers its share."""
        questions = with_reciprocals(triples, len(graph.relations))
        share = questions[self.world.rank :: self.world.size]
        sums = sum_metrics(rank_answers(score, share, answers))
        dist.all_reduce(sums)
        return RankingMetrics.from_sums(sums)

    def _calibrate(self, model: ComplEx, graph: Graph) -> None:
        """Fit a temperature by reductions that autograd differentiates, of ``mpi`` and of torch."""
        questions = with_reciprocals(graph.valid, len(graph.relations))
        share = questions[self.world.rank :: self.world.size]
        world, gloo = mpi.COMM_WORLD, dist.new_group(backend="gloo")
        found: list[Calibration] = []

        def together(total: Sum) -> float:
            total(torch.ones(()))  # sets things up
            return self._together(lambda: found.append(calibrate(model, share, total)))

        ours_s = together(lambda tensor: world.Allreduce(tensor, mpi.MPI_SUM))
        with warnings.catch_warnings():  # torch recommends a private function instead
            warnings.simplefilter("ignore", FutureWarning)
            usual_s = together(lambda tensor: dist_nn.all_reduce(tensor, group=gloo))  # type: ignore[no-untyped-call]
        self._stage("calibrate by mpi reductions", ours_s, "torch.distributed.nn, gloo", usual_s)
        self._say(
            f"calibrated: scores times {found[0].factor:.3f}; mean negative log-likelihood on "
            f"valid {found[0].before:.4f}, then {found[0].after:.4f}"
        )

    def _used(self, graph: Graph) -> Listing:
        """Return the memory and bytes that this rank has used."""
        files = Path(self._saved).rglob("*")
        figures = {
            "peak memory of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "rows of the table, without Adagrad's state": 8
            * len(graph.entities)
            * self.options.dim,
            "checkpoint": sum(file.stat().st_size for file in files if file.is_file()),
        }
        for plane in aggregation.stats().values():
            figures[f"tensors that sml summed ({plane.plane})"] = plane.payload_bytes
            for link in plane.links:
                figures[f"sent through {link.transport} ({link.reason})"] = link.sent_bytes
        rows = [[name, f"{size_bytes / 1e6:,.1f} MB"] for name, size_bytes in figures.items()]
        return Listing("Bytes, on rank 0", ("what", "size"), ("size",), rows)

    def _serve(self, graph: Graph) -> None:
        """Serve the trained model and the baseline from the checkpoint alternately."""
        times = compare_switches(graph, self.options.dim, self._saved, self._saved_by_torch)
        usual = "a new process: import, load, answer"
        name = "serve: switch to the other model, answer"
        self._stage(name, times.switched_s, usual, times.restarted_s)
        self._stage("  the answer alone, by a model that is ready", times.ready_s)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the block as a stage."""
        start = time.perf_counter()
        yield
        self._stage(name, time.perf_counter() - start)

    def _stage(self, name: str, seconds: float, usual: str = "", usual_s: float = 0.0) -> None:
        self.stages.append(Stage(name, seconds, usual, usual_s))

    def _say(self, line: str) -> None:
        """Print a line that is also in the report."""
        self.report.summary.append(line)
        self._print(escape(line))

    def _list(self, listing: Listing) -> None:
        """Print a table that is also in the report."""
        self.report.listings.append(listing)
        self._print(listing.printed())

    def _print(self, what: object) -> None:
        if self.console is not None:
            self.console.print(what)


def _compared(usual: str, model: ComplEx, expected: ComplEx, equal: bool = True) -> str:
    """Return the name of the usual way, with whether the results are equal."""
    equal &= all(map(torch.equal, model.parameters(), expected.parameters()))
    return f"{usual}; {'equal bit for bit' if equal else 'NOT EQUAL, please report this'}"


@contextmanager
def _process_group(timeout_s: float) -> Iterator[None]:
    dist.init_process_group("sml", timeout=timedelta(seconds=timeout_s))
    yield
    # Not after an error: with a dead peer there is nothing to take leave of.
    dist.destroy_process_group()


@contextmanager
def _folder(world: World) -> Iterator[str]:
    """Create a folder on rank 0 for what the job saves; removed at its end."""
    if world.rank:
        yield ""
    else:
        with tempfile.TemporaryDirectory(prefix="torchrelay-demo-") as folder:
            yield folder


def _last_words(_number: int, _frame: FrameType | None) -> None:
    """Delay the end by SIGTERM: torchrun ends the other ranks once one has died, and they should
    report which first.
    """
    signal.setitimer(signal.ITIMER_REAL, _LAST_WORDS_S)


def main() -> None:
    """Run a rank. Exit code 0; 1 after an error, printed as one sentence with the rank; 2 if the
    input caused it.
    """
    signal.signal(signal.SIGTERM, _last_words)
    world = World.from_environment()
    options = DemoOptions.from_json(sys.argv[1])
    try:
        with _folder(world) as folder:
            job = Job(options, world, folder)
            with _process_group(options.timeout_s):
                graph = job.run()
            if world.rank == 0:
                job.finish(graph)
    except TorchRelayError as error:
        # One write, so that the lines of ranks that fail at the same moment stay apart; print makes
        # two.
        sys.stderr.write(f"torchrelay demo, rank {world.rank}: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
