"""Model switching: what a switch costs beside a ready model, a restarted process, and other ways to load weights.

Remakes the paper's figures: the total time of a request that needs a switch (5, 6), throughput over the time
between switches, and what each part gives: grouping, pipelining, standby, prefetch (7 to 9). Every way's
outputs are compared with an unswitched model's before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hf_models import NAMES, SMOKE, build, inputs_of
from report import table, write

from torchrelay.switching import ModelStore, Switcher

MODELS_FILE = Path(__file__).with_name("hf_models.py")
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "switching.png"
LINKS_GBPS = (6.0, 12.0, 25.0)

Runs = dict[str, list[float]]


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def shown(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{1e3 * statistics.median(ordered):.2f} / {1e3 * p99:.2f}"


def first_tensor(result: Any) -> torch.Tensor:
    """The first tensor of a model's output, as both sides order them."""
    values = result.values() if hasattr(result, "values") else [result]
    return next(value for value in values if isinstance(value, torch.Tensor)).cpu()


# --- rivals -----------------------------------------------------------------------------------------------------

RESTART = """
import sys, torch
torch.set_num_threads(int(sys.argv[4]))
sys.path.insert(0, sys.argv[1])
from hf_models import build, inputs_of
model = build(sys.argv[2])
model.load_state_dict(torch.load(sys.argv[3], weights_only=True))
with torch.inference_mode():
    model(**inputs_of(sys.argv[2]))
"""


def restart(name: str, weights: Path, threads: int) -> None:
    """A new process: import torch, build, load, compute."""
    arguments = [str(MODELS_FILE.parent), name, str(weights), str(threads)]
    subprocess.run([sys.executable, "-c", RESTART, *arguments], check=True)


class Rivals:
    """One process that holds the modules and fills them by torch's own ways."""

    def __init__(self, names: tuple[str, ...], folder: Path, device: str) -> None:
        self.device = device
        self.ready = {name: build(name).to(device) for name in names}
        self.files = {name: folder / f"{name}.pt" for name in names}
        for name, model in self.ready.items():
            torch.save(model.state_dict(), self.files[name])
        self.states = {name: torch.load(file, weights_only=True) for name, file in self.files.items()}

    def run(self, name: str) -> torch.Tensor:
        with torch.inference_mode():
            inputs = {key: value.to(self.device) for key, value in inputs_of(name).items()}
            return first_tensor(self.ready[name](**inputs))

    def load_state_dict(self, name: str) -> None:
        self.ready[name].load_state_dict(self.states[name])
        self.run(name)

    def load_mmap(self, name: str) -> None:
        state = torch.load(self.files[name], weights_only=True, mmap=True)
        self.ready[name].load_state_dict(state)
        self.run(name)


# --- the switcher -----------------------------------------------------------------------------------------------


def open_switcher(store: ModelStore, names: tuple[str, ...], **options: Any) -> Switcher:
    sizes = [store.get(name).size_bytes for name in names]
    options = {"arena_bytes": sum(sizes) + (1 << 22), "request_bytes": 64 << 20, **options}
    switcher = Switcher(store, **options)
    for name in names:
        switcher.load(name)
    return switcher


def fill(store: ModelStore, names: tuple[str, ...], rivals: Rivals) -> None:
    for name in names:
        weights = rivals.files[name].with_suffix(".safetensors")
        from safetensors.torch import save_model  # noqa: PLC0415

        save_model(rivals.ready[name], str(weights))
        reference = f"{MODELS_FILE}:build"
        store.add(name, reference, kwargs={"name": name}, inputs=inputs_of(name), weights=weights)


def check(switcher: Switcher, rivals: Rivals, names: tuple[str, ...]) -> None:
    for name in names:
        ours, theirs = first_tensor(switcher.infer(name, inputs_of(name))), rivals.run(name)
        same = (
            torch.equal(ours, theirs) if rivals.device == "cpu" else torch.allclose(ours, theirs, atol=1e-3)
        )
        if not same:
            raise SystemExit(f"{name}: the switched model's output differs from the ready one's")


def cold(switcher: Switcher, name: str) -> Callable[[], object]:
    """A request to a model that has just lost its place in the arena."""
    switcher._daemon.loop.call(lambda: switcher._daemon.arena.evict(name))
    return lambda: switcher.infer(name, inputs_of(name))


def resident_rows(
    store: ModelStore, rivals: Rivals, names: tuple[str, ...], repeats: int, options: dict[str, Any]
) -> Iterator[list[str]]:
    threads = options["threads"]
    with open_switcher(store, names, **options) as switcher:
        check(switcher, rivals, names)
        runs: dict[str, Runs] = {name: {} for name in names}
        for repeat in range(repeats):
            for name in names:  # each request follows one to another model: a switch
                ways: dict[str, Callable[[], object]] = {
                    "ready": lambda name=name: rivals.run(name),  # type: ignore[misc]
                    "resident": lambda name=name: switcher.infer(name, inputs_of(name)),  # type: ignore[misc]
                    "load_state_dict": lambda name=name: rivals.load_state_dict(name),  # type: ignore[misc]
                    "mmap": lambda name=name: rivals.load_mmap(name),  # type: ignore[misc]
                }
                if repeat < 3:
                    ways["restart"] = lambda name=name: restart(name, rivals.files[name], threads)  # type: ignore[misc]
                for way, run in ways.items():
                    runs[name].setdefault(way, []).append(timed(run))
                runs[name].setdefault("cold", []).append(timed(cold(switcher, name)))
    for name in names:
        medians = {way: statistics.median(values) for way, values in runs[name].items()}
        overhead = 1e3 * (medians["resident"] - medians["ready"])
        yield [
            name,
            f"{store.get(name).size_bytes / 2**20:.0f}",
            *(
                shown(runs[name][way])
                for way in ("ready", "resident", "cold", "load_state_dict", "mmap", "restart")
            ),
            f"{overhead:.2f}",
            f"{medians['restart'] / medians['resident']:.0f}",
        ]


_MADV_REMOVE = 9

VARIANTS: dict[str, dict[str, Any]] = {
    "best": {},
    "one group": {"grouping": "one"},
    "a group a layer": {"grouping": "layer"},
}


def link_rows(
    store: ModelStore, names: tuple[str, ...], links: tuple[float, ...], repeats: int, options: dict[str, Any]
) -> Iterator[list[str]]:
    """Cold switches over emulated links, with each part taken away."""
    for link in links:
        cells: dict[str, list[float]] = {name: [] for name in names}
        bounds: dict[str, tuple[int, float]] = {}
        for variant in VARIANTS.values():
            with open_switcher(store, names, link_gbps=link, workers=1, **options, **variant) as switcher:
                for name in names:
                    cells[name].append(statistics.median(timed(cold(switcher, name)) for _ in range(repeats)))
                    if not variant:
                        bounds[name] = bound(switcher, store, name, link, repeats)
        for name in names:
            groups, bound_s = bounds[name]
            times = [f"{1e3 * cell:.2f}" for cell in (*cells[name], bound_s)]
            yield [f"{link:g}", name, str(groups), *times, f"{cells[name][0] / bound_s:.2f}"]


def bound(switcher: Switcher, store: ModelStore, name: str, link: float, repeats: int) -> tuple[int, float]:
    """The number of groups, and max(copy, compute) plus the first group's copy, in seconds."""
    compute_s = statistics.median(
        timed(lambda: switcher.infer(name, inputs_of(name))) for _ in range(repeats)
    )
    status = switcher.status()
    rate = min(link * 1e9, status["link"]["bytes_per_s"])
    first = sum(b["bytes"] for b in status["blocks"] if (b["model"], b["group"]) == (name, 0))
    groups = next(model["groups"] for model in status["models"] if model["name"] == name)
    return groups, max(store.get(name).size_bytes / rate, compute_s) + first / rate


def without_rows(
    store: ModelStore, names: tuple[str, ...], link: float, repeats: int, options: dict[str, Any]
) -> Iterator[list[str]]:
    """Cold switches with all parts, without the pool, and without a process that stands by."""
    with open_switcher(store, names, link_gbps=link, workers=1, **options) as switcher:
        for name in names:
            cells: Runs = {"all": [], "no pool": [], "no standby": []}
            for repeat in range(repeats):
                cells["all"].append(timed(cold(switcher, name)))
                run = cold(switcher, name)
                release_memory(switcher)
                cells["no pool"].append(timed(run))
                if repeat < 3:
                    run = cold(switcher, name)
                    end_worker(switcher)
                    cells["no standby"].append(timed(run))
            yield [name, *(shown(seconds) for seconds in cells.values())]


def release_memory(switcher: Switcher) -> None:
    """Give the arena's pages back to the system: whoever copies there allocates again, as without a pool."""
    arena = switcher._cache.tensor((switcher._cache.size_bytes,), torch.uint8)
    start, size_bytes = ctypes.c_void_p(arena.data_ptr()), ctypes.c_size_t(arena.numel())
    libc = ctypes.CDLL(None, use_errno=True)
    # The models that lie there are lost with it.
    for name in switcher.models():
        switcher._daemon.loop.call(lambda name=name: switcher._daemon.arena.evict(name))  # type: ignore[misc]
    if libc.madvise(start, size_bytes, _MADV_REMOVE):
        raise OSError(ctypes.get_errno(), "madvise")


def end_worker(switcher: Switcher) -> None:
    """Kill the only worker: the request waits for a new process that imports torch and builds the modules."""
    (worker,) = switcher._daemon.fleet.workers
    os.kill(worker.pid, signal.SIGKILL)


def throughput_rows(
    store: ModelStore, rivals: Rivals, names: tuple[str, ...], seconds: float, options: dict[str, Any]
) -> Iterator[list[str]]:
    """Requests per second when two models alternate every so often, beside ready ones."""
    pair = names[:2]
    with open_switcher(store, pair, **options) as switcher:
        for cycle_s in (1.0, 2.0, 5.0) if seconds > 1 else (0.1,):

            def served(run: Callable[[str], object], cycle_s: float = cycle_s) -> float:
                start, count = time.perf_counter(), 0
                while (now := time.perf_counter() - start) < seconds * cycle_s:
                    run(pair[int(now / cycle_s) % 2])
                    count += 1
                return count / (time.perf_counter() - start)

            ours = served(lambda name: switcher.infer(name, inputs_of(name)))
            ready = served(rivals.run)
            yield [f"{cycle_s:g}", f"{ours:.2f}", f"{ready:.2f}", f"{100 * ours / ready:.1f} %"]


def plot(rows: list[list[str]]) -> None:
    """Medians of each way for each model, to :data:`IMAGE`."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axis = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    ways = ("ready", "resident", "cold", "load_state_dict", "torch.load, mmap", "restart")
    for index, way in enumerate(ways):
        heights = [float(row[2 + index].split(" / ")[0]) for row in rows]
        axis.bar([place + index / 8 for place in range(len(rows))], heights, 1 / 8, label=way)
    axis.set(yscale="log", ylabel="time of a request, ms", xticks=[i + 0.3 for i in range(len(rows))])
    axis.set_xticklabels([row[0] for row in rows])
    axis.legend(frameon=False, ncols=3)
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(NAMES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda on a machine with a GPU")
    parser.add_argument("--smoke", action="store_true", help="tiny models, one iteration, nothing written")
    given = parser.parse_args()
    names, repeats = (SMOKE, 1) if given.smoke else (tuple(given.models), given.repeats)
    torch.set_num_threads(given.threads)
    options = {"threads": given.threads, "device": given.device}
    with tempfile.TemporaryDirectory() as folder, ModelStore() as store:
        rivals = Rivals(names, Path(folder), given.device)
        fill(store, names, rivals)
        requests = list(resident_rows(store, rivals, names, repeats, options))
        heads = [
            "model",
            "MiB",
            "ready",
            "resident",
            "cold",
            "load_state_dict",
            "torch.load, mmap",
            "restart",
        ]
        parts = [
            "Time of one request, p50 / p99 in ms; every request follows one to another model. The overhead is the "
            "resident switch's median over the ready model's; the last column is restart over resident.",
            table([*heads, "overhead, ms", "times faster"], requests),
        ]
        if given.device == "cpu":
            rates = LINKS_GBPS[:1] if given.smoke else LINKS_GBPS
            links = list(link_rows(store, names, rates, repeats, options))
            parts += [
                "## Cold switches over an emulated link, and ablations",
                "Medians in ms. The bound is max(copy, compute) and the first group's copy.",
                table(
                    [
                        "GB/s",
                        "model",
                        "groups",
                        "best",
                        "one group",
                        "a group a layer",
                        "bound",
                        "best / bound",
                    ],
                    links,
                ),
            ]
            lines = list(without_rows(store, names, LINKS_GBPS[1], repeats, options))
            parts += [
                f"## Cold switches without a part, {LINKS_GBPS[1]:g} GB/s",
                "p50 / p99 in ms. Without the pool, memory is allocated again for each switch; without a standby, the "
                "request waits for a new worker process, 3 times.",
                table(["model", "all parts", "no pool", "no standby"], lines),
            ]
        rows = list(throughput_rows(store, rivals, names, 0.5 if given.smoke else 6.0, options))
        parts += [
            "## Throughput when two models alternate",
            table(["switch every, s", "switched, 1/s", "ready, 1/s", "of ready"], rows),
        ]
    if given.smoke:
        print("\n\n".join(parts))
        return
    plot(requests)
    write("switching", "Model switching", *parts)


if __name__ == "__main__":
    main()
