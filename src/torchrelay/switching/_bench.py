"""The table of `torchrelay serve --bench`: the cost of switching between the file's models."""

from __future__ import annotations

import statistics

import torch
from rich.console import Console
from rich.table import Table

from torchrelay.errors import ConfigError
from torchrelay.switching._models_file import ModelsFile
from torchrelay.switching._queue import Reply
from torchrelay.switching._serve import open_file

__all__ = ["print_table"]


def print_table(file: ModelsFile, rounds: int) -> None:
    """Switch between the models `rounds` times; print medians, and the time of a resident model."""
    names = [entry.name for entry in file.models.values() if entry.load]
    if not names:
        raise ConfigError("no model of the file has load = true")
    switched: dict[str, list[Reply]] = {name: [] for name in names}
    ready: dict[str, list[Reply]] = {name: [] for name in names}
    with open_file(file, file.server, lambda _: None) as (switcher, store):
        models = {name: store.get(name) for name in names}
        for _ in range(rounds):
            for name, model in models.items():
                inputs = {spec.name: spec.example_tensor() for spec in model.inputs}
                # At once again: the model is in place, so this is the model's own time.
                for replies in (switched, ready):
                    replies[name].append(switcher.submit(name, inputs).result())
        sizes = {name: model.size_bytes for name, model in models.items()}
    Console().print(_table(sizes, switched, ready))


def _table(
    sizes: dict[str, int], replies: dict[str, list[Reply]], ready: dict[str, list[Reply]]
) -> Table:
    table = Table(title=f"Switching, medians; {torch.get_num_threads()} threads")
    table.add_column("model")
    for head in ("size, MiB", "copied, MiB", "switched to, ms", "ready, ms", "switching costs, ms"):
        table.add_column(head, justify="right")
    for name, size_bytes in sizes.items():
        copied = statistics.median(reply.copied_bytes for reply in replies[name]) / 2**20
        switched, own = (
            statistics.median((one.switch_s + one.compute_s) * 1e3 for one in runs[name])
            for runs in (replies, ready)
        )
        row = [size_bytes / 2**20, copied, switched, own, switched - own]
        table.add_row(name, *(f"{value:.2f}" for value in row))
    return table
