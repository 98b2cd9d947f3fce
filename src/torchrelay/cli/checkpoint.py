"""``torchrelay checkpoint``: list, look into, check and convert checkpoints."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from torchrelay.errors import ArgumentError, StorageError

__all__ = ["app"]

_SHORTEST_KEY = 24

app = typer.Typer(no_args_is_help=True, help="List, look into, check and convert checkpoints.")

_PATH = typer.Argument(help="A checkpoint: a folder, a safetensors file, or an fsspec URL.")


@dataclass(frozen=True)
class _Shortened:
    """A key that loses its middle where the table is too narrow: its end tells it from others."""

    key: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        end = (width - 1) // 2
        short = f"{self.key[: width - 1 - end]}…{self.key[len(self.key) - end :]}"
        yield Text(self.key if len(self.key) <= width else short)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self.key), _SHORTEST_KEY), len(self.key))


@app.command()
def ls(
    path: str = typer.Argument(help="A folder of checkpoints, or an fsspec URL."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """List the checkpoints in a folder, oldest first, and which of them load() reads."""
    from torchrelay.checkpoint.storage._catalog import latest, listing  # noqa: PLC0415 - see inspect

    found = listing(path)
    if as_json:
        typer.echo(json.dumps([one._asdict() for one in found], indent=2))
        return
    whole = Column("name", overflow="fold"), Column("series", overflow="fold")
    table = Table(*whole, "saved at", "ranks", "bytes", "manifest", title=path)
    for name, series, saved_at_ns, world_size, size_bytes, state in found:
        at = f"{datetime.fromtimestamp(saved_at_ns / 1e9).astimezone():%Y-%m-%d %H:%M:%S}"
        table.add_row(name, series or "-", at, str(world_size), f"{size_bytes:,}", state)
    console = Console(markup=False, emoji=False)  # names are any text
    console.print(table)
    try:
        console.print(f"load() of this folder reads {latest(path)}")
    except (ArgumentError, StorageError) as error:
        console.print(f"load() of this folder: {error}")


@app.command()
def inspect(
    path: str = _PATH,
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """List the tensors and values of a checkpoint, reading its manifest only."""
    from torchrelay.checkpoint.format._foreign import open_checkpoint  # noqa: PLC0415 - the command starts without it

    folder, read = open_checkpoint(path)
    with closing(folder):
        manifest = read()
        rows = [
            {
                "key": key,
                "dtype": entry.dtype.name,
                "shape": list(entry.shape),
                "chunks": len(entry.chunks),
                "size_bytes": entry.size_bytes,
            }
            for key, entry in manifest.tensors.items()
        ]
        total = sum(file.size_bytes for file in manifest.files.values())
    if as_json:
        found = {
            "path": path,
            "world_size": manifest.world_size,
            "size_bytes": total,
            "files": {name: file.size_bytes for name, file in manifest.files.items()},
            "tensors": rows,
            "objects": dict(manifest.objects),
        }
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table("key", "dtype", "shape", "chunks", "bytes", title=path)
    for row in rows:
        table.add_row(
            _Shortened(str(row["key"])),
            *(str(row[name]) for name in ("dtype", "shape", "chunks")),
            f"{row['size_bytes']:,}",
        )
    for key, value in manifest.objects.items():
        table.add_row(_Shortened(key), "value", json.dumps(value)[:60], "", "")
    console = Console(markup=False, emoji=False)  # keys are any text
    console.print(table)
    console.print(
        f"{len(rows)} tensors and {len(manifest.objects)} values in {len(manifest.files)} files, "
        f"{total:,} bytes, saved by {manifest.world_size} "
        f"rank{'s' if manifest.world_size != 1 else ''}"
    )


@app.command()
def verify(path: str = _PATH) -> None:
    """Compare every byte with what was written; report damage, and exit with code 1."""
    from torchrelay.checkpoint import verify as check  # noqa: PLC0415

    if check(path, progress=Console().is_terminal):
        typer.echo(f"{path}: whole")
    else:
        typer.echo(f"{path}: sizes and headers are right; it has no checksums to verify the rest")


@app.command()
def convert(
    source: str = typer.Argument(
        help="A checkpoint of ours or DCP's, safetensors, or a torch.save file."
    ),
    target: str = typer.Argument(help="What to write; it must not be there yet."),
    to: str = typer.Option("torchrelay", help="torchrelay, dcp, safetensors or torch."),
    prefix: str = typer.Option("", help="Write only keys that begin with it, and strip it."),
    max_file_gb: float = typer.Option(5.0, help="Safetensors files larger than this are split."),
) -> None:
    """Write a checkpoint in another format. The whole state must fit into memory."""
    from torchrelay.checkpoint._tools import convert as convert_to  # noqa: PLC0415

    if max_file_gb <= 0:
        raise ArgumentError(f"--max-file-gb {max_file_gb:g}: it must be more than 0")
    left_out = convert_to(source, target, to, int(max_file_gb * 1e9), prefix=prefix)
    typer.echo(f"{target}: written")
    if left_out:
        shown = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        what = {
            "torch": "replaced {} values that torch.load refuses by similar ones, which convert "
            "restores",
            "dcp": "left out {} empty dictionaries, which DCP cannot hold",
        }.get(to, "left out {} values that are not tensors")
        typer.echo(f"{what.format(len(left_out))}: {shown}", err=True)


memory = typer.Typer(
    no_args_is_help=True,
    help="List and drop checkpoints in this host's memory (see Checkpointer). Their URLs are paths "
    "for the other commands.",
)
app.add_typer(memory, name="memory")


@memory.command("ls")
def list_memory(
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """List the jobs of this user that keep checkpoints in this host's memory, and when it ends."""
    from torchrelay.checkpoint.memory._folder import SCHEME, MemoryFolder  # noqa: PLC0415 - see inspect
    from torchrelay.checkpoint.memory._socket import folder_of, jobs, remove_dead  # noqa: PLC0415

    found: list[dict[str, Any]] = []
    for job in jobs():
        try:
            folder = MemoryFolder(SCHEME + job)
        except StorageError:  # its memory server was killed
            remove_dead(folder_of(job))
            found.append({"url": SCHEME + job, "state": "killed"})
            continue
        with closing(folder):
            status, checkpoints = folder.servers.client.ask("status"), folder.servers.checkpoints
        steps: list[dict[str, Any]] = []
        for one in checkpoints:
            here = [info.size_bytes for info, peer in one.parts.values() if peer is None]
            sizes = {"parts": len(here), "missing": len(one.missing), "size_bytes": sum(here)}
            steps.append({"url": f"{SCHEME}{job}/step-{one.info.step}", **sizes})
        own = {key: status[key] for key in ("used_bytes", "seconds_left", "trainers")}
        found.append({"url": SCHEME + job, "state": "running", **own, "checkpoints": steps})
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    url = Column("checkpoint", overflow="fold")
    table = Table(url, "parts here", "parts missing", "bytes here", "ends")
    for row in found:
        if row["state"] == "killed":
            table.add_row(row["url"], "-", "-", "-", "its memory server was killed")
            continue
        ends = f"{row['seconds_left']:.0f} s after the last of {row['trainers']} trainers"
        table.add_row(row["url"], "", "", f"{row['used_bytes']:,}", ends)
        for step in row["checkpoints"]:
            numbers = step["parts"], step["missing"], f"{step['size_bytes']:,}"
            table.add_row(step["url"], *map(str, numbers), "")
    Console(markup=False, emoji=False).print(table)


@memory.command()
def drop(path: str = typer.Argument(help="The path that the job saves to, or its URL.")) -> None:
    """Release what a job has in this host's memory, once no trainer runs."""
    from torchrelay.checkpoint.memory._folder import SCHEME, MemoryFolder  # noqa: PLC0415 - see inspect
    from torchrelay.checkpoint.memory._socket import job_of  # noqa: PLC0415

    url = path if path.startswith(SCHEME) else SCHEME + job_of(path)
    with closing(MemoryFolder(url)) as folder:
        folder.servers.client.ask("drop")
    typer.echo(f"{path}: dropped")
