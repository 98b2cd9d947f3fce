"""Link prediction by the standard protocol: both sides, filtered, with shared ties. Calibration of
its scores by a temperature, with differentiable reductions.

For each fact (s, r, o) the model ranks all entities as answers to (s, r, ?) and to (?, r, o). Other
right answers, of train, valid or test, do not count (*filtered*; Bordes et al., NIPS 2013). Equal
scores share their places: the rank is the mean of the best and the worst that the scores allow
(*realistic*; Berrendorf et al., 2020), so a model that scores everything the same gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrelay.demo.triples import Graph
from torchrelay.errors import ArgumentError

__all__ = [
    "Answers",
    "Calibration",
    "MostFrequent",
    "RankingMetrics",
    "Scorer",
    "Sum",
    "calibrate",
    "rank_answers",
    "sum_metrics",
    "with_reciprocals",
]

HITS_AT = (1, 3, 10)
_CALIBRATED = 512  # questions of each rank

Scorer = Callable[[Tensor, Tensor], Tensor]
"""Takes numbers of subjects and relations, ``(b,)``; gives the score of every entity as the object,
``(b, entities)``.
"""

Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks; its derivative sums the gradients over all ranks."""


@dataclass(frozen=True)
class RankingMetrics:
    """Mean reciprocal rank, and the shares of answers among the first 1, 3 and 10."""

    questions: int
    mrr: float
    hits: tuple[float, ...]

    @classmethod
    def from_sums(cls, sums: Tensor) -> RankingMetrics:
        """Return the metrics of a result of :func:`sum_metrics`, summed over all ranks."""
        count, reciprocal, *hits = sums.tolist()
        return cls(int(count), reciprocal / count, tuple(hit / count for hit in hits))


def with_reciprocals(triples: Tensor, relations: int) -> Tensor:
    """Return the triples and their reciprocals (o, r + relations, s), questions about the
    subject.
    """
    s, r, o = triples.unbind(1)
    return torch.cat([triples, torch.stack([o, r + relations, s], dim=1)])


class Answers:
    """All right answers to each question (subject, relation), reciprocal relations included."""

    def __init__(self, graph: Graph) -> None:
        triples = with_reciprocals(graph.triples(), len(graph.relations))
        self._width = 2 * len(graph.relations)
        self._keys, order = (triples[:, 0] * self._width + triples[:, 1]).sort()
        self._objects = triples[order, 2]

    def of(self, subjects: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and entity of every right answer to the questions, which are ``(b,)`` each."""
        keys = subjects * self._width + relations
        start = torch.searchsorted(self._keys, keys)
        count = torch.searchsorted(self._keys, keys, right=True) - start
        rows = torch.arange(len(keys)).repeat_interleave(count)
        within = torch.arange(len(rows)) - (count.cumsum(0) - count)[rows]
        return rows, self._objects[start[rows] + within]


@torch.no_grad()
def rank_answers(
    score: Scorer, questions: Tensor, answers: Answers, batch_size: int = 256
) -> Tensor:
    """Return the rank of each question's answer, from 1, float64 ``(n,)``; ``questions`` is
    ``(n, 3)``.

    Raises:
        ArgumentError: a score is not finite: the model has diverged.
    """
    ranks = [_rank_batch(score, batch, answers) for batch in torch.split(questions, batch_size)]
    return torch.cat(ranks) if ranks else torch.empty(0, dtype=torch.float64)


def _rank_batch(score: Scorer, questions: Tensor, answers: Answers) -> Tensor:
    s, r, o = questions.unbind(1)
    scores = score(s, r)
    if not scores.isfinite().all():
        raise ArgumentError(
            "the model has diverged: its scores are not finite; try a lower --learning-rate"
        )
    own = scores.gather(1, o.unsqueeze(1))
    scores[answers.of(s, r)] = -math.inf
    scores.scatter_(1, o.unsqueeze(1), own)
    better = (scores > own).sum(dim=1)
    equal = (scores == own).sum(dim=1) - 1
    return 1 + better.double() + equal.double() / 2


def sum_metrics(ranks: Tensor) -> Tensor:
    """Return count, sum of 1/rank, and counts of hits, float64 ``(5,)``; ranks may add theirs
    up.
    """
    hits = [(ranks <= k).sum().double() for k in HITS_AT]
    return torch.stack(
        [torch.tensor(float(len(ranks)), dtype=torch.float64), (1 / ranks).sum(), *hits]
    )


@dataclass(frozen=True)
class Calibration:
    """The factor of all scores, and the mean negative log-likelihood without and with it."""

    factor: float
    before: float
    after: float


def calibrate(score: Scorer, questions: Tensor, sum_over_ranks: Sum) -> Calibration:
    """Fit the factor of a model's scores to the answers of all ranks' ``questions``. Collective.

    Every rank evaluates its own questions, ``(n, 3)``. The factor is a variable of every rank and
    takes part in the sum, so every rank gets the gradient of the mean over all of them.
    """
    questions = questions[:_CALIBRATED]
    with torch.no_grad():
        scores = score(questions[:, 0], questions[:, 1])
        ranks, count = sum_over_ranks(torch.tensor([1.0, len(questions)]))
    log_factor = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([log_factor], max_iter=20, line_search_fn="strong_wolfe")

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


class MostFrequent(nn.Module):
    """The baseline: answers each question with the objects most frequent with its relation in
    train.
    """

    counts: Tensor
    """How often each entity answers each relation, float32 ``(2 * relations, entities)``."""

    def __init__(self, entities: int, relations: int) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2 * relations, entities))

    @classmethod
    def of(cls, graph: Graph) -> MostFrequent:
        made = cls(len(graph.entities), len(graph.relations))
        _, relations, objects = with_reciprocals(graph.train, len(graph.relations)).unbind(1)
        ones = torch.ones(len(objects))
        made.counts.index_put_((relations, objects), ones, accumulate=True)
        return made

    def forward(self, subjects: Tensor, relations: Tensor) -> Tensor:
        """Return float32 scores ``(b, entities)`` for int64 subjects and relations ``(b,)``."""
        return self.counts[relations]
