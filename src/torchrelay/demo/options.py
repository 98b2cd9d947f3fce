"""Options of the demo, passed to its processes as one line of JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DemoOptions"]


@dataclass(frozen=True)
class DemoOptions:
    """The options of ``torchrelay demo``, with their defaults; its ``--help`` documents them."""

    data: Path
    allow_unseen: bool = False
    nproc: int = 2
    epochs: int = 15
    dim: int = 64
    batch_size: int = 2048
    negatives: int = 2048
    learning_rate: float = 0.5
    regularisation: float = 0.05
    seed: int = 0
    timeout_s: float = 60.0
    serve: bool = True
    reading_s: float = 0.0
    """What it took to make the graph's files; 0 if they were given."""
    cached: bool = False
    launched_at: float = 0.0
    """When the processes were started, in seconds since the epoch."""

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "data": str(self.data)})

    @classmethod
    def from_json(cls, text: str) -> DemoOptions:
        fields = json.loads(text)
        return cls(**{**fields, "data": Path(fields["data"])})
