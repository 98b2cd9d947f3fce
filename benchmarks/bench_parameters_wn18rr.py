"""ComplEx on two nodes of one worker, four ways: what stays local, what is sent, how long an
epoch takes.

    python benchmarks/bench_parameters_wn18rr.py --data WN18RR  # a folder with train.txt etc.
    python benchmarks/bench_parameters_wn18rr.py --smoke        # a tiny model of the code graph

Writes ``results/parameters_wn18rr.md``. Two processes of this machine are the two nodes; they run
``examples/parameters_kge.py``. A run whose test MRR is not twice the baseline's fails.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from report import parser_of, table, write

from torchrelay.demo.code_graph import standard_library_graph
from torchrelay.demo.triples import SPLITS

EXAMPLE = Path(__file__).parents[1] / "examples" / "parameters_kge.py"

WAYS = {
    "intents, all techniques": [],
    "without intents": ["--no-intents"],
    "relocation only": ["--techniques", "relocation_only"],
    "replication only": ["--techniques", "replication_only"],
}
EPOCHS, DIM, ROUNDS, TIMES_BASELINE = 2, 100, 2, 2.0
EPOCH_LINE = (
    r"(?P<seconds>[\d.]+) s, (?P<local>[\d.]+)% local, (?P<sent>[\d.]+) MB out, [\d.]+ MB in, "
    r"(?P<moved>\d+) moved"
)


@dataclass(frozen=True)
class Run:
    """Of node 0: seconds of each epoch; share of keys pulled from its own memory, MB sent and keys
    moved in all.
    """

    epochs_s: list[float]
    local: float
    sent_mb: float
    moved: int
    mrr: float


def write_code_graph(folder: str) -> None:
    """Write the graph as files, so that each run reads it in less time than parsing takes."""
    graph = standard_library_graph()
    for split in SPLITS:
        with Path(folder, f"{split}.txt").open("w", encoding="utf-8") as file:
            for subject, relation, object_ in getattr(graph, split).tolist():
                names = (
                    graph.entities[subject],
                    graph.relations[relation],
                    graph.entities[object_],
                )
                file.write("\t".join(names) + "\n")


def train(data: str, arguments: list[str], epochs: int, dim: int) -> Run:
    """Trains in two processes, each a node.

    Raises:
        SystemExit: the model has not learned.
    """
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    options = [
        "--node-per-process",
        "--epochs",
        str(epochs),
        "--dim",
        str(dim),
        "--questions",
        "1000",
    ]
    graph = ["--data", data, "--allow-unseen"] if data else []
    output = subprocess.run(
        [*torchrun, str(EXAMPLE), *options, *graph, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    ).stdout
    lines = [match.groupdict() for match in re.finditer(EPOCH_LINE, output)]
    found = re.search(r"test: MRR ([\d.]+), .*: MRR ([\d.]+)", output)
    if len(lines) != epochs or found is None:
        raise SystemExit(f"the example printed something else:\n{output}")
    mrr, baseline = float(found[1]), float(found[2])
    if epochs == EPOCHS and mrr < TIMES_BASELINE * baseline:
        raise SystemExit(
            f"the model has not learned: MRR {mrr}, the most frequent answers have {baseline}"
        )
    return Run(
        [float(line["seconds"]) for line in lines],
        statistics.mean(float(line["local"]) for line in lines),
        sum(float(line["sent"]) for line in lines),
        sum(int(line["moved"]) for line in lines),
        mrr,
    )


def spread(values: list[float], digits: int) -> str:
    """The median, and the smallest and largest."""
    middle, low, high = (
        f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return middle if low == high else f"{middle} ({low}-{high})"


def row(way: str, runs: list[Run]) -> list[str]:
    return [
        way,
        spread([seconds for run in runs for seconds in run.epochs_s], 2),
        spread([run.local for run in runs], 3) + " %",
        spread([run.sent_mb for run in runs], 0),
        spread([float(run.moved) for run in runs], 0),
        spread([run.mrr for run in runs], 3),
    ]


def main() -> None:
    parser = parser_of(__doc__, "one epoch of a tiny model; writes nothing")
    parser.add_argument("--data", default="", help="folder with WN18RR; default: the code graph")
    options = parser.parse_args()
    if options.smoke:
        train("", [], 1, 4)
        return
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        if not options.data:
            write_code_graph(folder)
        for _ in range(ROUNDS):
            for way, arguments in WAYS.items():
                runs[way].append(train(options.data or folder, arguments, EPOCHS, DIM))
                print(way, runs[way][-1], flush=True)
    header = [
        "way",
        "s an epoch",
        "keys pulled locally",
        "MB sent by node 0",
        "keys moved to node 0",
        "test MRR",
    ]
    write(
        "parameters_wn18rr",
        f"ComplEx on {'WN18RR' if options.data else 'the code graph'}, two nodes",
        f"`examples/parameters_kge.py`: {DIM} complex numbers an embedding, Adagrad in the table, "
        f"two nodes of one worker and one torch thread each, {EPOCHS} epochs; median "
        f"(smallest-largest) of {ROUNDS} runs, the ways in turns. Sent bytes are of both epochs, "
        "all messages of the node. The MRR is of 1000 test questions.",
        table(header, [row(way, runs[way]) for way in WAYS]),
        NOTES,
    )


NOTES = """Each step takes 512 facts whose subjects belong to the node and asks both directions
against 512 negatives, which all questions of the step share. It pulls each row that it needs once,
and pushes each once. Facts about one object are put into one batch, eight at a time. Negatives are
drawn by the scheme `local` and announced one step before they are used. A row is 800 bytes of value
and 800 of Adagrad state. Relocating a key sends both, there and back; serving it remotely sends the
value and its gradient. Most keys are used once per stay: with intents they are lent, which sends
the same 1,600 bytes as serving them, and a record for the announcement. So intents save waiting but
no bytes. Without intents, a step waits for every eighth key, which costs little here, where the
network is this machine's own memory and the time of an epoch is processor time; with intents, the
channels use more of it than the waiting costs. The negatives mostly come from the same half of the
entities either way."""


if __name__ == "__main__":
    main()
