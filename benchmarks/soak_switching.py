"""Does a switched model ever answer otherwise than a copy that nobody switches?

Serves the random modules of ``tests/weight_reads.py``, four at a time, from arenas that hold one to
three of them, over slow links. Prints every request that differs or fails, and exits with an error
if there was one. ``python benchmarks/soak_switching.py --rounds 200`` takes about an hour.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch

from torchrelay.errors import TorchRelayError
from torchrelay.switching import ModelStore, Switcher

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import weight_reads

MODELS = 4


def soak(seed: int, requests: int) -> tuple[int, int]:
    """Return how many requests were cold, and how many went wrong."""
    draw = random.Random(seed)
    cold = wrong = 0
    with ModelStore() as store:
        copies = {
            f"model{index}": weight_reads.add(
                store, f"model{index}", seed * MODELS + index, unseen=draw.random() < 0.3
            )
            for index in range(MODELS)
        }
        largest = max(store.get(name).size_bytes for name in copies)
        with Switcher(
            store,
            arena_bytes=int(draw.uniform(1.0, 3.0) * largest),
            workers=draw.choice([1, 2]),
            threads=1,
            request_bytes=1 << 20,
            link_gbps=draw.choice([0.001, 0.004, 0.05, 0.0]),
            grouping=draw.choice(["layer", "best"]),
        ) as switcher:
            for name in copies:
                switcher.load(name)
            for count in range(requests):
                name, given = draw.choice(sorted(copies)), weight_reads.inputs(draw)
                with torch.no_grad():
                    expected = copies[name](**given)
                try:
                    ahead = draw.choice(sorted(copies))  # the queue gives prefetching work
                    following = switcher.submit(ahead, weight_reads.inputs(draw))
                    reply = switcher.submit(name, given, priority=1).result()
                    following.result()
                    same = torch.equal(expected, reply.outputs["output"])
                    cold += bool(reply.copied_bytes)
                    problem = "" if same else "differs"
                except TorchRelayError as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    wrong += 1
                    print(f"round {seed}, request {count} to {name}: {problem}", flush=True)
    return cold, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first round's seed")
    parser.add_argument("--requests", type=int, default=300, help="of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, cold, wrong = time.monotonic(), 0, 0
    for seed in range(options.first, options.first + options.rounds):
        more = soak(seed, options.requests)
        cold, wrong = cold + more[0], wrong + more[1]
    count, seconds = options.rounds * options.requests, time.monotonic() - start
    print(f"{count} requests, {cold} cold, {wrong} wrong, {seconds:.0f} s")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
