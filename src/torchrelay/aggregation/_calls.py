"""Arguments of calls: their two forms in c10d, and checks.

c10d's functions pass an options object to a group; users may also pass plain arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from torchrelay._group import Op
from torchrelay._torch import premul_factor
from torchrelay.aggregation._dtypes import OPS, check_reduction
from torchrelay.aggregation._plane import Tensors
from torchrelay.errors import ArgumentError

__all__ = [
    "as_lists",
    "check_one_per_rank",
    "check_rank",
    "check_reduction",
    "check_tag",
    "first_tensor",
    "on_root",
    "one_block_a_rank",
    "options_of",
    "reduction_of",
    "root_of",
    "same_dtype",
    "single",
    "split",
    "split_rows",
]


def as_lists(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the tensors of one call as lists of one item, if they are not lists of calls already.

    Each of ``tensors`` is a tensor, or a list with a tensor for each rank.
    """
    for one in tensors:
        if isinstance(one, torch.Tensor):
            break
    else:
        return tensors
    return tuple([one] if isinstance(one, torch.Tensor) or one else [] for one in tensors)


def options_of(kind: Callable[[], Any], given: Iterable[Any]) -> Any:
    """Return the options object among the arguments ``given``, or a new one of ``kind`` with their
    root, reduction and timeout.
    """
    chosen = [argument for argument in given if argument is not None]
    for argument in chosen:
        if hasattr(argument, "timeout"):  # c10d's options share no base class
            return argument
    options = kind()
    for argument in chosen:
        if isinstance(argument, timedelta):
            options.timeout = argument
        elif isinstance(argument, int):
            options.rootRank = argument
        else:
            options.reduceOp = argument
    return options


def reduction_of(opts: Any) -> tuple[Op, float | None]:
    """Return the op, and the factor of PREMUL_SUM."""
    op = OPS[opts.reduceOp.op.value]
    return op, premul_factor(opts.reduceOp) if op is Op.PREMUL_SUM else None


def single(tensors: Tensors, operation: str) -> torch.Tensor:
    """Return the only tensor."""
    if len(tensors) != 1:
        raise ArgumentError(f"{operation} takes one tensor, not {len(tensors)}")
    return tensors[0]


def same_dtype(tensors: Tensors, operation: str) -> None:
    """Raise ArgumentError if the tensors of one call differ in dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ArgumentError(
            f"{operation}: all tensors of one call must have one dtype, but these have {names}"
        )


def check_one_per_rank(tensors: Tensors, ranks: int, operation: str, which: str) -> Tensors:
    """Return the tensors, if there is one for each rank."""
    if len(tensors) != ranks:
        raise ArgumentError(f"{operation}: {len(tensors)} {which} for a group of {ranks} ranks")
    return tensors


def one_block_a_rank(inputs: Tensors, ranks: int, output: torch.Tensor, operation: str) -> None:
    """Raise ArgumentError unless there is one input of the output's size for each rank."""
    same_dtype([*inputs, output], operation)
    if len(inputs) != ranks or any(block.numel() != output.numel() for block in inputs):
        raise ArgumentError(
            f"{operation}: {ranks} inputs of {output.numel()} elements are needed, one for each "
            f"rank; got sizes {[block.numel() for block in inputs]}"
        )


def split(
    whole: torch.Tensor, ranks: int, block: torch.Tensor, operation: str
) -> list[torch.Tensor]:
    """Return ``whole`` as one flat piece per rank, each of ``block``'s size."""
    if whole.numel() != block.numel() * ranks:
        raise ArgumentError(
            f"{operation}: a tensor of {whole.numel()} elements is not {ranks} ranks x "
            f"{block.numel()} elements"
        )
    return list(whole.reshape(ranks, block.numel()))


def split_rows(
    tensor: torch.Tensor, ranks: int, splits: Sequence[int], which: str
) -> list[torch.Tensor]:
    """Return views of ``splits[r]`` rows for rank r; of equal numbers of rows without
    ``splits``.
    """
    if not tensor.dim():
        raise ArgumentError(
            f"all_to_all_single: the {which} is a scalar, which has no rows to split; pass tensors "
            "of at least one dimension"
        )
    rows = tensor.shape[0]
    if not splits:
        if rows % ranks:
            raise ArgumentError(
                f"all_to_all_single: {rows} {which} rows cannot be split evenly over {ranks} ranks"
            )
        splits = [rows // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise ArgumentError(
            f"all_to_all_single: {which} splits {list(splits)} do not add up to {rows} rows on "
            f"{ranks} ranks"
        )
    return list(torch.split(tensor, list(splits)))


def check_rank(rank: int, ranks: int, operation: str) -> None:
    """Raise ArgumentError if there is no such rank in the group."""
    if not 0 <= rank < ranks:
        raise ArgumentError(f"{operation}: there is no rank {rank} in a group of {ranks}")


def check_tag(tag: int, operation: str) -> None:
    """Raise ArgumentError if the tag is negative."""
    if tag < 0:
        raise ArgumentError(f"{operation}: a tag must be 0 or more, not {tag}")


def root_of(opts: Any, ranks: int, operation: str) -> int:
    """Return the root, as a rank of the group."""
    root = int(opts.rootRank)
    check_rank(root, ranks, operation)
    return root


def on_root(
    lists: Sequence[Tensors], is_root: bool, ranks: int, operation: str, which: str
) -> Tensors:
    """Return the root's tensors, one for each rank; none elsewhere."""
    return check_one_per_rank(lists[0] if lists else [], ranks, operation, which) if is_root else []


def first_tensor(arguments: Any) -> torch.Tensor | None:
    """Return the first tensor in nested lists."""
    for argument in arguments:
        found = argument if isinstance(argument, torch.Tensor) else first_tensor(argument)
        if found is not None:
            return found
    return None
