"""How the parameter manager's traffic grows with nodes: measured to 16 nodes, simulated to 256.

    python benchmarks/bench_parameters_scaling.py [--smoke] [--data DIR]

The keys are those that training ComplEx uses (``examples/parameters_kge.py``): each node takes the
facts about its own subjects. The same trace runs on the real manager, with nodes as threads of this
process, and through the model of its algorithm (``parameters_model.py``), which is checked against
it before it is trusted with more nodes. Writes ``results/parameters_scaling.md`` and
``docs/images/parameters_scaling.png``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from parameters_model import Counts, Model, Trace
from report import parser_of, save, subplots, table, write

from torchrelay import config
from torchrelay.demo.triples import Graph
from torchrelay.parameters._server import Server
from torchrelay.parameters._topology import Topology
from torchrelay.parameters._worker import Worker

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import parameters_kge

PLOT = Path(__file__).parents[1] / "docs" / "images" / "parameters_scaling.png"

DIM, FACTS, LOOKAHEAD, WARM_UP = 128, 64, 12, 20
ROUNDS_PER_STEP, STEP_S = 5, 0.1
TECHNIQUES = ("all", "relocation_only", "replication_only")
# The model is trusted where it is off by no more than this, in messages and in bytes, at every size
# measured.
TRUSTED = 1.5


def record(graph: Graph, nodes: int, steps: int) -> Trace:
    """The distinct keys of each node's steps."""
    trace: Trace = []
    for node in range(nodes):
        # Of each epoch, at least one step.
        batches = parameters_kge.Batches(graph, node, nodes, epochs=steps)
        keys = [
            np.unique(batch.keys().numpy()) for _, batch in zip(range(steps), batches, strict=False)
        ]
        trace.append(keys)
    return trace


class Real:
    """The trace on real nodes, which are threads over the in-memory network; pushes add 1, so
    values count them.
    """

    def __init__(self, trace: Trace, num_keys: int, techniques: str) -> None:
        self.trace, self.num_keys = trace, num_keys
        rounds_per_s = {"TORCHRELAY_PARAMETERS_MAX_ROUNDS_PER_S": str(ROUNDS_PER_STEP / STEP_S)}
        settings = config.load(config.Parameters, rounds_per_s)
        self.topologies = Topology.in_memory(len(trace), techniques=techniques, settings=settings)
        self.pushed, self.lock = np.zeros(num_keys, np.int64), threading.Lock()
        self.counts, self.errors = Counts(), list[BaseException]()
        self.begin_s = 0.0

    def run(self) -> Counts:
        threads = [
            threading.Thread(target=self._guarded, args=(node,)) for node in range(len(self.trace))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return self.counts

    def _guarded(self, node: int) -> None:
        try:
            self._node(node)
        except BaseException as error:
            self.errors.append(error)

    def _node(self, node: int) -> None:
        server = Server(self.num_keys, length=DIM, topology=self.topologies[node])
        worker = Worker(0, server)
        steps = [torch.from_numpy(keys) for keys in self.trace[node]]
        for step in range(LOOKAHEAD):
            worker.intent(steps[step], step)
        worker.barrier()
        with self.lock:
            self.begin_s = self.begin_s or time.perf_counter() + 0.1
        before, missed = server.statistics(), 0
        for step, keys in enumerate(steps):
            due_s = self.begin_s + (step + node / len(self.trace)) * STEP_S
            time.sleep(max(0.0, due_s - time.perf_counter()))
            if step > 0:
                self._push(worker, steps[step - 1])
                worker.advance_clock()
            if step == WARM_UP:
                before, missed = server.statistics(), 0
            missed += self._pull(worker, keys)
            if step + LOOKAHEAD < len(steps):
                worker.intent(steps[step + LOOKAHEAD], step + LOOKAHEAD)
        after = server.statistics()
        with self.lock:
            self._add(before, after, missed, len(steps) - WARM_UP)
        worker.barrier()
        worker.close()
        server.close()

    def _push(self, worker: Worker, keys: torch.Tensor) -> None:
        with self.lock:
            self.pushed[keys.numpy()] += 1
        worker.push(keys, torch.ones(len(keys), DIM))

    def _pull(self, worker: Worker, keys: torch.Tensor) -> int:
        """Pulls, and tells how many pushes the values lack."""
        values = torch.empty(len(keys), DIM)
        with self.lock:
            expected = self.pushed[keys.numpy()].sum()
        worker.pull(keys, values)
        return max(0, int(expected - values[:, 0].sum().item()))

    def _add(
        self, before: dict[str, float], after: dict[str, float], missed: int, steps: int
    ) -> None:
        counts = self.counts
        counts.messages += int(after["sent_messages"] - before["sent_messages"])
        counts.bytes += int(after["sent_bytes"] - before["sent_bytes"])
        counts.local += int(after["local_pulls"] - before["local_pulls"])
        counts.remote += int(after["remote_pulls"] - before["remote_pulls"])
        counts.missed += missed
        counts.steps += steps


def simulate(trace: Trace, num_keys: int, techniques: str) -> Counts:
    return Model(trace, num_keys, 4 * DIM, ROUNDS_PER_STEP, LOOKAHEAD, techniques).run(WARM_UP)


def figures(counts: Counts) -> list[float]:
    """Of one node and step: messages, kilobytes; then remote pulls in %, updates missing in a
    pulled value.
    """
    pulls = counts.local + counts.remote
    return [
        counts.messages / counts.steps,
        counts.bytes / counts.steps / 1e3,
        100 * counts.remote / pulls,
        counts.missed / pulls,
    ]


def text(values: list[float]) -> list[str]:
    return [f"{values[0]:.1f}", f"{values[1]:.0f}", f"{values[2]:.2f}", f"{values[3]:.3f}"]


def plot(
    simulated: dict[tuple[str, int], list[float]], measured: dict[tuple[str, int], list[float]]
) -> None:
    titles = ("messages a node and step", "kB a node and step", "updates missing in a pulled value")
    figure, axes = subplots(1, 3, figsize=(13, 4))
    for axis, title, at in zip(axes, titles, (0, 1, 3), strict=True):
        for techniques, colour in zip(
            TECHNIQUES, ("tab:blue", "tab:orange", "tab:green"), strict=True
        ):
            for source, style in ((simulated, "-"), (measured, "o")):
                points = sorted(
                    (n, values[at]) for (name, n), values in source.items() if name == techniques
                )
                label = f"{techniques}, {'simulated' if style == '-' else 'measured'}"
                axis.plot(*zip(*points, strict=True), style, color=colour, label=label)
        axis.set(title=title, xlabel="nodes", xscale="log")
        axis.set_xticks([2, 4, 16, 64, 256], labels=["2", "4", "16", "64", "256"])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
    axes[0].legend()
    save(figure, PLOT)


def main() -> None:
    parser = parser_of(__doc__, "2 and 4 nodes, few steps; writes nothing")
    parser.add_argument("--data", type=Path, help="folder with WN18RR; default: the code graph")
    options = parser.parse_args()
    torch.set_num_threads(1)
    real_nodes, all_nodes = ((2,), (2, 4)) if options.smoke else ((2, 4, 16), (2, 4, 16, 64, 256))
    steps = WARM_UP + (5 if options.smoke else 20)
    measured: dict[tuple[str, int], list[float]] = {}
    simulated: dict[tuple[str, int], list[float]] = {}
    keys_a_step = {}
    parameters_kge.BATCH_SIZE = FACTS
    graph = parameters_kge.read(options.data, allow_unseen=True)
    num_keys = len(graph.entities) + 2 * len(graph.relations)
    for nodes in all_nodes:
        trace = record(graph, nodes, steps)
        keys_a_step[nodes] = float(np.mean([len(keys) for node in trace for keys in node]))
        for techniques in TECHNIQUES:
            if nodes in real_nodes:
                measured[techniques, nodes] = figures(Real(trace, num_keys, techniques).run())
            simulated[techniques, nodes] = figures(simulate(trace, num_keys, techniques))
            print(
                nodes,
                techniques,
                measured.get((techniques, nodes)),
                simulated[techniques, nodes],
                flush=True,
            )
    ratios = {key: [simulated[key][i] / measured[key][i] for i in (0, 1)] for key in measured}
    for key, pair in ratios.items():
        if not options.smoke and not all(1 / TRUSTED < ratio < TRUSTED for ratio in pair):
            raise SystemExit(
                f"the model is off by {pair} in messages and bytes at {key}: it must not be "
                "believed"
            )
    if options.smoke:
        return
    plot(simulated, measured)
    columns = ["messages", "kB", "remote pulls, %", "updates missing"]
    checked = [
        [
            techniques,
            nodes,
            *(
                f"{a} / {b}"
                for a, b in zip(
                    text(measured[techniques, nodes]),
                    text(simulated[techniques, nodes]),
                    strict=True,
                )
            ),
        ]
        for techniques, nodes in measured
    ]
    grown = [
        [nodes, *(" / ".join(text(simulated[t, nodes])[i] for t in TECHNIQUES) for i in range(4))]
        for nodes in all_nodes
    ]
    name = "WN18RR" if options.data else "the code graph"
    write(
        "parameters_scaling",
        "The parameter manager from 2 to 256 nodes",
        f"A trace of the keys that training ComplEx on {name} uses: every node takes the facts "
        f"about its own subjects, {FACTS} in a step, which are {min(keys_a_step.values()):.0f} to "
        f"{max(keys_a_step.values()):.0f} distinct keys of {num_keys:,}; values of {DIM} float32. "
        f"A step lasts {ROUNDS_PER_STEP} rounds of the channels and is announced {LOOKAHEAD} steps "
        f"before; {steps - WARM_UP} steps after {WARM_UP} to warm up. Per node and step. *Updates "
        "missing* is staleness: how many pushes that other nodes had made before a pull its value "
        "did not have, on average over all pulled keys.",
        "![traffic and staleness from 2 to 256 nodes](../../docs/images/parameters_scaling.png)",
        "Measured / simulated: the real manager with nodes as threads over the in-memory network, "
        f"{ROUNDS_PER_STEP / STEP_S:.0f} rounds a second; and the model of its algorithm, "
        "`benchmarks/parameters_model.py`.",
        table(["techniques", "nodes", *columns], checked),
        f"Simulated, {' / '.join(TECHNIQUES)}. In the model a message arrives within the round it "
        "is sent in and workers move in whole rounds, so it sees less staleness than there is, by "
        "the factors above: of that, only the trend counts. The graph is the same for all: at "
        f"{all_nodes[-1]} nodes a node has {len(graph.train) // all_nodes[-1]} facts, which its "
        f"steps go through {steps * FACTS * all_nodes[-1] // len(graph.train)} times.",
        table(["nodes", *columns], grown),
    )


if __name__ == "__main__":
    main()
