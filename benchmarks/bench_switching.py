"""Model switching: what a switch costs beside a ready model, a restarted process, and other ways to
load weights.

    python benchmarks/bench_switching.py                                 # about 6 minutes
    python benchmarks/bench_switching.py --part links --models bert vit  # a part, kept in --data
    python benchmarks/bench_switching.py --part report                   # results, plots of --data
    python benchmarks/bench_switching.py --smoke                         # once; writes nothing

The report keeps the sections of parts that --data lacks, with their date.

Remakes figures 5 to 9 of the PipeSwitch paper (Bai et al., OSDI 2020): the time of a request that
needs a switch (5), throughput and latency over the time between switches (6), and what pipelining
and grouping (7), the memory pool (8) and the standby worker (9) are worth. Outputs are compared
with an unswitched model's before anything is timed, and the rivals' measurements alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from hf_models import NAMES, SMOKE, build, inputs_of
from report import RESULTS, parser_of, percentile, save, subplots, table, write

from torchrelay.switching import ModelStore, Switcher

ROOT = Path(__file__).parents[1]
MODELS_FILE = Path(__file__).with_name("hf_models.py")
IMAGES = ROOT / "docs" / "images"
LINK_GBPS = 6.0
CYCLES_S = (1.0, 3.0)
PAPER = ("resnet152", "inception", "bert")  # its models; the emulated link switches only these
PAIRS = (("resnet152", "bert"), ("inception", "convnext"))
RESTARTS = 1
BATCH_SECONDS = 4.0  # of each pair and cycle, each way

Runs = dict[str, list[float]]
Options = dict[str, Any]


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def shown(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f} / {1e3 * percentile(seconds, 99):.2f}"


def first_tensor(result: Any) -> torch.Tensor:
    """The first tensor of a model's output, as both sides order them."""
    values = [result] if isinstance(result, torch.Tensor) else result.values()
    return next(value for value in values if isinstance(value, torch.Tensor)).cpu()


# --- rivals

RESTART = """
import sys, torch
for name in dir(torch.nn.init):  # the weights are loaded; from_pretrained() skips this too
    if name.endswith("_") and not name.startswith("_"):
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
torch.set_num_threads(int(sys.argv[4]))
sys.path.insert(0, sys.argv[1])
from hf_models import build, inputs_of
model = build(sys.argv[2])
model.load_state_dict(torch.load(sys.argv[3], weights_only=True, map_location="cpu"))
model.to(sys.argv[5])
with torch.inference_mode():
    model(**{key: value.to(sys.argv[5]) for key, value in inputs_of(sys.argv[2]).items()})
if sys.argv[5] != "cpu":
    torch.cuda.synchronize()
"""


def restart(name: str, weights: Path, options: Options) -> None:
    """A new process: import torch, build, load, compute."""
    arguments = [MODELS_FILE.parent, name, weights, options["threads"], options["device"]]
    subprocess.run([sys.executable, "-c", RESTART, *map(str, arguments)], check=True)


class Rivals:
    """One process that holds the modules and fills them by torch's own ways."""

    def __init__(self, names: tuple[str, ...], folder: Path, device: str) -> None:
        self.device = device
        self.folder = folder
        self.ready = {name: build(name).to(device) for name in names}
        self.files = {name: folder / f"{name}.pt" for name in names}
        for name, model in self.ready.items():
            torch.save(model.state_dict(), self.files[name])
        self.states = {
            name: torch.load(file, weights_only=True, map_location="cpu")
            for name, file in self.files.items()
        }

    def renew(self, names: Iterable[str]) -> None:
        """Move the modules to memory of their own that is new, as an arena's is: what has been idle
        for a minute may be slow on a virtual machine.
        """
        for name in names:
            self.ready[name] = copy.deepcopy(self.ready[name])

    def run(self, name: str) -> torch.Tensor:
        with torch.inference_mode():
            inputs = {key: value.to(self.device) for key, value in inputs_of(name).items()}
            return first_tensor(self.ready[name](**inputs))

    def load_state_dict(self, name: str) -> None:
        self.ready[name].load_state_dict(self.states[name])
        self.run(name)

    def load_mmap(self, name: str) -> None:
        state = torch.load(self.files[name], weights_only=True, map_location="cpu", mmap=True)
        self.ready[name].load_state_dict(state)
        self.run(name)


# --- the switcher


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
            torch.equal(ours, theirs)
            if rivals.device == "cpu"
            else torch.allclose(ours, theirs, atol=1e-3)
        )
        if not same:
            raise SystemExit(f"{name}: the switched model's output differs from the ready one's")


def cold(switcher: Switcher, name: str) -> Callable[[], object]:
    """A request to a model that has just lost its place in the arena."""
    switcher._daemon.owner.call(lambda: switcher._daemon.residency.arena.evict(name))
    return lambda: switcher.infer(name, inputs_of(name))


def requests(
    rivals: Rivals, store: ModelStore, names: tuple[str, ...], repeats: int, options: Options
) -> dict[str, Any]:
    """Times of a request each way; every request of the switcher follows one to another model."""
    runs: dict[str, Runs] = {name: {} for name in names}
    rivals.renew(names)
    with open_switcher(store, names, **options) as switcher:
        check(switcher, rivals, names)
        for repeat in range(repeats):
            for name in names:
                ways: dict[str, Callable[[], object]] = {
                    "ready": lambda name=name: rivals.run(name),  # type: ignore[misc]
                    "load_state_dict": lambda name=name: rivals.load_state_dict(name),  # type: ignore[misc]
                    "mmap": lambda name=name: rivals.load_mmap(name),  # type: ignore[misc]
                }
                if repeat < RESTARTS:
                    ways["restart"] = lambda name=name: restart(  # type: ignore[misc]
                        name, rivals.files[name], options
                    )
                for way, run in ways.items():
                    runs[name].setdefault(way, []).append(timed(run))
                start = time.perf_counter()
                reply = switcher.submit(name, inputs_of(name)).result()
                total_s = time.perf_counter() - start
                runs[name].setdefault("resident", []).append(total_s)
                runs[name].setdefault("overhead", []).append(total_s - reply.compute_s)
                runs[name].setdefault("cold", []).append(timed(cold(switcher, name)))
        for name in names:
            runs[name]["copy_gbps"] = copy_rate(switcher, cold(switcher, name))
    for name in names:
        runs[name]["bytes"] = [store.get(name).size_bytes]
    return runs


def copy_rate(switcher: Switcher, run: Callable[[], object]) -> list[float]:
    """The rate of the copies that `run` needs, and of one plain copy of 64 MiB, in GB/s."""
    before = switcher.status()
    run()
    after = switcher.status()
    size_bytes = after["counts"]["copied_bytes"] - before["counts"]["copied_bytes"]
    seconds = after["link"]["seconds_copying"] - before["link"]["seconds_copying"]
    return [size_bytes / seconds / 1e9, after["link"]["bytes_per_s"] / 1e9]


_MADV_REMOVE = 9

VARIANTS: dict[str, Options] = {
    "best": {},
    "one": {"grouping": "one"},
    "layer": {"grouping": "layer"},
}


def links(
    rivals: Rivals, store: ModelStore, names: tuple[str, ...], repeats: int, options: Options
) -> dict[str, Any]:
    """Cold switches over an emulated link, with the best grouping, one group, and a group for each
    layer.
    """
    cells: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        switchers = {
            variant: stack.enter_context(
                open_switcher(
                    store,
                    names,
                    link_gbps=LINK_GBPS,
                    workers=1,
                    profile_folder=str(rivals.folder),
                    **options,
                    **changed,
                )
            )
            for variant, changed in VARIANTS.items()
        }
        best = switchers["best"]
        for name in names:
            runs: Runs = {}
            for _ in range(repeats):
                best.infer(name, inputs_of(name))
                runs.setdefault("compute", []).append(
                    best.submit(name, inputs_of(name)).result().compute_s
                )
                for variant, switcher in switchers.items():
                    runs.setdefault(variant, []).append(timed(cold(switcher, name)))
            cells[name] = {**runs, **transfer(best, name)}
    return cells


def transfer(switcher: Switcher, name: str) -> dict[str, float]:
    """What the model and its first group take on the link, or in memory if that is slower."""
    status = switcher.status()
    rate = min(LINK_GBPS * 1e9, status["link"]["bytes_per_s"])
    sizes = [block["bytes"] for block in status["blocks"] if block["model"] == name]
    first = [b["bytes"] for b in status["blocks"] if (b["model"], b["group"]) == (name, 0)]
    return {
        "copy_s": sum(sizes) / rate,
        "first_s": sum(first) / rate,
        "groups": len(sizes),
        "memory_gbps": status["link"]["bytes_per_s"] / 1e9,
    }


def without(
    rivals: Rivals, store: ModelStore, names: tuple[str, ...], repeats: int, options: Options
) -> dict[str, Any]:
    """Cold switches with all parts, without the pool, and without a process that stands by."""
    cells: dict[str, Runs] = {name: {"all": [], "pool": [], "standby": []} for name in names}
    with open_switcher(store, names, link_gbps=LINK_GBPS, workers=1, **options) as switcher:
        for repeat in range(repeats):
            for name in names:
                cells[name]["all"].append(timed(cold(switcher, name)))
                run = cold(switcher, name)
                release_memory(switcher)
                cells[name]["pool"].append(timed(run))
                allocate_memory(switcher)
                if repeat < RESTARTS:
                    run = cold(switcher, name)
                    end_worker(switcher)
                    cells[name]["standby"].append(timed(run))
    return cells


def release_memory(switcher: Switcher) -> None:
    """Give the arena's pages back to the system: whoever copies there allocates again, as without a
    pool.
    """
    arena = emptied(switcher)
    start, size_bytes = ctypes.c_void_p(arena.data_ptr()), ctypes.c_size_t(arena.numel())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(start, size_bytes, _MADV_REMOVE):
        raise OSError(ctypes.get_errno(), "madvise")


def allocate_memory(switcher: Switcher) -> None:
    """Allocate all pages of the arena, as when it was made."""
    emptied(switcher).zero_()


def emptied(switcher: Switcher) -> torch.Tensor:
    """The bytes of the arena, where no model is left."""
    for name in switcher.models():
        switcher._daemon.owner.call(lambda name=name: switcher._daemon.residency.arena.evict(name))  # type: ignore[misc]
    return switcher._cache.tensor((switcher._cache.size_bytes,), torch.uint8)


def end_worker(switcher: Switcher) -> None:
    """Kill the only worker, and what it was forked from: the request waits for a new process that
    imports torch and builds the modules.
    """
    fleet = switcher._daemon.fleet
    assert fleet.server is not None
    for pid in (fleet.server.process.pid, fleet.workers[0].pid):
        os.kill(pid, signal.SIGKILL)


def throughput(
    rivals: Rivals, store: ModelStore, names: tuple[str, ...], repeats: int, options: Options
) -> dict[str, Any]:
    """Latencies of one client that calls two models in turn, so many seconds each; beside ready
    models.
    """
    pairs = [pair for pair in PAIRS if set(pair) <= set(names)] or [(names[0], names[1])]
    cycles, whole_s = (CYCLES_S, BATCH_SECONDS) if repeats > 1 else ((0.1,), 0.4)
    measured: dict[str, Any] = {}
    for pair in pairs:
        rivals.renew(pair)
        with open_switcher(store, pair, **options) as switcher:
            check(switcher, rivals, pair)
            for cycle_s in cycles:
                runs: Runs = {"switched": [], "ready": []}
                # The two ways alternate, so that both see the same machine.
                for turn in range(max(2, round(whole_s / cycle_s))):
                    name = pair[turn % 2]
                    switched = functools.partial(switcher.infer, name, inputs_of(name))
                    runs["switched"] += repeated(switched, cycle_s)
                    runs["ready"] += repeated(functools.partial(rivals.run, name), cycle_s)
                measured.setdefault(" and ".join(pair), {})[f"{cycle_s:g}"] = runs
    return measured


def repeated(run: Callable[[], object], seconds: float) -> list[float]:
    """Times of `run`, called for so many seconds."""
    end, times = time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        times.append(timed(run))
    return times


PARTS = {"requests": requests, "links": links, "without": without, "throughput": throughput}

# --- the report


def report(data: dict[str, Any], device: str, before: str = "") -> list[str]:
    """The sections of the results file; those of parts without data are kept from `before`."""
    sections = {
        "requests": (REQUESTS_ON_CPU if device == "cpu" else REQUESTS, request_table),
        "links": (LINKS, link_table),
        "without": (WITHOUT, without_table),
        "throughput": (THROUGHPUT, throughput_table),
    }
    parts = []
    for part, (text, table_of) in sections.items():
        if part in data:
            parts += [text, table_of(data[part])]
        else:
            parts += kept(before, text.splitlines()[0])
    return parts


def kept(before: str, heading: str) -> list[str]:
    """The section of an earlier results file under `heading`, with its date."""
    _, found, rest = before.partition(f"{heading}\n")
    if not found:
        return []
    section = rest.partition("\n## ")[0].strip()
    date = re.search(r"\d{4}-\d\d-\d\d", before)
    if date and not section.startswith("Measured on"):
        section = f"Measured on {date[0]}.\n\n{section}"
    return [f"{heading}\n\n{section}"]


REQUESTS = """## A request that follows one to another model

p50 / p99 in ms. *ready*: the module in this process, no switch. *resident*: the model is in the
arena. *cold*: it is copied there first. *restart*: a new process imports torch, builds the model
and loads its weights, once. *overhead*: a resident request's time less its forward pass in the
worker, p50 / p99. *copies*: the rate of a cold request's copies, while the worker computes, and of
one plain copy of 64 MiB. *times faster*: restart over resident, over cold, and without the
forward pass: restart less ready over overhead."""

REQUESTS_ON_CPU = f"""{REQUESTS}

Over whole requests, a restart is tens of times slower: most of a request on this processor is the
forward pass, which is the same in both. Without it, a restart is hundreds of times slower. The
overhead of qwen2 includes a copy of 19 MB of logits."""

LINKS = f"""## Cold switches over an emulated link (figure 7)

p50 in ms over a link of {LINK_GBPS:g} GB/s, or memory's own rate where that is lower (*GB/s*: the
rate that the copies reach). *one group*: no pipelining. *a group a layer*: no grouping. The
bound is max(copy, compute) and the first group's copy, but at most copy and compute, which is the
forward pass of a model in place."""

WITHOUT = f"""## Cold switches without a part, {LINK_GBPS:g} GB/s (figures 8 and 9)

p50 / p99 in ms. *no pool*: the arena's memory is allocated anew for each switch. *no standby*: the
request waits for a new worker process, once."""

THROUGHPUT = """## Throughput when two models alternate (figure 6)

One client calls one model without pauses for so many seconds, then the other. *of ready*: the rate
over that of two ready modules in one process, in turns of the same length."""


def request_table(data: dict[str, Runs]) -> str:
    ways = ("ready", "resident", "cold", "load_state_dict", "mmap", "restart")
    rows = []
    for name, runs in data.items():
        p50 = {way: statistics.median(runs[way]) for way in ways}
        rows.append(
            [
                name,
                f"{runs['bytes'][0] / 2**20:.0f}",
                *(shown(runs[way]) for way in ways),
                shown(runs["overhead"]),
                "{:.1f}, {:.1f}".format(*runs["copy_gbps"]),
                f"{p50['restart'] / p50['resident']:.0f}, {p50['restart'] / p50['cold']:.0f}, "
                f"{(p50['restart'] - p50['ready']) / statistics.median(runs['overhead']):.0f}",
            ]
        )
    heads = [*ways[:4], "torch.load, mmap", "restart", "overhead", "copies, GB/s", "times faster"]
    return table(["model", "MiB", *heads], rows)


def link_table(data: dict[str, Any]) -> str:
    rows = []
    for name, runs in data.items():
        medians = [statistics.median(runs[key]) for key in VARIANTS]
        compute_s = statistics.median(runs["compute"])
        copied_s = runs["copy_s"]
        bound_s = min(copied_s + compute_s, max(copied_s, compute_s) + runs["first_s"])
        times = [*medians, copied_s, compute_s, bound_s]
        rows.append(
            [
                name,
                f"{min(LINK_GBPS, runs['memory_gbps']):.1f}",
                f"{runs['groups']:.0f}",
                *(f"{1e3 * seconds:.2f}" for seconds in times),
                f"{medians[0] / bound_s:.2f}",
            ]
        )
    heads = ["model", "GB/s", "groups", "best", "one group", "a group a layer", "copy", "compute"]
    return table([*heads, "bound", "best / bound"], rows)


def without_table(data: dict[str, Runs]) -> str:
    rows = [[name, *map(shown, runs.values())] for name, runs in data.items()]
    return table(["model", "all parts", "no pool", "no standby"], rows)


def throughput_table(data: dict[str, Any]) -> str:
    rows = []
    for pair, by_cycle in data.items():
        for cycle, runs in by_cycle.items():
            rates = {way: len(times) / sum(times) for way, times in runs.items()}
            rows.append(
                [
                    pair,
                    cycle,
                    *(f"{rates[way]:.2f}" for way in ("switched", "ready")),
                    f"{100 * rates['switched'] / rates['ready']:.1f} %",
                    *(shown(runs[way]) for way in ("switched", "ready")),
                ]
            )
    heads = ["models", "switch every, s", "switched, 1/s", "ready, 1/s", "of ready"]
    return table([*heads, "switched, p50 / p99 ms", "ready, p50 / p99 ms"], rows)


def plot(data: dict[str, Any]) -> None:
    """Draw figures 5 to 9 from the same measurements as the tables, those that `data` has."""
    if "requests" in data:
        plot_requests(data["requests"])
    if "throughput" in data:
        plot_throughput(data["throughput"])
    if "links" in data and "without" in data:
        plot_ablations(data["links"], data["without"])


def plot_requests(data: dict[str, Runs]) -> None:
    figure, axis = subplots(figsize=(9, 3.6))
    ways = ("ready", "resident", "cold", "load_state_dict", "mmap", "restart")
    bars(axis, data, {way: way for way in ways})
    axis.set(yscale="log", ylabel="time of a request, ms")
    save(figure, IMAGES / "switching.png")


def plot_throughput(data: dict[str, Any]) -> None:
    figure, axes = subplots(1, 2, figsize=(9, 3.4))
    for pair, by_cycle in data.items():
        cycles = [float(cycle) for cycle in by_cycle]
        rates = [
            [len(runs[way]) / sum(runs[way]) for runs in by_cycle.values()]
            for way in ("switched", "ready")
        ]
        axes[0].plot(cycles, [100 * a / b for a, b in zip(*rates, strict=True)], "o-", label=pair)
        for way, style in (("switched", "o-"), ("ready", "--")):
            p99 = [1e3 * percentile(runs[way], 99) for runs in by_cycle.values()]
            axes[1].plot(cycles, p99, style, label=f"{pair}, {way}")
    axes[0].set(ylim=(0, None), xlabel="switch every, s", ylabel="throughput, % of ready")
    axes[0].axhline(100, color="black", linewidth=0.5)
    axes[1].set(ylim=(0, None), xlabel="switch every, s", ylabel="latency, p99, ms")
    for axis in axes:
        axis.legend(frameon=False, fontsize=7)
    save(figure, IMAGES / "switching-throughput.png")


def plot_ablations(links: dict[str, Any], without: dict[str, Runs]) -> None:
    figure, axes = subplots(1, 3, figsize=(13, 3.6))
    labels = {"best": "best groups", "one": "one group", "layer": "a group a layer"}
    bars(axes[0], links, {"compute": "in place, forward", **labels})
    bars(axes[1], without, {"all": "memory pool", "pool": "allocated for each switch"})
    bars(axes[2], without, {"all": "worker stands by", "standby": "new worker process"})
    axes[2].set(yscale="log")
    for axis, title in zip(axes, ("pipelining", "memory", "workers"), strict=True):
        axis.set(ylabel="time of a cold request, ms", title=f"{title}, {LINK_GBPS:g} GB/s")
    save(figure, IMAGES / "switching-ablations.png")


def bars(axis: Any, data: dict[str, Runs], ways: dict[str, str]) -> None:
    """Draw medians of each way, by model."""
    width = 0.8 / len(ways)
    for index, (way, label) in enumerate(ways.items()):
        heights = [1e3 * statistics.median(runs[way]) for runs in data.values()]
        axis.bar([place + index * width for place in range(len(data))], heights, width, label=label)
    axis.set_xticks([place + 0.4 for place in range(len(data))])
    axis.set_xticklabels(list(data), rotation=20, fontsize=8)
    axis.legend(frameon=False, ncols=2, fontsize=7)


def merged(data: dict[str, Any], part: str, new: dict[str, Any]) -> dict[str, Any]:
    return {**data, part: {**data.get(part, {}), **new}}


def models_of(part: str, given: argparse.Namespace) -> tuple[str, ...]:
    """The models of a part; none of the emulated link's on a GPU, which has a link of its own."""
    is_emulated = part in ("links", "without")
    if is_emulated and given.device != "cpu":
        return ()
    return tuple(given.models or (SMOKE if given.smoke else PAPER if is_emulated else NAMES))


def main() -> None:
    parser = parser_of(__doc__, "tiny models, one iteration, nothing written")
    parser.add_argument("--part", choices=[*PARTS, "report"], help="default: all")
    parser.add_argument(
        "--models", nargs="+", help=f"default: all; for links and without, {', '.join(PAPER)}"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda on a machine with a GPU")
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "bench_switching.json")
    given = parser.parse_args()
    repeats = 1 if given.smoke else given.repeats
    torch.set_num_threads(given.threads)
    options = {"threads": given.threads, "device": given.device}
    chosen = [given.part] if given.part else [*PARTS, "report"]
    keeps = given.part is not None and not given.smoke and given.data.exists()
    data: dict[str, Any] = json.loads(given.data.read_text()) if keeps else {}
    names_of = {
        part: names for part in PARTS if part in chosen and (names := models_of(part, given))
    }
    with tempfile.TemporaryDirectory() as folder, ModelStore() as store:
        names = tuple(dict.fromkeys(itertools.chain(*names_of.values())))
        rivals = Rivals(names, Path(folder), given.device)
        fill(store, names, rivals)
        for part, names in names_of.items():
            data = merged(data, part, PARTS[part](rivals, store, names, repeats, options))
            if not given.smoke:
                given.data.write_text(json.dumps(data))
    if given.smoke:
        print("\n\n".join(report(data, given.device)))
    elif "report" in chosen:
        if given.device == "cpu":
            plot(data)
        name = "switching" if given.device == "cpu" else "switching_cuda"
        file = RESULTS / f"{name}.md"
        before = file.read_text() if file.exists() else ""
        write(name, "Model switching", *report(data, given.device, before))


if __name__ == "__main__":
    main()
