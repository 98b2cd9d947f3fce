"""The checkpoint at a path, and those in a folder: which are committed, which is the newest, which
to remove. Imports no torch.
"""

from __future__ import annotations

import errno
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, overload

from torchrelay.checkpoint._tasks import in_threads
from torchrelay.checkpoint._types import MANIFEST, check_count
from torchrelay.checkpoint.format._manifest import (
    Head,
    all_bytes,
    check,
    from_folder,
    head_at,
    is_ours,
)
from torchrelay.checkpoint.memory._folder import SCHEME, MemoryFolder
from torchrelay.checkpoint.storage._contract import (
    Folder,
    Path,
    Transaction,
    local_path,
    read_again,
    split,
    text_of,
)
from torchrelay.checkpoint.storage._local import LocalFolder, LocalTransaction
from torchrelay.checkpoint.storage._remote import RemoteFolder, RemoteTransaction
from torchrelay.errors import ArgumentError, CorruptionError, StorageError, UnsupportedError

__all__ = [
    "Keep",
    "Listed",
    "check_keep",
    "commit_time_ns",
    "heads_in",
    "latest",
    "listing",
    "newest_inside",
    "open_folder",
    "open_transaction",
    "retain",
]

_REQUESTS = 8  # at once
_SHOWN = 4  # series that an error names
_NONE: Mapping[str, Head] = MappingProxyType({})
_RAISE: Any = object()
T = TypeVar("T")
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
    if isinstance(path, MemoryFolder):
        return path
    local, text = local_path(path), text_of(path)
    if local is not None:
        return LocalFolder(local)
    return MemoryFolder(text) if text.startswith(SCHEME) else RemoteFolder(text)


def open_transaction(path: Path, *, fsync: bool = True) -> Transaction:
    """Return a save to ``path`` that has not started."""
    split(path)
    local = local_path(path)
    if local is None:
        if text_of(path).startswith(SCHEME):
            raise ArgumentError(f"{path!r}: to save to memory, use Checkpointer")
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


@overload
def latest(parent: Path, *, pattern: str | None = None) -> str: ...
@overload
def latest(parent: Path, default: T, *, pattern: str | None = None) -> str | T: ...


def latest(parent: Path, default: Any = _RAISE, *, pattern: str | None = None) -> Any:
    """Return the path of the checkpoint in ``parent`` that was committed last; interrupted saves do
    not count.

    Only one series is considered (see :class:`Keep`). Names without a number, such as ``best``,
    belong to none, as do copies and checkpoints that were renamed; these count only where there is
    no series, and there must be one of them.

    Args:
        default: what to return if there is no checkpoint, or no such folder.
        pattern: the series to consider, such as ``"step-*"``; or names, as in a shell, if there is
            no series of that name.

    Raises:
        ArgumentError: there are several series; the message names them.
        StorageError: there is no checkpoint, and no ``default``.
    """
    newest = _newest(parent, pattern)
    if newest is None and default is _RAISE:
        raise StorageError(
            errno.ENOENT,
            f"{text_of(parent)}: there is no committed checkpoint in this folder"
            + (f" whose name fits {pattern!r}" if pattern else "")
            + "; latest(folder, None) returns None then",
        )
    return default if newest is None else newest


def _newest(parent: Path, pattern: str | None = None) -> str | None:
    """Return the newest checkpoint of the one series in a folder.

    Raises:
        ArgumentError: there are several.
    """
    heads = heads_in(parent)
    groups: dict[str, list[str]] = defaultdict(list)
    for path in _newest_first(heads):
        head, name = heads[path], split(path)[1]
        # Copies of one checkpoint, and links to it, have its id.
        groups[series_of(head, name) or head.id].append(path)
    if pattern is not None:  # the name of a series fits those of others, too
        matching = [path for path in _newest_first(heads) if fnmatchcase(split(path)[1], pattern)]
        groups = {pattern: groups.get(pattern, matching)}
    whole = {group: next(filter(_is_whole, paths), None) for group, paths in groups.items()}
    found = {group: path for group, path in whole.items() if path is not None}
    numbered = {group: path for group, path in found.items() if "*" in group}
    chosen = numbered or found
    if len(chosen) > 1:
        names = [
            f"{group} (newest {split(path)[1]})" if numbered else split(path)[1]
            for group, path in chosen.items()
        ]
        what = "several series of checkpoints" if numbered else "several checkpoints of no series"
        advice = (
            f", or that of latest(folder, pattern={next(iter(numbered))!r})" if numbered else ""
        )
        raise ArgumentError(
            f"{text_of(parent)}: the folder holds {what}: {', '.join(names[:_SHOWN])}"
            + (", ..." if len(names) > _SHOWN else "")
            + f"; give the path of one of them{advice}"
        )
    return next(iter(chosen.values()), None)


def newest_inside(path: Path) -> str | None:
    """Return the name of the newest checkpoint in a folder of checkpoints; None if ``path`` is
    something else, such as a checkpoint.

    Raises:
        ArgumentError: it holds several series.
    """
    with closing(open_folder(path)) as folder:
        names = folder.names()
        is_checkpoint = ".metadata" in names or any(n.endswith(".safetensors") for n in names)
        if is_checkpoint or (MANIFEST in names and is_ours(folder)):
            return None
    newest = _newest(path)
    return newest and split(newest)[1]


class Listed(NamedTuple):
    """A checkpoint in a folder. ``state`` is ``"whole"``, or what is wrong with its manifest;
    ``size_bytes`` and ``world_size`` are 0 then.
    """

    name: str
    series: str
    saved_at_ns: int
    world_size: int
    size_bytes: int
    state: str


def listing(parent: Path) -> list[Listed]:
    """Return the checkpoints of ours in a folder, oldest first."""

    def listed(path: str, head: Head) -> Listed:
        name = split(path)[1]
        first = name, series_of(head, name) or "", head.saved_at_ns
        try:
            manifest = read_again(partial(open_folder, path), from_folder)
        except UnsupportedError:
            return Listed(*first, 0, 0, "of another version")
        except (CorruptionError, StorageError):
            return Listed(*first, 0, 0, "damaged")
        size_bytes = sum(file.size_bytes for file in manifest.files.values())
        return Listed(*first, manifest.world_size, size_bytes, "whole")

    heads = heads_in(parent)
    return [listed(path, heads[path]) for path in reversed(_newest_first(heads))]


def commit_time_ns(heads: dict[str, Head]) -> int:
    """Return the time for a commit beside ``heads`` in nanoseconds since 1970: now, or, where the
    clock has been set back, just after the newest of them.
    """
    return max([time.time_ns(), *(head.saved_at_ns + 1 for head in heads.values())])


def heads_in(parent: Path, known: Mapping[str, Head] = _NONE) -> dict[str, Head]:
    """Return the first line of each manifest of ours directly inside ``parent``, by path; of those
    that are known, it is not read again.
    """
    with closing(open_folder(parent)) as folder:
        paths = folder.folders()

    def head(path: str) -> Head | None:
        return known[path] if path in known else head_at(partial(open_folder, path))

    heads = zip(paths, in_threads(head, paths, _REQUESTS), strict=True)
    return {path: head for path, head in heads if head is not None}


def _newest_first(heads: dict[str, Head]) -> list[str]:
    return sorted(heads, key=lambda path: heads[path].saved_at_ns, reverse=True)


def _is_whole(path: str) -> bool:
    """Return whether the manifest at ``path`` is undamaged, as far as this version can tell."""
    try:
        check(*read_again(partial(open_folder, path), all_bytes))
    except (CorruptionError, StorageError):
        return False
    except UnsupportedError:  # whoever reads it is told so, rather than given an older one
        return True
    return True


def retain(path: Path, keep: Keep, known: Mapping[str, Head] = _NONE) -> None:
    """Remove the checkpoints of the series of ``path`` that ``keep`` does not keep; never ``path``
    itself. ``known`` are those in its folder of which the heads were read a moment ago.
    """
    parent, name = split(path)
    with closing(open_folder(parent)) as folder:
        spared = folder.linked()
    heads = {
        old: head
        for old, head in heads_in(parent, known).items()
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


def series_of(head: Head, name: str) -> str | None:
    """Return the series of a checkpoint in a folder, such as ``step-*``; None if it belongs to
    none.

    A copy or a renamed one has another name than when it was saved.
    """
    found = _series(name) if name == head.name else None
    return None if found is None else "*".join(found)


def _series(name: str) -> tuple[str, str] | None:
    found = _NUMBERED.fullmatch(name)
    return (found[1], found[3]) if found else None
