"""Agreement of all ranks on a collective between hosts, before it moves any bytes.

Each rank describes its call in a record of fixed size. Every rank gets all records and compares
them in the same way, so all find the same difference. A record can carry a small payload, which
then needs no step of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchrelay.aggregation._dtypes import code, name_of
from torchrelay.aggregation._plane import Op
from torchrelay.errors import MismatchError

__all__ = [
    "ANY_SIZE",
    "Record",
    "check_matrix",
    "check_records",
    "inline_bytes",
    "is_uniform",
    "payloads",
]

_LEAST_INLINE_BYTES, _MOST_INLINE_BYTES = 256, 2048
_TABLE_BYTES = 16384
_FIELDS = 7
ANY_SIZE = -1  # in `mine`: each pair of ranks has its own size

_FUNCTIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)


def inline_bytes(ranks: int, has_switch: bool) -> int:
    """Return the size of the payload in each of so many ranks' records.

    Where hosts sum through a switch it is small, because payloads do not pass the switch.
    """
    if has_switch:
        return _LEAST_INLINE_BYTES
    share_bytes = _TABLE_BYTES // ranks // 8 * 8
    return min(max(share_bytes, _LEAST_INLINE_BYTES), _MOST_INLINE_BYTES)


def _digest(sizes: Sequence[int]) -> int:
    data = np.asarray(sizes, np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


@dataclass(frozen=True)
class Record:
    """One rank's call.

    Args:
        function: the collective's name.
        count: elements, where all ranks must have the same number, else 0.
        mine: bytes of this rank's own block, where ranks may differ.
        sizes: bytes of all ranks' blocks, as far as this rank knows them.
    """

    function: str
    dtype: torch.dtype = torch.uint8
    op: Op | None = None
    root: int = -1
    count: int = 0
    mine: int = 0
    sizes: Sequence[int] = ()

    def pack(self, inline_bytes: int, payload: torch.Tensor | None = None) -> torch.Tensor:
        """Return the record as bytes, followed by ``inline_bytes`` for a flat payload."""
        row = torch.zeros(_FIELDS * 8 + inline_bytes, dtype=torch.uint8)
        fields = row.numpy()[: _FIELDS * 8].view(np.int64)
        op = -1 if self.op is None else self.op.value
        fields[:6] = (
            _FUNCTIONS.index(self.function),
            code(self.dtype),
            op,
            self.root,
            self.count,
            self.mine,
        )
        fields[6] = _digest(self.sizes) if self.sizes else 0
        if payload is not None:
            row[_FIELDS * 8 :][: payload.numel()] = payload
        return row


def payloads(table: torch.Tensor) -> torch.Tensor:
    """Return the payloads of all records, a row per rank."""
    return table[:, _FIELDS * 8 :]


def check_records(table: torch.Tensor, rank: int, names: Sequence[int]) -> None:
    """Compare the records of all ranks, a row for each rank.

    Raises:
        MismatchError: the same on every rank.
    """
    fields = table.numpy()[:, : _FIELDS * 8].view(np.int64)
    calls = fields[:, :5]
    if not (calls == calls[0]).all():
        made = "; ".join(
            f"rank {name} made {_describe(row, names)}"
            for name, row in zip(names, fields, strict=True)
        )
        raise MismatchError(
            f"rank {names[rank]}, {_FUNCTIONS[fields[rank, 0]]}: the ranks made different calls: "
            f"{made}. All ranks of a group must make the same calls in the same order"
        )
    function = _FUNCTIONS[fields[0, 0]]
    root = int(fields[0, 3])
    if function in ("all_gather", "gather", "scatter"):
        known = fields[:, 6] if function == "all_gather" else fields[root : root + 1, 6]
        if (known != _digest(fields[:, 5].tolist())).any():
            verb = "expects" if function == "scatter" else "sends"
            sizes = ", ".join(
                f"rank {name} {verb} {size} bytes"
                for name, size in zip(names, fields[:, 5], strict=True)
            )
            who = (
                "some ranks' outputs"
                if function == "all_gather"
                else f"the tensors of the root, rank {names[root]},"
            )
            raise MismatchError(
                f"rank {names[rank]}, {function}: the ranks do not agree on sizes: {sizes}, but "
                f"{who} have other sizes; check the shapes on all of them"
            )


def is_uniform(table: torch.Tensor) -> bool:
    """Return whether all pairs of ranks of an all_to_all have blocks of one size."""
    mine = table.numpy()[:, : _FIELDS * 8].view(np.int64)[:, 5]
    return bool((mine != ANY_SIZE).all() and (mine == mine[0]).all())


def check_matrix(
    sends: torch.Tensor, receives: torch.Tensor, rank: int, names: Sequence[int]
) -> None:
    """Compare what each rank sends (``sends[i, j]`` bytes from i to j) with what the other expects.

    Raises:
        MismatchError: the same on every rank.
    """
    different = (sends != receives.T).nonzero()
    if len(different):
        source, to = different[0].tolist()
        raise MismatchError(
            f"rank {names[rank]}, all_to_all: the ranks do not agree on sizes: rank "
            f"{names[source]} sends {int(sends[source, to])} bytes to rank {names[to]}, which "
            f"expects {int(receives[to, source])}; check the shapes and split sizes on both"
        )


def _describe(row: np.ndarray, names: Sequence[int]) -> str:
    function, dtype, op, root, count = (int(value) for value in row[:5])
    name = _FUNCTIONS[function]
    if name == "barrier":
        return name
    size = f"{count} x " if count or op >= 0 else ""
    text = f"{name} of {size}{name_of(dtype)}"
    if op >= 0:
        text += f", {Op(op).name}"
    return text if root < 0 else f"{text}, root {names[root]}"
