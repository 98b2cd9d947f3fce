"""Does any random initialisation program differ from eager construction, however it is
materialized?

Runs the programs of ``tests/deferred_programs.py`` for consecutive seeds, prints every seed that
fails, and exits with an error if there was one. ``python benchmarks/soak_deferred.py --programs
20000`` takes about an hour on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import deferred_programs

LENGTHS = (6, 9, 12, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--length", type=int, default=0, help="instructions of a program; 0: several lengths"
    )
    parser.add_argument("--most-failures", type=int, default=20, help="stop after so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, failed, refused = time.monotonic(), 0, 0
    reasons: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.programs):
        length = options.length or LENGTHS[seed % len(LENGTHS)]
        try:
            found = deferred_programs.check(seed, length)
            refused += bool(found)
            reasons.update(sentence[:70] for sentence in found)
        except Exception as error:
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(
                f"seed {seed}, length {length}: {reason} ({where.filename}:{where.lineno})",
                flush=True,
            )
            if failed >= options.most_failures:
                break
    seconds = time.monotonic() - start
    print(
        f"{seed + 1 - options.first} programs, {failed} failed, {refused} refused in part, "
        f"{seconds:.0f} s"
    )
    for reason, count in reasons.most_common():
        print(f"  {count} times: {reason}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
