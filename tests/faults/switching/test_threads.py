"""Everything at once: threads, callbacks and kills around one switcher, which one of them closes.

``python tests/faults/switching/test_threads.py 100`` plays so many games.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # for the command
import switching_models as models
from torchrelay.errors import TorchRelayError
from torchrelay.switching import ModelStore, Reply, Switcher

WAIT_S = 300.0
THREADS, CALLS = 4, 20
NAMES = ("chain0", "chain1", "chain2")
ONES = {"x": torch.ones(1, 64)}
REFUSED = (TorchRelayError, CancelledError)


class Game:
    """One switcher, of an arena that holds half of the models."""

    def __init__(self, seed: int, store: ModelStore) -> None:
        self.draw = random.Random(seed)
        self.seed = seed
        self.answers = 0
        self.expected = {name: expected(name) for name in NAMES}
        workers = self.draw.randint(1, 3)
        self.switcher = Switcher(
            store, arena_bytes=100 << 10, workers=workers, threads=1, start_timeout_s=WAIT_S
        )
        for name in NAMES:
            self.switcher.load(name, timeout_s=WAIT_S)

    def play(self) -> None:
        """Return when all calls have ended; a hang is an error."""
        with ThreadPoolExecutor(THREADS) as pool:
            players = [pool.submit(self.call_often, player) for player in range(THREADS)]
            if self.draw.random() < 0.5:
                time.sleep(self.draw.random())
                self.switcher.close(grace_s=self.draw.choice([0.0, 1.0, WAIT_S]))
            for player in players:
                player.result(WAIT_S)
        self.switcher.close()
        assert self.switcher.failure is None

    def call_often(self, player: int) -> None:
        draw = random.Random(self.seed * THREADS + player)
        for _ in range(CALLS):
            try:
                self.call(draw, draw.choice(NAMES))
            except REFUSED:  # it was closed, unloaded or killed
                continue

    def call(self, draw: random.Random, name: str) -> None:
        kind = draw.choice(["infer"] * 4 + ["submit"] * 6 + ["load", "unload", "status", "kill"])
        if kind == "infer":
            self.check(name, self.switcher.infer(name, ONES))
        elif kind == "submit":
            deadlines = [draw.choice([None, 60.0, 0.001]) for _ in range(4)]
            futures = [self.switcher.submit(name, ONES, deadline_s=one) for one in deadlines]
            futures[0].add_done_callback(self.call_back)
            is_cancelled = futures[1].cancel()
            for future in futures[:1] + futures[1 + is_cancelled :]:
                self.check(name, future.result(WAIT_S).outputs)
        elif kind in ("load", "unload"):
            if kind == "unload":
                self.switcher.unload(name)
            self.switcher.load(name, timeout_s=WAIT_S)
        elif kind == "status":
            assert self.switcher.status()["arena_bytes"] == 100 << 10
        else:
            self.kill(draw)

    def kill(self, draw: random.Random) -> None:
        """Kill a worker, or the process that it was forked from."""
        pids = [worker["pid"] for worker in self.switcher.status()["workers"]]
        server = self.switcher._daemon.fleet.server
        if server is not None and draw.random() < 0.2:
            pids = [server.process.pid]
        if pids:
            with contextlib.suppress(ProcessLookupError):  # another thread was faster
                os.kill(draw.choice(pids), signal.SIGKILL)

    def call_back(self, _: Future[Reply]) -> None:
        try:
            self.check("chain0", self.switcher.infer("chain0", ONES))
        except REFUSED:
            return

    def check(self, name: str, outputs: dict[str, torch.Tensor]) -> None:
        torch.testing.assert_close(outputs["output"], self.expected[name])
        self.answers += 1


def expected(name: str) -> torch.Tensor:
    torch.manual_seed(int(name[-1]))
    with torch.inference_mode():
        output: torch.Tensor = models.chain(depth=4).eval()(ONES["x"])
    return output


def play(seeds: range) -> int:
    """Return how many answers were right; a wrong one is an error."""
    answers = 0
    with ModelStore() as store:
        for name in NAMES:
            inputs = {"x": (torch.float32, (-1, 64))}
            store.add(name, models.chain, kwargs={"depth": 4}, inputs=inputs, seed=int(name[-1]))
        for seed in seeds:
            game = Game(seed, store)
            game.play()
            answers += game.answers
    return answers


@pytest.mark.timeout(600)
def test_threads_callbacks_and_kills_around_one_switcher_leave_nobody_waiting() -> None:
    before = threading.active_count()
    assert play(range(2)) > 0
    assert threading.active_count() <= before + 1  # a callback may still run


if __name__ == "__main__":
    print(f"{play(range(int(sys.argv[1])))} right answers")
