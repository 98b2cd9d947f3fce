"""The program of each process of the demo, under torchrun: ``python -m torchrelay.demo.worker
OPTIONS``.
"""

from __future__ import annotations

import copy
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn

from torchrelay import aggregation, mpi
from torchrelay._output import guarded_stdout
from torchrelay._platform import has_core, peak_memory_bytes
from torchrelay.checkpoint import load, save
from torchrelay.deferred import deferred_init, materialize_module
from torchrelay.demo.code_graph import code_graph, read_code_graph, standard_library
from torchrelay.demo.evaluation import (
    Answers,
    Calibration,
    MostFrequent,
    RankingMetrics,
    Scorer,
    Sum,
    calibrate,
    rank_answers,
    sum_metrics,
    with_reciprocals,
)
from torchrelay.demo.model import ComplEx
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.report import Report
from torchrelay.demo.serving import compare_switches
from torchrelay.demo.training import Batches, SparseEntities, Trainer, compare, look_up
from torchrelay.demo.triples import Fact, Graph, read_graph
from torchrelay.errors import TorchRelayError
from torchrelay.parameters import Table, optim
from torchrelay.world import World

__all__ = ["Job", "main"]

# torchrun kills what is left 30 s after it asked for the end.
_LAST_WORDS_S = 15

_QUICK_SHARE = 4  # a quick run reads one of so many files

# The parameter that goes into the table instead of into every process.
_IN_TABLE = "entities.weight"


class Job:
    """The stages of the demo on one rank, in order."""

    graph: Graph

    def __init__(self, options: DemoOptions, world: World, folder: str) -> None:
        self.options, self.world = options, world
        dist.broadcast_object_list(folders := [folder])  # rank 0 makes and removes it
        self.saved, self.saved_by_torch = f"{folders[0]}/checkpoint", f"{folders[0]}/checkpoint.pt"
        self.report = Report(quiet=world.rank != 0)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the arguments of :class:`ComplEx`."""
        return len(self.graph.entities), len(self.graph.relations), self.options.dim

    def run(self) -> None:
        """Run the stages that need every process."""
        self._start()
        self.graph = self._read()
        batches = Batches(self.graph, self.options, self.world)
        table = self._table() if has_core else None
        model = self._build(table)
        trained = self._checkpoint(self._train(model, batches, table), table)
        if table is not None:
            self.report.doing("compare steps with the usual ways")
            self._compare(model, trained, batches)
            table.close()  # not after an error: with a dead peer there is nothing to wait for
        self._evaluate(trained)
        if has_core:
            self._calibrate(trained)
        else:
            self.report.line("without the native core: no table, sml, mpi or serving")
        self.report.add_sizes(self._used())

    @property
    def facts(self) -> str:
        """Return how many facts there are of how many entities."""
        return f"{len(self.graph.triples()):,} facts about {len(self.graph.entities):,} entities"

    def finish(self) -> None:
        """Run what needs no process group, on rank 0: serving, and the report."""
        if self.options.serve and has_core:
            self._serve()
        self.report.stage("all of it", time.monotonic() - self.options.launched_at)
        self.report.print_stages()
        self.report.doing("draw the report")
        from torchrelay.demo.page import page  # noqa: PLC0415 - imports matplotlib, on one rank

        facts = f"{self.facts} of {self._data_name()}"
        text = page(self.report, self.options, facts)
        self.options.report.write_text(text, encoding="utf-8")
        path = min(os.path.relpath(self.options.report), str(self.options.report), key=len)
        self.report.line(f"report: {path}")

    def _start(self) -> None:
        # The first deferred module loads torch's fake tensors, which takes seconds, whatever its
        # size.
        materialize_module(deferred_init(ComplEx, 1, 1, 1))
        dist.barrier()
        seconds = time.monotonic() - self.options.launched_at
        self.report.stage(f"start {self.world.size} processes", seconds)

    def _read(self) -> Graph:
        data = self.options.data
        note = " of the standard library" if data is None else ""
        with self.report.timed(f"read the graph{note}"):
            if data is None:
                graph = self._read_standard_library()
            else:
                graph = read_graph(data, allow_unseen=self.options.allow_unseen)
        self.report.line(f"the data: {self._data_name()}")
        self.report.line(
            f"{len(graph.entities):,} entities, {len(graph.relations)} relations; facts: "
            f"{len(graph.train):,} train, {len(graph.valid):,} valid, {len(graph.test):,} test"
        )
        return graph

    def _read_standard_library(self) -> Graph:
        """Read a part of the files on each rank, and all facts from all."""
        every = self.world.size * (_QUICK_SHARE if self.options.quick else 1)
        part = slice(self.world.rank, None, every)
        parts: list[list[Fact]] = [[]] * self.world.size
        dist.all_gather_object(parts, read_code_graph(standard_library(), part))
        return code_graph(sorted(set().union(*parts)))

    def _data_name(self) -> str:
        if self.options.data is not None:
            return self.options.data.name
        share = "a quarter of the" if self.options.quick else "the"
        return f"{share} standard library of Python {platform.python_version()}"

    def _table(self) -> Table:
        """Create the table of the entities' embeddings, shared by the processes of this host."""
        with self.report.timed("make the table of the entities"):
            return Table.create(
                len(self.graph.entities),
                2 * self.options.dim,
                optimizer=optim.adagrad(self.options.learning_rate),
                name="entities",
                apply_gradients="backward",  # by each process, without waiting for the others
            )

    def _build(self, table: Table | None) -> ComplEx:
        """Build the model deferred, with this process's entities straight into the table.

        Compares it bit for bit with the model built eagerly.
        """
        torch.manual_seed(self.options.seed)
        start = time.perf_counter()
        model: ComplEx = deferred_init(ComplEx, *self.sizes)
        if table is None:
            materialize_module(model)
        else:
            self._move_share(model, table)
        deferred_s = time.perf_counter() - start
        torch.manual_seed(self.options.seed)
        start = time.perf_counter()
        eager = ComplEx(*self.sizes)
        eager_s = time.perf_counter() - start
        usual = _compared("eager", model.gathered(), eager)
        name = "build the model deferred" + (", a share of it each" if table is not None else "")
        self.report.stage(name, deferred_s, usual, eager_s, "small, recording costs more")
        return model

    def _move_share(self, model: ComplEx, table: Table) -> None:
        """Materialise this process's share of a deferred model, its entities in the table."""
        rank, size = self.world.rank, self.world.size
        first, last = (table.num_keys * end // size for end in (rank, rank + 1))
        share = (slice(first, last),)
        materialize_module(model, shard=lambda name, _: share if name == _IN_TABLE else None)
        table.set(torch.arange(first, last), model.rows)
        model.move_entities(table)
        table.sync()

    def _train(self, model: ComplEx, batches: Batches, table: Table | None) -> ComplEx:
        """Train the model; return a copy that needs no table."""
        epochs = self.options.epochs

        def on_epoch(epoch: int, loss: float) -> None:
            self.report.epoch(epoch, epochs, loss)

        def on_step(done: int, steps: int) -> None:
            self.report.doing(f"train: step {done} of {steps}")

        with self.report.timed(f"train {epochs} epochs of {batches.steps} steps"):
            Trainer(model, self.options).train(batches, on_epoch, on_step)
            if table is not None:
                table.sync()
        if table is not None and table.num_nodes > 1:
            self.report.line(f"entities' embeddings: {table.metrics()}")
        return model.gathered()

    def _checkpoint(self, trained: ComplEx, table: Table | None) -> ComplEx:
        """Save the table and the models and load them again; return the loaded model."""
        self.report.doing("save and load a checkpoint")
        tables = {} if table is None else {"table": table}
        rows = {name: one.rows() for name, one in tables.items()}
        for one in tables.values():
            one.sync()
        state = {**tables, "model": trained, "baseline": MostFrequent.of(self.graph)}
        ours_s = self._together(lambda: save(state, self.saved))
        usual_s = self._together(lambda: self._torch_save(trained, rows))
        usual = "torch.save by one process"
        why = "small, waits for the disk and all ranks"
        self.report.stage("save a checkpoint, a part each", ours_s, usual, usual_s, why)

        usual_s = self._together(lambda: self._torch_load(ComplEx(*self.sizes), tables))
        model: ComplEx = deferred_init(ComplEx, *self.sizes)
        ours_s = self._together(lambda: load({**tables, "model": model}, self.saved))
        are_equal = all(torch.equal(one.rows(), rows[name]) for name, one in tables.items())
        usual = _compared("torch.load", model, trained, are_equal)
        why = "small, and every byte is verified"
        for one in tables.values():
            one.sync()
        self.report.stage("load it, the model not initialised", ours_s, usual, usual_s, why)
        return model

    def _torch_save(self, trained: ComplEx, rows: dict[str, torch.Tensor]) -> None:
        if self.world.rank == 0:
            with open(self.saved_by_torch, "wb") as file:
                torch.save({**rows, "model": trained.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())

    def _torch_load(self, model: ComplEx, tables: dict[str, Table]) -> None:
        state = torch.load(self.saved_by_torch, weights_only=True)
        model.load_state_dict(state["model"])
        for name, table in tables.items():
            table.load_state_dict({"rows": state[name]})

    @staticmethod
    def _together(stage: Callable[[], object]) -> float:
        """Return the seconds until the last process is done."""
        dist.barrier()
        start = time.perf_counter()
        stage()
        dist.barrier()
        return time.perf_counter() - start

    def _compare(self, model: ComplEx, trained: ComplEx, batches: Batches) -> None:
        """Compare the parts of a step with the usual ways. Trains the model, not the copy."""
        sml, gloo = (dist.new_group(backend=name) for name in ("sml", "gloo"))
        ours = Trainer(model, self.options, sml)
        theirs = Trainer(copy.deepcopy(trained), self.options, gloo)
        step_s, usual_s = compare(ours.step, theirs.step, batches)
        name = "  a step: table, DDP over sml (median)"
        self.report.stage(name, step_s, "nn.Embedding, DDP over gloo", usual_s)

        sparse = SparseEntities(trained.rows, self.options, gloo)
        ours_s, usual_s = compare(partial(look_up, model.entities), sparse.step, batches)
        name = "  its entities: look up, push, Adagrad"
        usual = "sparse nn.Embedding, DDP over gloo, Adagrad"
        self.report.stage(name, ours_s, usual, usual_s)

        gradients = torch.zeros_like(trained.relations)
        ours_s, usual_s = compare(
            lambda *_: dist.all_reduce(gradients, group=sml),
            lambda *_: dist.all_reduce(gradients, group=gloo),
            batches,
        )
        self.report.stage("  its all-reduce of the relations", ours_s, "gloo", usual_s)

    def _evaluate(self, model: ComplEx) -> None:
        with self.report.timed("evaluate on valid and test"):
            answers, graph = Answers(self.graph), self.graph
            rows = {
                "valid": self._measure(model.score_all, graph.valid, answers),
                "test": self._measure(model.score_all, graph.test, answers),
                "test, most frequent answer": self._measure(
                    MostFrequent.of(graph), graph.test, answers
                ),
            }
        self.report.add_metrics(rows)

    def _measure(self, score: Scorer, triples: torch.Tensor, answers: Answers) -> RankingMetrics:
        """Return the metrics over all questions; each rank answers its share."""
        sums = sum_metrics(rank_answers(score, self._share(triples), answers))
        dist.all_reduce(sums)
        return RankingMetrics.from_sums(sums)

    def _share(self, triples: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the questions about ``triples``."""
        questions = with_reciprocals(triples, len(self.graph.relations))
        return questions[self.world.rank :: self.world.size]

    def _calibrate(self, model: ComplEx) -> None:
        """Fit a temperature by reductions that autograd differentiates, of ``mpi`` and of torch."""
        self.report.doing("calibrate")
        share, gloo = self._share(self.graph.valid), dist.new_group(backend="gloo")
        found: list[Calibration] = []

        def together(total: Sum) -> float:
            total(torch.ones(()))  # sets things up
            return self._together(lambda: found.append(calibrate(model.score_all, share, total)))

        ours_s = together(lambda tensor: mpi.COMM_WORLD.Allreduce(tensor, mpi.MPI_SUM))
        with warnings.catch_warnings():  # torch recommends a private function instead
            warnings.simplefilter("ignore", FutureWarning)
            usual_s = together(lambda tensor: dist_nn.all_reduce(tensor, group=gloo))  # type: ignore[no-untyped-call]
        usual = "torch's nn.all_reduce, gloo"
        why = "both spend it on the scores"
        self.report.stage("calibrate by mpi reductions", ours_s, usual, usual_s, why)
        self.report.line(
            f"calibrated: scores times {found[0].factor:.3f}; mean negative log-likelihood on "
            f"valid {found[0].before:.4f}, then {found[0].after:.4f}"
        )

    def _used(self) -> dict[str, int]:
        """Return the memory and bytes that this rank has used."""
        files = Path(self.saved).rglob("*")
        figures = {
            "peak memory of the process": peak_memory_bytes(),
            "rows of the entities, without Adagrad's state": 8 * self.sizes[0] * self.options.dim,
            "checkpoint": sum(file.stat().st_size for file in files if file.is_file()),
        }
        for plane in aggregation.stats().values():
            figures[f"tensors that sml summed ({plane.plane})"] = plane.payload_bytes
            for link in plane.links:
                figures[f"sent through {link.transport} ({link.reason})"] = link.sent_bytes
        return figures

    def _serve(self) -> None:
        """Serve the trained model and the baseline from the checkpoint alternately."""
        self.report.doing("serve two models by turns")
        switched_s, ready_s, restarted_s, self.report.switches = compare_switches(
            self.graph, self.options.dim, self.saved, self.saved_by_torch
        )
        name = "serve: switch to the other model, answer"
        usual = "a new process: import, load, answer"
        self.report.stage(name, switched_s, usual, restarted_s)
        self.report.stage("  the answer alone, by a model that is ready", ready_s)


def _compared(usual: str, model: ComplEx, expected: ComplEx, equal: bool = True) -> str:
    """Return the name of the usual way, with whether the results are equal."""
    equal &= all(map(torch.equal, model.parameters(), expected.parameters()))
    return f"{usual}; {'equal bit for bit' if equal else 'NOT EQUAL, please report this'}"


def main() -> None:
    """Run a rank. Exit code 0; 1 after an error, printed as one sentence with the rank; 2 if the
    input caused it.
    """
    # torchrun ends the other ranks once one has died, and they should report which first.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_LAST_WORDS_S))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(128 + signal.SIGTERM))
    world = World.from_environment()
    options = DemoOptions.from_json(sys.argv[1]).resolved()
    folder = (
        tempfile.TemporaryDirectory(prefix="torchrelay-demo-")
        if world.rank == 0
        else nullcontext("")
    )
    try:
        with folder as path:
            backend = "sml" if has_core else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_s))
            job = Job(options, world, path)
            job.run()
            dist.destroy_process_group()  # not after an error, as for the table
            if world.rank == 0:
                job.finish()
    except TorchRelayError as error:
        # One write, so that the lines of ranks that fail at the same moment stay apart; print makes
        # two.
        sys.stderr.write(f"torchrelay demo, rank {world.rank}: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    with guarded_stdout():
        main()
