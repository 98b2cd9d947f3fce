"""Which checkpoint the ranks of a load read: the same one on all ranks."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

from torchrelay.checkpoint._catalog import newest_inside
from torchrelay.checkpoint._group import Group
from torchrelay.checkpoint._storage import Path, text_of
from torchrelay.errors import MismatchError, StorageError

__all__ = ["check_same", "open_same"]

_ATTEMPTS = 10  # for checkpoints that savers replace or remove again and again


def open_same(ranks: Group, path: Path, open_one: Callable[[str], str]) -> None:
    """Open one checkpoint on all ranks.

    Args:
        ranks: who opens it.
        path: a checkpoint, or a folder of checkpoints, in which the coordinator chooses the newest.
        open_one: opens the checkpoint at a path and returns its fingerprint.

    Raises:
        MismatchError: the ranks opened different ones.
        TorchRelayError: ``open_one`` raised on some rank.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        chosen = ranks.coordinate(lambda: newest_inside(path))
        place = text_of(path) if chosen is None else f"{text_of(path).rstrip('/')}/{chosen}"
        try:
            opened = ranks.together(partial(_opened, place, open_one))
        except StorageError as error:
            # If retention has removed the one that was chosen, the newest is another one now.
            if chosen is None or error.errno != errno.ENOENT or attempt == _ATTEMPTS:
                raise
            continue
        may_be_replaced = len({place for place, _ in opened}) == 1 and attempt < _ATTEMPTS
        if len({fingerprint for _, fingerprint in opened}) > 1 and may_be_replaced:
            continue
        check_same(ranks.ranks, opened)
        return


def _opened(place: str, open_one: Callable[[str], str]) -> tuple[str, str]:
    return place, open_one(place)


def check_same(ranks: tuple[int, ...], opened: list[tuple[str, str]]) -> None:
    """Compare the checkpoints that ranks have opened: their paths and fingerprints.

    Raises:
        MismatchError: they are not the same.
    """
    first = opened[0]
    for rank, other in zip(ranks, opened, strict=True):
        if other[1] != first[1]:
            raise MismatchError(
                f"the ranks read different checkpoints: rank {ranks[0]} has opened {first[0]} (id "
                f"{first[1][:16]}), rank {rank} {other[0]} (id {other[1][:16]}); all must read the "
                "same: let one rank choose, as load() does for the folder that holds the "
                "checkpoints"
            )
