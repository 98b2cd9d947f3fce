"""Tests that share their ranks: one that ends the ranks does not hide those after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multi.mpi import runner
from multi.mpi.runner import STARTED, Call, Finished, Launch

CALLS = [Call("test_x.py", name, "") for name in ("first", "ends", "last")]


def test_a_test_that_ends_a_rank_is_followed_by_another_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches: list[list[str]] = []

    def mpirun(library: str, size: int, *command: str, timeout_s: float, **_: str) -> Finished:
        folder = Path(command[1])
        todo = [call["function"] for call in json.loads((folder / "calls.json").read_text())]
        launches.append(todo)
        for rank in range(size):
            with open(folder / f"{rank}.json", "w") as results:
                for name in todo:
                    results.write(STARTED)
                    if name == "ends":
                        results.write(json.dumps("PeerLostError") + "\n" if rank == 0 else "")
                        break
                    results.write(json.dumps("") + "\n")
        return Finished(1, "killed by a signal")

    monkeypatch.setattr(runner, "mpirun", mpirun)
    outcomes = runner.run(Launch("openmpi", 2), CALLS)
    assert launches == [["first", "ends", "last"], ["last"]]
    assert outcomes[CALLS[0]] == outcomes[CALLS[2]] == ["", ""]
    assert outcomes[CALLS[1]] == ["PeerLostError", "the rank ended in it: killed by a signal"]


def test_ranks_that_do_not_start_are_not_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def mpirun(*_: object, **__: object) -> Finished:
        launches.append(1)
        return Finished(1, "no such library")

    monkeypatch.setattr(runner, "mpirun", mpirun)
    calls = [Call("test_x.py", f"test_{index}", "") for index in range(100)]
    outcomes = runner.run(Launch("openmpi", 2), calls)
    assert len(launches) == runner.LAUNCHES
    for call in calls:
        assert all("no such library" in error for error in outcomes[call])
