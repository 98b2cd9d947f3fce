"""The table of `torchrelay serve --bench`: the cost of switching between the file's models."""

from __future__ import annotations

import statistics
import sys

import torch
from rich.console import Console
from rich.table import Table

from torchrelay.errors import ConfigError
from torchrelay.switching._models_file import ModelsFile
from torchrelay.switching._queue import Reply
from torchrelay.switching._serve import open_switcher
from torchrelay.switching._store import ModelStore

__all__ = ["print_table"]


def print_table(file: ModelsFile, rounds: int) -> None:
    """Switch between the models `rounds` times; print medians, and the time of a resident model."""
    entries = [entry for entry in file.models.values() if entry.load]
    if not entries:
        raise ConfigError("no model of the file has load = true")
    sys.path.append(str(file.folder))
    with ModelStore() as store, open_switcher(file.server, store) as switcher:
        for entry in entries:
            entry.add_to(store)
            switcher.load(entry.name, priority=entry.priority)
        inputs = {
            entry.name: {s.name: s.example_tensor() for s in store.get(entry.name).inputs}
            for entry in entries
        }
        replies: dict[str, list[Reply]] = {entry.name: [] for entry in entries}
        ready: dict[str, list[Reply]] = {entry.name: [] for entry in entries}
        for _ in range(rounds):
            for entry in entries:
                replies[entry.name].append(switcher.submit(entry.name, inputs[entry.name]).result())
                # At once again: the model is in place, so this is the model's own time.
                ready[entry.name].append(switcher.submit(entry.name, inputs[entry.name]).result())
        sizes = {entry.name: store.get(entry.name).size_bytes for entry in entries}
    Console().print(_table(sizes, replies, ready))


def _table(
    sizes: dict[str, int], replies: dict[str, list[Reply]], ready: dict[str, list[Reply]]
) -> Table:
    table = Table(title=f"Switching, medians; {torch.get_num_threads()} threads")
    for head in (
        "model",
        "size, MiB",
        "copied, MiB",
        "switched to, ms",
        "ready, ms",
        "switching costs, ms",
    ):
        table.add_column(head, justify="left" if head == "model" else "right")
    for name, size_bytes in sizes.items():
        copied = statistics.median(reply.copied_bytes for reply in replies[name]) / 2**20
        switched, own = (
            statistics.median((one.switch_s + one.compute_s) * 1e3 for one in runs[name])
            for runs in (replies, ready)
        )
        row = [size_bytes / 2**20, copied, switched, own, switched - own]
        table.add_row(name, *(f"{value:.2f}" for value in row))
    return table
