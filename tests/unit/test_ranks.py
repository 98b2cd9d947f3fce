"""Jobs that share their ranks: one that fails does not hide those after it."""

from __future__ import annotations

import os

from ranks import Job, run_together
from torchrelay.world import World


def _meet(world: World) -> None:
    store = world.connect(60)
    store.set(str(world.rank), "")
    store.wait([str(rank) for rank in range(world.size)])


def _fail_on_one(world: World) -> None:
    assert world.rank == 0, "no luck"


def _end_on_one(world: World) -> None:
    if world.rank == 0:
        os._exit(3)


def test_jobs_after_a_failure_run_in_new_ranks() -> None:
    functions = (_meet, _meet, _fail_on_one, _meet, _end_on_one, _meet)
    outcomes = run_together([Job(__file__, f.__name__, {}) for f in functions], 2, 60)
    assert [outcomes[index] for index in (0, 1, 3, 5)] == [[None, None]] * 4
    assert outcomes[2][0] is None and "no luck" in str(outcomes[2][1])
    assert outcomes[4] == ["ended without a result", None]
