"""Random initialisation programs equal eager construction; ``benchmarks/soak_deferred.py`` runs
many more.
"""

from __future__ import annotations

import pytest

import deferred_programs

PROGRAMS = 15


@pytest.mark.parametrize("length", [6, 9, 12, 20])
def test_random_programs(length: int) -> None:
    for seed in range(PROGRAMS):
        try:
            deferred_programs.check(seed, length)
        except Exception as error:
            raise AssertionError(f"program {seed} of length {length}: {error}") from error
