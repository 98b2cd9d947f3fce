"""Some answers of the model, for a person to judge."""

from __future__ import annotations

import math
import random

import torch

from torchrelay.demo.evaluation import Answers, rank_answers
from torchrelay.demo.model import ComplEx
from torchrelay.demo.report import Prediction
from torchrelay.demo.triples import Graph

__all__ = ["predict"]

_QUESTIONS = 10
_ANSWERS = 3


@torch.no_grad()
def predict(model: ComplEx, graph: Graph, seed: int) -> list[Prediction]:
    """Return answers to questions about the objects of test facts: a random fact of each of up to
    ten relations.
    """
    facts = random.Random(seed).sample(graph.test.tolist(), len(graph.test))
    of_relation = {relation: (s, relation, o) for s, relation, o in reversed(facts)}
    chosen = torch.tensor(sorted(of_relation.values(), key=lambda fact: fact[1])[:_QUESTIONS])
    answers = Answers(graph)
    ranks = rank_answers(model.score_all, chosen, answers).tolist()
    return [
        _predict_one(model, graph, answers, fact, rank)
        for fact, rank in zip(chosen, ranks, strict=True)
    ]


def _predict_one(
    model: ComplEx, graph: Graph, answers: Answers, fact: torch.Tensor, rank: float
) -> Prediction:
    subject, relation, expected = fact.tolist()
    scores = model.score_all(fact[0:1], fact[1:2])[0]
    known = graph.train[(graph.train[:, 0] == subject) & (graph.train[:, 1] == relation), 2]
    scores[known] = -math.inf
    _, right = answers.of(fact[0:1], fact[1:2])
    best = scores.topk(min(_ANSWERS, len(graph.entities))).indices.tolist()
    return Prediction(
        subject=graph.entities[subject],
        relation=graph.relations[relation],
        answers=[(graph.entities[entity], entity in right.tolist()) for entity in best],
        expected=graph.entities[expected],
        rank=rank,
    )
