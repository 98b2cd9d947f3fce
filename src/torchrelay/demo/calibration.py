"""Calibration of the trained model: a temperature for its scores, by differentiable reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrelay.demo.model import ComplEx

__all__ = ["Calibration", "calibrate"]

_QUESTIONS = 512  # of each rank
_STEPS = 20

Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks; its derivative sums the gradients over all ranks."""


@dataclass(frozen=True)
class Calibration:
    """The factor of all scores, and the mean negative log-likelihood without and with it."""

    factor: float
    before: float
    after: float


def calibrate(model: ComplEx, questions: Tensor, sum_over_ranks: Sum) -> Calibration:
    """Fit the factor of the model's scores to the answers of all ranks' ``questions``. Collective.

    Every rank evaluates its own questions, ``(n, 3)``. The factor is a variable of every rank and
    takes part in the sum, so every rank gets the gradient of the mean over all of them.
    """
    questions = questions[:_QUESTIONS]
    with torch.no_grad():
        scores = model.score_all(questions[:, 0], questions[:, 1])
        ranks, count = sum_over_ranks(torch.tensor([1.0, len(questions)]))
    log_factor = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([log_factor], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        shared = sum_over_ranks(log_factor) / ranks
        scaled = scores * shared.exp()
        local = nn.functional.cross_entropy(scaled, questions[:, 2], reduction="sum")
        mean: Tensor = sum_over_ranks(local) / count
        return mean

    def step() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    before: float = optimizer.step(step)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return Calibration(log_factor.exp().item(), before, loss().item())
