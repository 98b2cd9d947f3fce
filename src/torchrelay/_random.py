"""The states of the random generators of torch, Python and NumPy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["random_state", "restore_random", "seed_random"]


def seed_random(seed: int) -> None:
    """Seed the generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def random_state(with_cuda: bool = True) -> dict[str, Any]:
    """Return the states as tensors and plain values, which `torch.load(weights_only=True)` reads;
    those of CUDA only if it is in use.
    """
    version, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=False)
    of_numpy["state"]["key"] = torch.from_numpy(of_numpy["state"]["key"])
    of_python = [version, torch.tensor(words), gauss]
    state = {"torch": torch.get_rng_state(), "python": of_python, "numpy": of_numpy}
    if with_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Restore what :func:`random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    of_numpy = state["numpy"]
    words = {**of_numpy["state"], "key": of_numpy["state"]["key"].numpy()}
    np.random.set_state({**of_numpy, "state": words})
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
