"""Do random programs of communications end, and give what one process computes, in any nesting of
orders of derivatives, checkpoints, sub-communicators, transforms, non-blocking calls and compiled
code?

``--threads N`` runs them on N ranks that are threads, which finds a deadlock at once. Or run it
under ``torchrun --nproc-per-node N`` or ``mpirun -n N``. The first program that hangs, raises or
differs ends it with an error that names the seed: ``--first SEED --count 1`` repeats it.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("TORCHRELAY_MPI_TIMEOUT_S", "20")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

from multi.mpi.programs import MODES, OneProcess, Ranks, check, draw
from multi.mpi.thread_transport import run_ranks
from multi.mpi.threads import prepare_threads
from torchrelay import mpi


def run(comm: mpi.Communicator, one: OneProcess, arguments: argparse.Namespace) -> None:
    """Check the programs on one of the ranks."""
    ranks, start = Ranks(comm), time.monotonic()
    modes: collections.Counter[str] = collections.Counter()
    for seed in range(arguments.first, arguments.first + arguments.count):
        program = draw(seed, arguments.modes, arguments.compiled)
        modes[program.mode] += 1
        try:
            check(ranks, one, program)
            mpi.reset()
            comm.Barrier()
        except BaseException:
            text = f"rank {comm.rank} of {comm.size}, seed {seed}:\n{traceback.format_exc()}"
            sys.stderr.write(f"{text}{program}\n" if comm.rank == 0 else text)  # at once
            sys.stderr.flush()
            if arguments.threads:
                raise
            os._exit(1)
    seconds = time.monotonic() - start
    if comm.rank == 0:
        print(f"{comm.size} ranks, {arguments.count} programs from seed {arguments.first}: {modes}")
        print(f"{seconds:.0f} s, {1e3 * seconds / max(1, arguments.count):.0f} ms each", flush=True)


def main() -> None:
    """Check the programs of ``--count`` seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2500)
    parser.add_argument("--modes", nargs="*", default=MODES)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not arguments.threads:
        run(mpi.COMM_WORLD, OneProcess(mpi.COMM_WORLD.size), arguments)
        return
    prepare_threads()
    one = OneProcess(arguments.threads)
    results = run_ranks(arguments.threads, lambda comm: run(comm, one, arguments))
    sys.exit(any(result is not None for result in results))


if __name__ == "__main__":
    main()
