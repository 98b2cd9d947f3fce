"""Options of the demo: those of ``torchrelay demo``, and what its processes need besides."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from torchrelay.errors import UnavailableError

try:
    from typer import Option
except ModuleNotFoundError as error:
    raise UnavailableError(
        f"the demo needs {error.name}: pip install typer rich (extra [cli])"
    ) from None

__all__ = ["DemoOptions"]


_QUICK = {"epochs": 8, "dim": 32, "negatives": 512}


@dataclass(frozen=True)
class DemoOptions:
    """The options with their defaults. Processes receive them as one line of JSON."""

    data: Annotated[
        Path | None,
        Option(
            help="Folder with train.txt, valid.txt, test.txt: lines of subject, relation, object, "
            "separated by tabs. Without it: the code graph of this Python's standard library."
        ),
    ] = None
    allow_unseen: Annotated[
        bool,
        Option(
            "--allow-unseen",
            help="Accept valid and test facts with an entity that train lacks (WN18RR).",
        ),
    ] = False
    nproc: Annotated[int, Option(min=1, help="Processes to train on, on each host.")] = 2
    hosts: Annotated[
        int,
        Option(
            min=1,
            help="Simulated hosts: network namespaces, with an aggregation switch between them. "
            "More than one needs root.",
        ),
    ] = 1
    epochs: Annotated[int, Option(min=1, help="Passes over the training facts.")] = 4
    dim: Annotated[int, Option(min=1, help="Complex numbers in an embedding.")] = 64
    batch_size: Annotated[int, Option(min=1, help="Facts in a step, of all processes.")] = 2048
    negatives: Annotated[
        int, Option(min=1, help="Entities that each process draws in a step as wrong answers.")
    ] = 1024
    learning_rate: Annotated[float, Option(min=0.0, help="Adagrad's, falling to 0 at the end.")] = (
        0.5
    )
    regularisation: Annotated[float, Option(min=0.0, help="Weight of the N3 regulariser.")] = 0.05
    seed: Annotated[int, Option(help="With --nproc 1, the same seed gives the same figures.")] = 0
    timeout_s: Annotated[
        float,
        Option("--timeout", min=1.0, help="Seconds after which a silent process counts as lost."),
    ] = 60.0
    serve: Annotated[
        bool, Option(help="Serve the trained model beside another at the end, and time switches.")
    ] = True
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="Half a minute: a quarter of the library's files, and smaller embeddings.",
        ),
    ] = False
    report: Annotated[Path, Option(help="Where to write the report, one HTML file.")] = Path(
        "report.html"
    )
    launched_at: float = 0.0
    """When the processes were started, by ``time.monotonic()``."""

    def resolved(self) -> DemoOptions:
        """Return the options with what ``quick`` changes, but for those that were given."""
        given = {name for name in _QUICK if getattr(self, name) != getattr(DemoOptions, name)}
        quick = {name: value for name, value in _QUICK.items() if name not in given}
        return replace(self, **quick) if self.quick else self  # type: ignore[arg-type]

    @property
    def command(self) -> str:
        """The command with these options, without folders of this machine."""
        words = ["torchrelay demo"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("launched_at", "report") or value == field.default:
                continue
            name = {"timeout_s": "timeout"}.get(field.name, field.name).replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words.append(f"--{name} {value.name if isinstance(value, Path) else value}")
        return " ".join(words)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> DemoOptions:
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in ("data", "report") if fields[name]}
        return cls(**{**fields, **paths})
