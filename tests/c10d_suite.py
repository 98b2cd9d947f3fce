"""PyTorch's own test suite for backends, with ``sml`` where it was written for Gloo.

Each test starts its own processes, so this takes minutes and is no part of ``make test``::

    python tests/c10d_suite.py              # all; the exit status is 0 if only EXPECTED tests fail
    python tests/c10d_suite.py all_reduce   # those whose name contains it
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest

# The suite reads these when it is imported, here and in the processes it starts. As for Gloo:
# decorators leave out
# what is not for it.
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="c10d-suite-"))
os.environ.setdefault("WORLD_SIZE", "2")
os.environ["BACKEND"] = "gloo"
os.environ["INIT_METHOD"] = "env://"

from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test

import torchrelay.aggregation  # noqa: F401 - registers the backend

# torch refuses monitored_barrier for every name but Gloo's, before it asks the group.
EXPECTED = frozenset(
    {
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
    }
)


class _Name(str):
    """``sml``, and Gloo where a test asks: its body does so to put models on CPUs."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


distributed_test.BACKEND = _Name("sml")
for backends in common_distributed.DistTestCases.backend_feature.values():
    backends.add("sml")


class TestSml(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The suite; its base classes do the work."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


def main(words: list[str]) -> int:
    """Runs the tests whose names contain one of ``words``; the number of those that should not have
    failed.
    """
    names = [
        n
        for n in unittest.TestLoader().getTestCaseNames(TestSml)
        if not words or any(w in n for w in words)
    ]
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(map(TestSml, names)))
    bad = {case.id().rpartition(".")[2] for case, _ in [*result.failures, *result.errors]}
    print(
        f"{len(names) - len(result.skipped) - len(bad)} passed, {len(result.skipped)} skipped, "
        f"{len(bad)} failed"
    )
    for name in sorted(bad):
        print(f"  {name}{'' if name in EXPECTED else ': not expected'}")
    return len(bad - EXPECTED)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
