"""Language models that take turns: the time to the first token and between tokens, for 1, 2 and 4
models at once in an arena for one, beside a process of transformers for each model, and the same
switcher without room for stashes, which computes each context again.

    python benchmarks/bench_generate.py          # about three minutes; writes results/generate.md
    python benchmarks/bench_generate.py --smoke  # tiny models, once; writes nothing

Each model has one client, which asks for the next continuation as soon as it has the last one. The
tokens of each model are compared with those of transformers before anything is timed.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hf_models import language_model
from report import parser_of, percentile, table, write

from torchrelay.switching import GenerateOptions, ModelStore, Switcher

MODELS = f"{Path(__file__).with_name('hf_models.py')}:language_model"
KINDS = {"llama": "llama", "qwen": "qwen2", "gpt-2": "gpt2", "mistral": "mistral"}
SLICE_S = 0.25
CORES = len(os.sched_getaffinity(0))

Start = Callable[[str, list[int]], Iterator[int]]


class Load(NamedTuple):
    """What is run."""

    width: int
    layers: int
    prompt: int  # tokens
    tokens: int
    requests: int  # of each client
    together: tuple[int, ...]  # numbers of models

    @property
    def arguments(self) -> dict[str, int]:
        return {"width": self.width, "layers": self.layers}


FULL = Load(384, 8, 256, 64, 3, (1, 2, 4))
BRIEF = 16  # tokens of a switcher without stashes, where each turn computes all before again
SMOKE = Load(64, 2, 32, 6, 1, (1, 2))


class Times(NamedTuple):
    """What clients measured, in seconds."""

    first: list[float]
    between: list[float]
    wall_s: float

    def cells(self) -> list[str]:
        """Return p50 and p99 of both in ms, the longest stall, and tokens a second."""
        found = [
            f"{1e3 * percentile(v, p):.0f}" for v in (self.first, self.between) for p in (50, 99)
        ]
        count = len(self.first) + len(self.between)
        return [*found, f"{1e3 * max(self.between):.0f}", f"{count / self.wall_s:.0f}"]


def prompt_of(name: str, request: int, load: Load) -> list[int]:
    draw = random.Random(f"{name} {request}")
    return [draw.randrange(2, 4000) for _ in range(load.prompt)]


def measure(start: Start, names: list[str], load: Load) -> Times:
    """Let a client of each model ask `load.requests` times."""
    first, between, lock = list[float](), list[float](), threading.Lock()

    def client(name: str) -> None:
        for request in range(load.requests):
            asked = time.perf_counter()
            times = [time.perf_counter() for _ in start(name, prompt_of(name, request, load))]
            with lock:
                first.append(times[0] - asked)
                between.extend(b - a for a, b in itertools.pairwise(times))

    begun = time.perf_counter()
    threads = [threading.Thread(target=client, args=[name]) for name in names]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return Times(first, between, time.perf_counter() - begun)


# --- a process for each model


def _serve(connection: Connection, kind: str, load: Load) -> None:
    """Generate with transformers, and send each token as it is there."""

    class Sender:
        def __init__(self) -> None:
            self.is_prompt = True

        def put(self, ids: torch.Tensor) -> None:
            if not self.is_prompt:
                connection.send(int(ids))
            self.is_prompt = False

        def end(self) -> None:
            connection.send(None)

    torch.manual_seed(0)
    model: Any = language_model(kind, **load.arguments)
    connection.send(None)
    while (asked := connection.recv()) is not None:
        prompt, threads = asked
        torch.set_num_threads(threads)
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            many = {"max_new_tokens": load.tokens, "do_sample": False}
            model.generate(ids, attention_mask=mask, streamer=Sender(), **many)


class Processes:
    """Models of transformers, each in a process of its own, which share the cores."""

    def __init__(self, names: list[str], load: Load) -> None:
        context = multiprocessing.get_context("spawn")
        self.threads = CORES
        self._connections: dict[str, Any] = {}
        for name in names:
            self._connections[name], theirs = context.Pipe()
            given = (theirs, KINDS[name], load)
            context.Process(target=_serve, args=given, daemon=True).start()
            theirs.close()
        for one in self._connections.values():
            one.recv()  # it is ready

    def start(self, name: str, prompt: list[int]) -> Iterator[int]:
        self._connections[name].send((prompt, self.threads))
        yield from iter(self._connections[name].recv, None)

    def close(self) -> None:
        for one in self._connections.values():
            one.send(None)


# --- one arena


def open_switcher(store: ModelStore, names: list[str], **options: Any) -> Switcher:
    largest = max(store.get(name).size_bytes for name in names)
    switcher = Switcher(store, arena_bytes=largest * 5 // 4, slice_s=SLICE_S, **options)
    for name in names:
        switcher.load(name)
    return switcher


class Row(NamedTuple):
    models: int
    system: str
    times: Times
    recomputed: int = 0
    bound_s: float = 0.0  # of a stall


def run_processes(names: list[str], load: Load) -> tuple[list[Row], dict[str, list[int]]]:
    """Return what was measured, and the tokens of each model's first continuation."""
    rows = []
    with contextlib.closing(Processes(names, load)) as rival:
        expected = {one: list(rival.start(one, prompt_of(one, 0, load))) for one in names}
        for count in load.together:
            rival.threads = max(1, CORES // count)
            rows.append(Row(count, "process each", measure(rival.start, names[:count], load)))
    return rows, expected


def run_switched(
    names: list[str], load: Load, expected: dict[str, list[int]], system: str, **options: Any
) -> list[Row]:
    rows = []
    with ModelStore() as store:
        for name in names:
            kwargs = {"kind": KINDS[name], **load.arguments}
            alone = GenerateOptions(max_batch_size=1)
            store.add(name, MODELS, kwargs=kwargs, generate=alone)
        with open_switcher(store, names, **options) as switcher:

            def start(name: str, prompt: list[int]) -> Iterator[int]:
                for token in switcher.generate(name, prompt, max_tokens=load.tokens):
                    yield token.id

            for name in names:
                found = list(start(name, prompt_of(name, 0, load)))
                assert found == expected[name][: load.tokens], name
            for count in load.together:
                before = switcher.status()["counts"]["recomputed_tokens"]
                times = measure(start, names[:count], load)
                status = switcher.status()
                recomputed = status["counts"]["recomputed_tokens"] - before
                copy_s = store.get(names[0]).size_bytes / status["link"]["bytes_per_s"]
                step_s = statistics.median(times.between)
                if count == 1:
                    prompt_s = statistics.median(times.first)
                bound_s = (count - 1) * (SLICE_S + copy_s + prompt_s) + copy_s + step_s
                rows.append(Row(count, system, times, recomputed, 0.0 if options else bound_s))
    return rows


def run(load: Load) -> list[Row]:
    names = list(KINDS)[: max(load.together)]
    rows, expected = run_processes(names, load)
    rows += run_switched(names, load, expected, "switched")
    brief = load._replace(requests=1, tokens=min(load.tokens, BRIEF))
    rows += run_switched(names, brief, expected, "without stashes", stash_bytes=0)
    return sorted(rows, key=lambda one: one.models)


def report(rows: list[Row], load: Load) -> None:
    header = ["models", "system", "first token p50, ms", "p99", "between p50, ms", "p99"]
    header += ["longest stall, ms", "tokens/s", "computed again", "turns and copies, ms"]
    lines = [
        [
            one.models,
            one.system,
            *one.times.cells(),
            one.recomputed or "",
            f"{1e3 * one.bound_s:.0f}" if one.bound_s and one.models > 1 else "",
        ]
        for one in rows
    ]
    about = (
        f"{', '.join(KINDS)} of width {load.width} and {load.layers} layers in float32, in an "
        f"arena of 1.25 models; one client for each, {load.requests} requests of {load.prompt} "
        f"tokens and {load.tokens} more; turns of {SLICE_S} s; {CORES} cores. The processes share "
        f"the cores, and hold all models at once. Without stashes, one request of {BRIEF} tokens. "
        "The last column is what a stall between two tokens may take: the turn of each other "
        "model, its copy, and a step that began just before its end, with a prompt. llama.cpp is "
        "not compared: it has no wheel, and reads files of its own form."
    )
    write("generate", "Language models that take turns", about, table(header, lines))


def main() -> None:
    given = parser_of(__doc__, "tiny models, once, nothing written").parse_args()
    load = SMOKE if given.smoke else FULL
    rows = run(load)
    for one in rows:
        print(one.models, one.system, *one.times.cells(), one.recomputed, f"{one.bound_s:.3f}")
    if not given.smoke:
        report(rows, load)


if __name__ == "__main__":
    main()
