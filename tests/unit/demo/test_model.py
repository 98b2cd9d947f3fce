"""ComplEx against its definition, and the evaluation protocol against loops over every entity."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrelay.demo import model as model_module
from torchrelay.demo.evaluation import (
    Answers,
    MostFrequent,
    RankingMetrics,
    rank_answers,
    sum_metrics,
    with_reciprocals,
)
from torchrelay.demo.model import ComplEx
from torchrelay.demo.options import DemoOptions
from torchrelay.demo.training import Batches
from torchrelay.demo.triples import Graph
from torchrelay.errors import ArgumentError
from torchrelay.parameters import Table, optim
from torchrelay.world import World

ENTITIES, RELATIONS, DIM = 12, 3, 4


@pytest.fixture(params=range(5))
def graph(request: pytest.FixtureRequest) -> Graph:
    chance = random.Random(request.param)
    possible = [
        (s, r, o) for s in range(ENTITIES) for r in range(RELATIONS) for o in range(ENTITIES)
    ]
    facts = torch.tensor(chance.sample(possible, 90))
    names = tuple(f"e{n}" for n in range(ENTITIES))
    return Graph(names, ("r", "s", "t"), facts[:60], facts[60:75], facts[75:])


@pytest.fixture
def model() -> ComplEx:
    torch.manual_seed(3)
    return ComplEx(ENTITIES, RELATIONS, DIM, scale=1.0)


def complex_rows(table: Tensor) -> Tensor:
    return torch.complex(table[:, :DIM].double(), table[:, DIM:].double())


def reference_scores(model: ComplEx) -> Tensor:
    """Re <s, r, conj(o)> for all s, r and o, in complex128."""
    entities, relations = complex_rows(model.rows.detach()), complex_rows(model.relations.detach())
    return torch.einsum("sd,rd,od->sro", entities, relations, entities.conj()).real


def test_scores_are_the_real_part_of_the_complex_product(model: ComplEx) -> None:
    subjects, relations = torch.cartesian_prod(
        torch.arange(ENTITIES), torch.arange(2 * RELATIONS)
    ).unbind(1)
    scores = model.score_all(subjects, relations).view(ENTITIES, 2 * RELATIONS, ENTITIES)
    torch.testing.assert_close(scores.double(), reference_scores(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fast", [False, True], ids=["float32", "bfloat16"])
def test_loss_with_all_entities_is_the_full_softmax_plus_n3(
    model: ComplEx, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(model_module._torch, "has_fast_bfloat16", lambda: fast)  # type: ignore[attr-defined]
    triples = torch.tensor([[0, 1, 2], [3, 5, 3], [7, 0, 0]])
    s, r, o = triples.unbind(1)
    cross_entropy = torch.nn.functional.cross_entropy(reference_scores(model)[s, r], o)
    entities, relations = complex_rows(model.rows.detach()), complex_rows(model.relations.detach())
    n3 = sum(part.abs().pow(3).sum() for part in (entities[s], relations[r], entities[o])) / 3
    loss = model(triples, torch.randperm(ENTITIES), 0.25)
    # bfloat16 keeps 8 bits: a product of 2 * DIM terms is off by up to 2 * DIM * 2**-8 of its
    # terms' size.
    tolerance = 0.1 if fast else 1e-5
    torch.testing.assert_close(
        loss.double(), cross_entropy + 0.25 * n3, rtol=tolerance, atol=tolerance
    )


def test_loss_gradients_match_those_of_the_full_softmax(
    model: ComplEx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module._torch, "has_fast_bfloat16", lambda: False)  # type: ignore[attr-defined]
    triples = torch.tensor([[0, 1, 2], [3, 5, 3], [0, 0, 2]])
    s, r, o = triples.unbind(1)
    model(triples, torch.arange(ENTITIES), 0.0).backward()
    scores = model.query(model.rows[s], model.relations[r]) @ model.rows.T
    expected = torch.autograd.grad(
        torch.nn.functional.cross_entropy(scores, o), list(model.parameters())
    )
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_entities_in_a_table_give_the_same_loss_and_get_the_same_gradients(
    model: ComplEx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module._torch, "has_fast_bfloat16", lambda: False)  # type: ignore[attr-defined]
    triples, negatives = torch.tensor([[0, 1, 2], [3, 5, 3], [0, 0, 2]]), torch.tensor([1, 2, 7, 3])
    plain = copy.deepcopy(model)
    with Table.create(
        ENTITIES, 2 * DIM, optimizer=optim.sgd(1.0), apply_gradients="backward"
    ) as table:
        table.set(torch.arange(ENTITIES), model.rows.detach())
        model.move_entities(table)
        assert {name for name, _ in model.named_parameters()} == {"relations", "entities.weight"}
        for trained in (model, plain):
            trained(triples, negatives, 0.25).backward()
        gathered = model.gathered()
    assert plain.rows.grad is not None
    torch.testing.assert_close(gathered.rows, plain.rows - plain.rows.grad)
    torch.testing.assert_close(model.relations.grad, plain.relations.grad)
    assert torch.equal(gathered.relations, plain.relations)


def test_a_negative_that_is_the_object_itself_gives_no_gradient(model: ComplEx) -> None:
    loss = model(torch.tensor([[4, 2, 5]]), torch.tensor([5]), 0.0)
    loss.backward()
    assert loss == 0
    for parameter in model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_sampled_softmax_estimates_the_full_one(
    model: ComplEx, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over wrong entities is estimated without bias; here its mean over all samples of one
    size.
    """
    monkeypatch.setattr(model_module._torch, "has_fast_bfloat16", lambda: False)  # type: ignore[attr-defined]
    triples = torch.tensor([[4, 2, 5]])
    scores = reference_scores(model)[4, 2]
    right = scores[5]
    wrong = scores.exp().sum() - right.exp()
    sums = []
    for seed in range(2000):
        drawn = torch.randperm(ENTITIES, generator=torch.Generator().manual_seed(seed))[:6]
        loss = model(triples, drawn, 0.0).detach().double()
        sums.append((loss.exp() - 1) * right.exp())
    spread = torch.stack(sums).std() / math.sqrt(len(sums))
    assert abs(torch.stack(sums).mean() - wrong) < 5 * spread


def reference_rank(scores: list[float], own: int, others: set[int]) -> float:
    rivals = [
        score for entity, score in enumerate(scores) if entity != own and entity not in others
    ]
    best = 1 + sum(score > scores[own] for score in rivals)
    worst = best + sum(score == scores[own] for score in rivals)
    return (best + worst) / 2


@pytest.mark.parametrize("levels", [1, 3, 1000], ids=["all tied", "many ties", "few ties"])
def test_ranks_match_a_loop_over_entities(graph: Graph, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    table = torch.randint(levels, (ENTITIES, 2 * RELATIONS, ENTITIES), generator=generator).float()
    facts = {tuple(fact) for fact in graph.triples().tolist()}
    expected = []
    for s, r, o in graph.test.tolist():
        others = {other for other in range(ENTITIES) if (s, r, other) in facts}
        expected.append(reference_rank(table[s, r].tolist(), o, others))
    for s, r, o in graph.test.tolist():
        others = {other for other in range(ENTITIES) if (other, r, o) in facts}
        expected.append(reference_rank(table[o, r + RELATIONS].tolist(), s, others))
    questions = with_reciprocals(graph.test, RELATIONS)
    ranks = rank_answers(lambda s, r: table[s, r], questions, Answers(graph), batch_size=7)
    assert ranks.tolist() == expected
    metrics = RankingMetrics.from_sums(sum_metrics(ranks[:11]) + sum_metrics(ranks[11:]))
    assert metrics.questions == len(expected)
    assert metrics.mrr == pytest.approx(sum(1 / rank for rank in expected) / len(expected))
    shares = [sum(rank <= k for rank in expected) / len(expected) for k in (1, 3, 10)]
    assert metrics.hits == pytest.approx(tuple(shares))


def test_a_model_that_scores_all_the_same_ranks_in_the_middle(graph: Graph) -> None:
    question = graph.test[:1]
    s, r, o = question[0].tolist()
    right = {fact[2] for fact in graph.triples().tolist() if fact[:2] == [s, r]} | {o}
    (rank,) = rank_answers(
        lambda s, _: torch.zeros(len(s), ENTITIES), question, Answers(graph)
    ).tolist()
    assert rank == 1 + (ENTITIES - len(right)) / 2


def test_a_diverged_model_is_no_perfect_model(graph: Graph) -> None:
    with pytest.raises(ArgumentError, match="diverged"):
        rank_answers(
            lambda s, _: torch.full((len(s), ENTITIES), math.nan), graph.test, Answers(graph)
        )


def test_frequency_baseline_counts_objects_of_a_relation(graph: Graph) -> None:
    scores = MostFrequent.of(graph)(
        torch.zeros(2 * RELATIONS, dtype=torch.long), torch.arange(2 * RELATIONS)
    )
    for relation in range(RELATIONS):
        for entity in range(ENTITIES):
            facts = [fact for fact in graph.train.tolist() if fact[1] == relation]
            assert scores[relation, entity] == sum(fact[2] == entity for fact in facts)
            assert scores[relation + RELATIONS, entity] == sum(fact[0] == entity for fact in facts)


def test_ranks_share_each_batch_and_every_process_count_sees_the_same_batches(graph: Graph) -> None:
    options = DemoOptions(data=Path(), batch_size=12, negatives=5)

    def batches(rank: int, size: int) -> list[Tensor]:
        return [share for share, _ in Batches(graph, options, World(rank, size)).epoch(1)]

    whole = batches(0, 1)
    assert len(whole) == 2 * len(graph.train) // 12
    for first, second, both in zip(batches(0, 2), batches(1, 2), whole, strict=True):
        assert torch.equal(torch.stack([first, second], dim=1).flatten(0, 1), both)
    assert len(torch.unique(torch.cat(whole), dim=0)) == len(torch.cat(whole))


def test_negatives_are_distinct_and_differ_between_ranks_and_epochs(graph: Graph) -> None:
    options = DemoOptions(data=Path(), batch_size=12, negatives=5)
    drawn = [
        next(iter(Batches(graph, options, World(rank, 2)).epoch(epoch)))[1]
        for rank in (0, 1)
        for epoch in (1, 2)
    ]
    assert all(len(set(negatives.tolist())) == 5 for negatives in drawn)
    assert len({tuple(negatives.tolist()) for negatives in drawn}) == 4


def test_a_batch_too_small_for_the_processes(graph: Graph) -> None:
    options = DemoOptions(data=Path(), batch_size=3)
    with pytest.raises(ArgumentError, match="4 processes need at least 4 facts in a batch"):
        Batches(graph, options, World(0, 4))
