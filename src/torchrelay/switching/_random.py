"""The states of all random generators: torch's, numpy's and Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["random_state", "restore_random", "seed_random", "seeded"]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators for the block, and restore their states after it."""
    state = random_state()
    seed_random(seed)
    try:
        yield
    finally:
        restore_random(state)


def seed_random(seed: int) -> None:
    """Seed the generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def random_state() -> dict[str, Any]:
    """Return the states as values that `torch.load(weights_only=True)` reads: no arrays."""
    of_numpy: Any = np.random.get_state(legacy=False)
    of_numpy["state"]["key"] = torch.from_numpy(of_numpy["state"]["key"])
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": of_numpy}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Restore what :func:`random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    of_numpy = state["numpy"]
    words = {**of_numpy["state"], "key": of_numpy["state"]["key"].numpy()}
    np.random.set_state({**of_numpy, "state": words})
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
