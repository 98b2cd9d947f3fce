# ruff: noqa: E402 - the suite reads its settings when it is imported
"""PyTorch's own test suite for backends, with ``sml`` where it was written for Gloo.

It takes minutes; ``make test`` runs a part of it (``tests/multi/aggregation/test_c10d_suite.py``)::

    python tests/c10d_suite.py                       # all, with two ranks
    python tests/c10d_suite.py --placement aabb      # two ranks on each of two simulated hosts
    python tests/c10d_suite.py --backend gloo        # the same tests with Gloo, to compare
    python tests/c10d_suite.py all_reduce broadcast  # those whose names contain one of the words

The exit status is 0 if only EXPECTED tests fail.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import unittest
from typing import Any


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--placement", default="aa", help="a letter for each rank's host")
    parser.add_argument("--backend", choices=("sml", "gloo"), default="sml")
    parser.add_argument("words", nargs="*")
    return parser.parse_args()


ARGUMENTS = _parse()

# The suite reads these when it is imported. As for Gloo: decorators leave out what is not for it.
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="c10d-suite-"))
os.environ["WORLD_SIZE"] = str(len(ARGUMENTS.placement))
os.environ["BACKEND"] = "gloo"
os.environ["INIT_METHOD"] = "env://"

import torch
from torch.testing._internal import common_distributed

if len(ARGUMENTS.placement) > 3:
    # torch skips its tests of groups below 8 ranks to spare GPUs; they need 3.
    common_distributed.skip_if_small_worldsize = lambda function: function
from torch.testing._internal.distributed import distributed_test

import torchrelay.aggregation  # noqa: F401 - registers the backend

# torch refuses monitored_barrier for every name but Gloo's, before it asks the group.
EXPECTED = frozenset(
    {
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    }
)


class _Name(str):
    """``sml``, and Gloo where a test asks: its body does so to put models on CPUs."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


for backends in common_distributed.DistTestCases.backend_feature.values():
    backends.add("sml")


class TestSml(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The suite; its base classes do the work."""

    def setUp(self) -> None:
        super().setUp()
        # Forked from here, where torch is imported and nothing has run.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
        if len(set(ARGUMENTS.placement)) > 1:
            os.environ["TORCHRELAY_HOST_ID"] = ARGUMENTS.placement[rank]
        super()._run(rank, *args, **kwargs)


def run(words: list[str]) -> set[str]:
    """Run the tests whose names contain one of ``words``; return those that failed."""
    names = [
        n
        for n in unittest.TestLoader().getTestCaseNames(TestSml)
        if not words or any(w in n for w in words)
    ]
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(map(TestSml, names)))
    bad = {case.id().rpartition(".")[2] for case, _ in [*result.failures, *result.errors]}
    print(
        f"{len(names)} tests: {len(names) - len(result.skipped) - len(bad)} passed, "
        f"{len(result.skipped)} skipped, {len(bad)} failed"
    )
    return bad


def main() -> int:
    torch.set_num_threads(1)
    is_sml = ARGUMENTS.backend == "sml"
    distributed_test.BACKEND = _Name("sml") if is_sml else "gloo"
    bad = run(ARGUMENTS.words)
    for name in sorted(bad):
        print(f"  {name}{': expected' if is_sml and name in EXPECTED else ''}")
    return int(bool(bad - EXPECTED if is_sml else bad))


if __name__ == "__main__":
    sys.exit(main())
