"""Tables larger than this host can hold are refused before any memory is taken."""

from __future__ import annotations

import pytest
import torch

from nodes import Server
from torchrelay.errors import ArgumentError


@pytest.mark.parametrize(
    ("keys", "length", "message"),
    [
        (2**62, 4, "a table has less than 4294967295"),
        (2**64, 4, "fit in int64 and int32"),
        (4, 2**33, "fit in int64 and int32"),
        (4, 2**31 - 1, "at most 268435456"),
        (2**32 - 2, 2**16, "but this host has"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(keys: int, length: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Server(keys, length=length)


def test_lengths_of_each_key_count() -> None:
    lengths = torch.full((100_000,), 2**28)
    lengths[0] = 1
    with pytest.raises(ArgumentError, match="GiB for rows"):
        Server(lengths)
