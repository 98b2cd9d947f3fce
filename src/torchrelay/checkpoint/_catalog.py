"""The checkpoint at a path, and those in a folder: which are committed, which is the newest, which
to remove. Imports no torch.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

from torchrelay.checkpoint._local import LocalFolder, LocalTransaction
from torchrelay.checkpoint._manifest import Head, all_bytes, check_whole, head_at
from torchrelay.checkpoint._remote import RemoteFolder, RemoteTransaction
from torchrelay.checkpoint._storage import (
    Folder,
    Path,
    Transaction,
    local_path,
    read_again,
    split,
    text_of,
)
from torchrelay.checkpoint._types import MANIFEST, check_count
from torchrelay.errors import ArgumentError, CorruptionError, StorageError, UnsupportedError

__all__ = [
    "Keep",
    "check_keep",
    "latest",
    "newest_inside",
    "open_folder",
    "open_transaction",
    "retain",
]

_REQUESTS = 8  # at once
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)


@dataclass(frozen=True)
class Keep:
    """A rule for which checkpoints of a series to keep; ``keep=3`` is short for ``Keep(3)``.

    A series is the set of checkpoints in one folder whose names differ in their last number
    only, such as ``step-100`` and ``step-200``. A save with ``keep=`` removes those of its own
    series that the rule does not keep. It leaves everything else alone: other series, names
    without a number, symbolic links and the checkpoints that links beside them point to,
    checkpoints that were copied or renamed, and files that were added to one.

    Args:
        last: how many of the newest to keep, by the time of their commit.
        every: whether to keep those whose number is a multiple of it, too.
        names: names to keep, too.

    Raises:
        ArgumentError: a number is less than 1, or ``names`` is not a collection of names.
    """

    last: int = 1
    every: int | None = None
    names: Collection[str] = ()

    def __post_init__(self) -> None:
        check_count("keep: last", self.last)
        check_count("keep: every", self.every)
        if isinstance(self.names, str):
            raise ArgumentError(f"keep: names is a collection of names, not {self.names!r}")
        object.__setattr__(self, "names", (*self.names,))  # a view of a dictionary cannot be sent

    def names_one(self, name: str) -> bool:
        """Return whether a checkpoint with a numbered name is kept even if it is old."""
        number = _NUMBERED.fullmatch(name)
        assert number is not None
        return name in self.names or (self.every is not None and int(number[2]) % self.every == 0)


def open_folder(path: Path) -> Folder:
    """Return the checkpoint folder at ``path``, which need not exist."""
    local = local_path(path)
    return RemoteFolder(text_of(path)) if local is None else LocalFolder(local)


def open_transaction(path: Path, *, fsync: bool = True) -> Transaction:
    """Return a save to ``path`` that has not started."""
    split(path)
    local = local_path(path)
    if local is None:
        return RemoteTransaction(text_of(path))
    return LocalTransaction(local, fsync=fsync)


def check_keep(keep: int | Keep | None, path: Path | None) -> Keep | None:
    """Return the rule that ``keep=`` means for a save to ``path``, which may not be known yet.

    Raises:
        ArgumentError: it is out of range, or ``path`` belongs to no series.
    """
    if keep is None:
        return None
    rule = keep if isinstance(keep, Keep) else Keep(keep)
    if path is not None and _series(split(path)[1]) is None:
        raise ArgumentError(
            f"keep= removes older checkpoints of a series, such as step-100 and step-200, and the "
            f"name {split(path)[1]!r} has no number; save under a numbered name, or without keep="
        )
    return rule


def latest(parent: Path) -> str:
    """Return the path of the checkpoint in ``parent`` that was committed last; interrupted saves do
    not count.

    Raises:
        StorageError: there is none.
    """
    newest = _newest(parent)
    if newest is None:
        raise StorageError(
            errno.ENOENT, f"{text_of(parent)}: there is no committed checkpoint in this folder"
        )
    return newest


def _newest(parent: Path) -> str | None:
    return next(filter(_is_whole, _newest_first(_heads(parent))), None)


def newest_inside(path: Path) -> str | None:
    """Return the name of the newest checkpoint in a folder of checkpoints; None if ``path`` is
    something else, such as a checkpoint.
    """
    with closing(open_folder(path)) as folder:
        names = folder.names()
    if any(name in (MANIFEST, ".metadata") or name.endswith(".safetensors") for name in names):
        return None
    newest = _newest(path)
    return newest and split(newest)[1]


def _heads(parent: Path) -> dict[str, Head]:
    """Return the first line of each manifest of ours directly inside ``parent``, by path."""
    with closing(open_folder(parent)) as folder:
        paths = folder.folders()
    with ThreadPoolExecutor(_REQUESTS, "torchrelay-checkpoint") as pool:
        heads = pool.map(lambda path: head_at(partial(open_folder, path)), paths)
        return {path: head for path, head in zip(paths, heads, strict=True) if head is not None}


def _newest_first(heads: dict[str, Head]) -> list[str]:
    return sorted(heads, key=lambda path: heads[path].saved_at_ns, reverse=True)


def _is_whole(path: str) -> bool:
    """Return whether the manifest at ``path`` is undamaged."""
    try:
        check_whole(*read_again(partial(open_folder, path), all_bytes))
    except (CorruptionError, StorageError):
        return False
    return True


def retain(path: Path, keep: Keep) -> None:
    """Remove the checkpoints of the series of ``path`` that ``keep`` does not keep; never ``path``
    itself.
    """
    parent, name = split(path)
    with closing(open_folder(parent)) as folder:
        spared = folder.linked()
    heads = {
        old: head
        for old, head in _heads(parent).items()
        # a copy or a renamed one has another name than when it was saved
        if split(old)[1] == head.name and _series(head.name) == _series(name)
    }
    newest = 0
    for old in _newest_first(heads):
        old_name = heads[old].name
        if newest < keep.last:
            newest += _is_whole(old)
        elif old_name != name and old not in spared and not keep.names_one(old_name):
            # of a damaged one, no manifest of ours claims the files
            with suppress(CorruptionError, UnsupportedError):
                open_transaction(old).remove(heads[old].id)
    open_transaction(path).sweep()


def _series(name: str) -> tuple[str, str] | None:
    found = _NUMBERED.fullmatch(name)
    return (found[1], found[3]) if found else None
