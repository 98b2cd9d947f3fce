"""ComplEx with reciprocal relations, trained as a classifier over entities.

Sources: Trouillon et al., "Complex Embeddings for Simple Link Prediction" (ICML 2016); reciprocal
relations, the N3 regulariser and Adagrad: Lacroix et al., "Canonical Tensor Decomposition for
Knowledge Base Completion" (ICML 2018); the correction of a sampled softmax: Bengio and Senecal
(2008).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from torchrelay import _torch
from torchrelay.parameters import Embedding, Table

__all__ = ["ComplEx", "entities_of", "log_sum_exp_of_product"]


class ComplEx(nn.Module):
    """Scores a fact (s, r, o) by the real part of <s, r, conj(o)>.

    A question about the subject, (?, r, o), is asked as (o, r + relations, ?): each relation has a
    reciprocal with an embedding of its own. The few relations are dense parameters. The many
    entities are looked up in ``entities``: torch's embedding, with ``weight``, or after
    :meth:`move_entities` one over a table.

    Args:
        dim: complex numbers an embedding has; it is stored as ``2 * dim`` float32, real parts
            first.
    """

    entities: nn.Embedding | Embedding

    def __init__(self, entities: int, relations: int, dim: int, scale: float = 1e-2) -> None:
        super().__init__()
        self.dim = dim
        rows = torch.empty(entities, 2 * dim)
        self.entities = nn.Embedding.from_pretrained(rows, freeze=False)  # type: ignore[no-untyped-call]
        self.relations = nn.Parameter(torch.empty(2 * relations, 2 * dim))
        nn.init.normal_(self.rows, std=scale)
        nn.init.normal_(self.relations, std=scale)

    @property
    def rows(self) -> Tensor:
        """Return every entity's embedding, ``(entities, 2 * dim)``, unless they are in a table."""
        assert isinstance(self.entities, nn.Embedding)
        return self.entities.weight

    def move_entities(self, table: Table) -> None:
        """Look entities up in ``table`` from now on; it must have their rows."""
        self.entities = Embedding(table.num_keys, 2 * self.dim, table=table)

    @torch.no_grad()
    def gathered(self) -> ComplEx:
        """Return a copy with all entities in its own memory, with their current values."""
        if not isinstance(self.entities, Embedding):
            return copy.deepcopy(self)
        found = ComplEx(1, 1, self.dim)
        rows = self.entities.table.pull(torch.arange(self.entities.num_embeddings))
        found.entities = nn.Embedding.from_pretrained(rows, freeze=False)  # type: ignore[no-untyped-call]
        found.relations = nn.Parameter(self.relations.detach().clone())
        return found

    def query(self, subjects: Tensor, relations: Tensor) -> Tensor:
        """Return ``s * r``, whose product with an object's embedding is its score.

        Both are ``(b, 2 * dim)``.
        """
        s_re, s_im = subjects.chunk(2, dim=1)
        r_re, r_im = relations.chunk(2, dim=1)
        return torch.cat([s_re * r_re - s_im * r_im, s_re * r_im + s_im * r_re], dim=1)

    def score_all(self, subjects: Tensor, relations: Tensor) -> Tensor:
        """Return the scores of every entity as the object, float32 ``(b, entities)``; subjects and
        relations are indices.
        """
        return self.query(self.rows[subjects], self.relations[relations]) @ self.rows.T

    def forward(self, triples: Tensor, negatives: Tensor, regularisation: float) -> Tensor:
        """Return the loss, a scalar: cross-entropy of each object against shared negatives, plus
        N3.

        Args:
            triples: int64 ``(b, 3)``; relations from ``relations`` up are reciprocals.
            negatives: int64 ``(k,)``, distinct entities drawn uniformly. With all entities the loss
                is the full softmax.
        """
        s, r, o = triples.unbind(1)
        # One lookup, so that its backward pass makes one gradient, not three.
        rows: Tensor = self.entities(entities_of(triples, negatives))
        subjects, objects, others = rows.tensor_split([len(s), len(s) + len(o)])
        relations = nn.functional.embedding(r, self.relations)
        query = self.query(subjects, relations)
        right = (query * objects).sum(dim=1)
        wrong = self._log_sum_of_wrong(query, others, negatives, o)
        cross_entropy = (torch.logaddexp(right, wrong) - right).mean()
        n3 = torch.stack([_modulus_cubed(part) for part in (subjects, relations, objects)]).sum()
        return cross_entropy + regularisation * n3 / len(triples)

    def _log_sum_of_wrong(
        self, query: Tensor, others: Tensor, negatives: Tensor, objects: Tensor
    ) -> Tensor:
        """Return ``(b,)``: log of the sum of exp(score) over all entities but the object, estimated
        from the negatives.
        """
        entities = self.entities.num_embeddings
        column = torch.full((entities,), -1)
        column[negatives] = torch.arange(len(negatives))
        row = (column[objects] >= 0).nonzero().squeeze(1)  # whose object was drawn itself
        log_sum = log_sum_exp_of_product(query, others, row, column[objects[row]])
        return log_sum + math.log(entities / len(negatives))


def entities_of(triples: Tensor, negatives: Tensor) -> Tensor:
    """Return the entities that a step looks up, int64 ``(2 * b + k,)``: subjects, objects,
    negatives.
    """
    return torch.cat([triples[:, 0], triples[:, 2], negatives])


def log_sum_exp_of_product(query: Tensor, others: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return ``(query @ others.T).logsumexp(1)``, ``(b,)``, without the entries at ``(row,
    column)``. Differentiable.
    """
    result: Tensor = _LogSumExpOfProduct.apply(query, others, row, column)  # type: ignore[no-untyped-call]
    return result


class _LogSumExpOfProduct(torch.autograd.Function):
    """``(query @ others.T).logsumexp(1)``, but for the entries at ``(row, column)``.

    The backward pass needs only products with the exponentials, which the forward pass keeps:
    autograd's own would read and write the ``(b, k)`` scores three times as often, which takes
    longer than the products.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, others: Tensor, row: Tensor, column: Tensor) -> Tensor:
        dtype = torch.bfloat16 if _torch.has_fast_bfloat16() else torch.float32
        query, others = query.to(dtype), others.to(dtype)
        scores = (query @ others.T).float()
        scores[row, column] = -math.inf
        largest = scores.amax(dim=1).clamp_min(torch.finfo(torch.float32).min)
        weights = scores.sub_(largest.unsqueeze(1)).exp_()
        total = weights.sum(dim=1)
        ctx.save_for_backward(query, others, weights.to(dtype), total)
        return total.log() + largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, others, weights, total = ctx.saved_tensors
        # Without a single wrong answer the sum is 0, and so are its derivatives.
        share = (gradient / total.clamp_min(torch.finfo(torch.float32).tiny)).unsqueeze(1)
        of_query = (weights @ others).float() * share
        of_others = (weights.T @ (query * share).to(weights.dtype)).float()
        return of_query, of_others, None, None


def _modulus_cubed(factor: Tensor) -> Tensor:
    re, im = factor.chunk(2, dim=1)
    squared = re * re + im * im
    return (squared * torch.sqrt(squared + 1e-12)).sum()
