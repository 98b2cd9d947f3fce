"""Sums of sparse tensors: every rank gathers all indices and values, and adds them up."""

from __future__ import annotations

import torch

from torchrelay.aggregation._plane import Op, Plane
from torchrelay.errors import MismatchError, UnsupportedError

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(
    plane: Plane, size: int, tensor: torch.Tensor, op: Op | float, timeout_s: float
) -> None:
    """Replace ``tensor`` (COO, of any number of sparse and dense dimensions) by the sum over all
    ranks.

    Ranks may hold different indices. The result is coalesced, and the same on all ranks.

    Raises:
        UnsupportedError: another layout than COO, or another op than SUM.
        MismatchError: the ranks' shapes or dtypes differ.
    """
    if tensor.layout is not torch.sparse_coo or op is not Op.SUM:
        name = op.name if isinstance(op, Op) else "PREMUL_SUM"
        raise UnsupportedError(
            f"sml: {name} of {tensor.layout} tensors is not supported; all_reduce takes the SUM of "
            "torch.sparse_coo tensors, all else needs dense ones (e.g. Embedding(sparse=False))"
        )
    with torch.no_grad():
        mine = tensor.detach().cpu().coalesce()
        indices, values = mine.indices().contiguous(), mine.values().contiguous()
        facts = torch.tensor([mine.sparse_dim(), *mine.shape, mine._nnz()])
        all_facts = [torch.empty_like(facts) for _ in range(size)]
        plane.all_gather(all_facts, facts, timeout_s, True)
        if any(not torch.equal(theirs[:-1], facts[:-1]) for theirs in all_facts):
            shapes = [tuple(theirs[1:-1].tolist()) for theirs in all_facts]
            raise MismatchError(
                "all_reduce: the ranks' sparse tensors differ in shape or sparse dimensions: "
                f"{shapes}"
            )
        counts = [int(theirs[-1]) for theirs in all_facts]
        all_indices = [indices.new_empty(indices.shape[0], count) for count in counts]
        all_values = [values.new_empty(count, *values.shape[1:]) for count in counts]
        plane.all_gather(all_indices, indices, timeout_s, True)
        plane.all_gather(all_values, values, timeout_s, True)
        total = torch.sparse_coo_tensor(
            torch.cat(all_indices, 1), torch.cat(all_values), mine.shape, check_invariants=False
        )
        tensor.copy_(total.coalesce())
