"""Loading of a checkpoint into a state or a module, in any layout."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torchrelay import _telemetry
from torchrelay._names import names_options
from torchrelay._progress import Progress, tracking
from torchrelay.checkpoint.engine._group import Group, check_same, group_of
from torchrelay.checkpoint.engine._overlap import finish_copies
from torchrelay.checkpoint.engine._read import (
    MAX_BUFFER_BYTES,
    ChunkReader,
    ChunkSlice,
    ReadOptions,
    deal_blocks,
    warn_without_checksums,
)
from torchrelay.checkpoint.format._snapshots import converted
from torchrelay.checkpoint.memory._folder import MemoryFolder
from torchrelay.checkpoint.plan._match import LoadPlan, Request, match
from torchrelay.checkpoint.plan._part_plan import PartPlan
from torchrelay.checkpoint.state._parts import ModulePart, parts_of_state
from torchrelay.checkpoint.state._state import put
from torchrelay.checkpoint.storage._catalog import newest_inside
from torchrelay.checkpoint.storage._contract import Path, text_of
from torchrelay.deferred import is_deferred, materialize_module
from torchrelay.deferred._shards import Shard as DeferredShard
from torchrelay.errors import (
    ArgumentError,
    CapacityError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    StorageError,
    describe,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LoadResult", "load", "verify"]

_ATTEMPTS = 10  # for checkpoints that savers replace or remove again and again
# What an object's own load_state_dict() may raise that is no fault of the checkpoint.
_PASSED_ON = (
    PeerLostError,
    OperationTimeoutError,
    CapacityError,
    MemoryError,
    torch.OutOfMemoryError,
)


class LoadResult(NamedTuple):
    """The keys that a checkpoint and the state of this rank did not have in common, as
    ``Module.load_state_dict`` returns them.

    The names are those in the checkpoint. ``missing_keys`` also has what was initialised instead,
    but no second name of a tied tensor that was read under its first. ``unexpected_keys`` has only
    keys that begin with ``prefix``.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@names_options()
def load(
    state: Any,
    path: Path,
    *,
    prefix: str = "",
    strict: bool = True,
    initialize_missing: bool = False,
    verify: str = "data",
    overwrite: bool = False,
    threads: int | None = None,
    max_buffer_bytes: int = MAX_BUFFER_BYTES,
    progress: Progress = False,
    device: torch.device | str | None = None,
    shard: DeferredShard | None = None,
    group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadResult:
    """Read a checkpoint into ``state``. Collective over ``group``.

    Each rank reads the byte ranges of its own shards, straight into the tensors, which may be cut
    otherwise than the saved ones. All that this rank needs is verified, and all its tensors are
    checked, before the first one is changed: a checkpoint that is damaged or does not fit leaves
    the state as it was, on every rank. With ``overwrite``, tensors may hold damaged values when the
    error is raised.

    Args:
        state: as for :func:`save`. Tensors are filled in place; other values of a dictionary are
            replaced. Objects get their state by their own ``load_state_dict()``; what goes through
            code that is not torch's is read into memory of its own. An optimizer gets the state
            that the checkpoint has, as by its
            ``load_state_dict()``, whether it has stepped or not; options of its groups that the
            checkpoint lacks stay. Of a module with deferred tensors, those in the checkpoint get
            memory and are read.
        path: what :func:`save` wrote, what ``torch.distributed.checkpoint`` wrote, a
            ``.safetensors`` file, or a folder of them. Of a folder that holds checkpoints of ours,
            the newest of its series is read (see :func:`latest`), which one rank chooses for all.
        prefix: what the keys of ``state`` begin with in the checkpoint, such as ``"model."``.
        strict: whether every key of the state must be in the checkpoint, and for modules and other
            stateful objects every key of the checkpoint in the state. Otherwise, what the
            checkpoint lacks stays as it is; deferred tensors stay deferred.
        initialize_missing: whether deferred tensors of modules that the checkpoint lacks are
            initialised, as eager ones would be, also with ``strict``; with ``strict=False``, those
            that it has in another shape, too, with a warning that names them.
        verify: ``"data"``: the checksums of all that is read (files of other libraries have none;
            for a checkpoint saved with ``checksum=False`` a warning says so); ``"header"``: the
            headers of the files; ``"none"``.
        overwrite: whether data are verified while they are read, which is faster, but leaves
            damaged or incomplete values in the tensors of ``state`` after a
            :class:`~torchrelay.CorruptionError`. For a state that is given up in that case.
        threads: how many read at once; by default the usable cores, at most 4.
        max_buffer_bytes: memory for what cannot be read straight into its tensor.
        progress: True for a progress bar on the coordinator, or a function (bytes done, bytes in
            all).
        device: where deferred tensors go.
        shard: how deferred tensors are cut, as for :func:`torchrelay.deferred.materialize_module`.
        group: the ranks that take part; by default the default process group, or this process
            alone.
        no_dist: whether this process is alone, although there is a process group.

    Returns:
        the keys that only the state or only the checkpoint has.

    Raises:
        ArgumentError: a tensor of the state cannot be filled: it is on the meta device, say, or
            expanded; or the folder holds several series. On every rank.
        CorruptionError: the checkpoint is damaged; the message names file, tensor and byte. On
            every rank.
        DeferredError: a tensor outside a module, or a parameter of an optimizer, is deferred.
        MismatchError: it does not fit the state: a key, shape or dtype; an object refuses its state
            (the message says what is loaded then); or the ranks read different checkpoints. On
            every rank.
        StorageError: it is not there or cannot be read.
        UnsupportedError: another version of the format.
    """
    reading = ReadOptions(verify, threads, max_buffer_bytes)
    finish_copies()  # of what this changes
    ranks = group_of(group, no_dist)
    request = Request(prefix, strict, initialize_missing, device, shard)
    with _telemetry.event("checkpoint", "load", text_of(path)) as running:
        reader, plan = _open(state, path, ranks, request, reading)
        with closing(reader):
            if verify == "data" and not overwrite:
                _verify(reader, plan.segments, ranks)
            running.size_bytes = plan.size_bytes

            def fill() -> LoadResult:
                shown = ranks.is_coordinator
                with tracking(progress, plan.size_bytes, "loading", shown=shown) as advance:
                    return _execute(plan, reader, advance, verify == "data" and overwrite)

            return ranks.together(fill)[ranks.rank]


def _open(
    state: Any, path: Path, ranks: Group, request: Request, reading: ReadOptions
) -> tuple[ChunkReader, LoadPlan]:
    """Open one checkpoint on all ranks, and compare it with the state; changes nothing.

    Of a folder of checkpoints, the coordinator chooses the newest. One that is open was chosen for
    all ranks.

    Raises:
        ArgumentError: the ranks call with different options.
        MismatchError: the checkpoint does not fit, or the ranks opened different ones.
    """
    options = {name: getattr(request, name) for name in ("prefix", "strict", "initialize_missing")}
    for attempt in range(1, _ATTEMPTS + 1):
        is_chosen = isinstance(path, MemoryFolder)
        chosen = None if is_chosen else ranks.coordinate(lambda: newest_inside(path))
        place = path if chosen is None else f"{text_of(path).rstrip('/')}/{chosen}"
        found: list[tuple[ChunkReader, LoadPlan]] = []
        try:
            described = ranks.together(
                lambda place=place, found=found: (  # type: ignore[misc]
                    _matched(state, place, request, reading, ranks, found),
                    {"verify": reading.verify, **options},
                )
            )
            _check_options(ranks.ranks, [mine for _, mine in described])
            opened = [mine for mine, _ in described]
            may_be_replaced = len({place for place, _ in opened}) == 1 and attempt < _ATTEMPTS
            if len({fingerprint for _, fingerprint in opened}) > 1 and may_be_replaced:
                found[0][0].close()
                continue
            check_same(ranks.ranks, opened)
            return found[0]
        except BaseException as error:
            if found:
                found[0][0].close()
            # If retention has removed the one that was chosen, the newest is another one now.
            is_gone = isinstance(error, StorageError) and error.errno == errno.ENOENT
            if chosen is None or not is_gone or attempt == _ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


def _matched(
    state: Any,
    path: Path,
    request: Request,
    reading: ReadOptions,
    ranks: Group,
    found: list[tuple[ChunkReader, LoadPlan]],
) -> tuple[str, str]:
    """Open the checkpoint at ``path``, and add it and the plan to ``found``; return it and its
    fingerprint.
    """
    plans: list[LoadPlan] = []
    fingerprints: list[str] = []

    def check(reader: ChunkReader) -> None:
        parts = parts_of_state(state, request.prefix)
        fingerprints[:] = [reader.manifest.fingerprint]
        reader.manifest = converted(
            reader.manifest, [(part.start, part.owner, part.leaves) for part in parts]
        )
        manifest = reader.manifest.without_exports()
        plan = match(parts, manifest, request, reader.folder.location)
        if reading.verify != "none":
            reader.check_files(segment.chunk.file for segment in plan.segments)
        plans[:] = [plan]

    reader = ChunkReader.open(path, reading, check)
    if reading.verify == "data" and ranks.is_coordinator:
        warn_without_checksums(reader.manifest, reader.folder.location)
    if ranks.is_coordinator:
        plans[0].warn_of_initialized()
    found.append((reader, plans[0]))
    return text_of(path), fingerprints[0]


def _check_options(ranks: Sequence[int], options: Sequence[dict[str, Any]]) -> None:
    """Compare what the ranks pass to load().

    Raises:
        ArgumentError: it differs.
    """
    for rank, other in zip(ranks, options, strict=True):
        for name, value in options[0].items():
            if other[name] != value:
                raise ArgumentError(
                    f"rank {ranks[0]} loads with {name}={value!r}, and rank {rank} with {name}="
                    f"{other[name]!r}; all ranks pass the same"
                )


def _verify(reader: ChunkReader, segments: Sequence[ChunkSlice], ranks: Group) -> None:
    """Verify what any rank reads; a block that several ranks of a host read, on one of them."""
    wanted = ranks.together(lambda: (reader.folder.identity, reader.blocks_of(segments)))
    identity, blocks = wanted[ranks.rank]
    if identity:
        alike = [rank for rank, (other, _) in enumerate(wanted) if other == identity]
        for name in blocks:
            readers = [rank for rank in alike if name in wanted[rank][1]]
            touched = np.stack([wanted[rank][1][name] for rank in readers])
            blocks[name] = deal_blocks(touched, readers.index(ranks.rank))
    ranks.together(lambda: reader.verify_blocks(blocks))


def _execute(
    plan: LoadPlan, reader: ChunkReader, advance: Callable[[int], None], verify: bool
) -> LoadResult:
    """Materialise the deferred tensors, read everything, give each object its state, and set the
    other values.
    """
    owners = [item for item in plan.parts if item.part.owner is not None]
    for item in owners:
        if isinstance(item.part, ModulePart) and is_deferred(item.part.owner):
            _materialize(item, plan)
    targets = (target() if isinstance(target, partial) else target for target in plan.targets)
    reader.fill(zip(plan.segments, targets, strict=True), advance, verify=verify)
    for fill in plan.fills:
        fill()
    # What an object accepts that decides so is not missing.
    missing = [key for key, (item, _) in plan.missing.items() if not plan.is_judge(item)]
    unexpected = [*plan.unexpected]
    for index, item in enumerate(owners):
        try:
            found = plan.give(item)
        except _PASSED_ON:
            raise
        except Exception as error:
            raise MismatchError(_failure(plan, owners, index, error)) from error
        start = item.part.start
        missing += [f"{start}{name}" for name in getattr(found, "missing_keys", ())]
        unexpected += [f"{start}{name}" for name in getattr(found, "unexpected_keys", ())]
    for path, value in plan.rest.values.items():
        put(plan.rest.part.state, path, value)
    return LoadResult([*dict.fromkeys(missing)], [*dict.fromkeys(unexpected)])


def _failure(plan: LoadPlan, owners: Sequence[PartPlan], index: int, error: Exception) -> str:
    """Say what an object refused, and what the load leaves."""
    part, after = owners[index].part, owners[index + 1 :]
    filled = [one.part.label for one in after if {*one.taken.values()} - one.memory.keys()]
    changed = [*(one.part.label for one in owners[:index]), *filled]
    if plan.rest.taken:
        changed.append("the tensors of the state")
    kept = [one.part.label for one in after if one.part.label not in filled]
    if plan.rest.values:
        kept.append("the other values")
    left = f"; loaded: {', '.join(changed)}" if changed else ""
    left += f"; as before: {', '.join(kept)}" if kept else ""
    return (
        f"{plan.location}: load_state_dict() of {part.label} refused what the checkpoint has "
        f"({describe(error)}), and may have taken a part of it{left}"
    )


def _materialize(item: PartPlan, plan: LoadPlan) -> None:
    part, keeps = item.part, plan.request.initialize_missing or plan.is_judge(item)
    missing = {name for name in part.leaves if f"{part.start}{name}" in plan.missing}
    absent = part.leaves.keys() - {*item.taken.values()}
    materialize_module(
        part.owner,
        device=plan.request.device,
        shard=plan.request.shard,
        uninitialized=part.leaves.keys() - missing - {name for name in absent if part.is_own(name)},
        leave_deferred=() if keeps else {name for name in missing if not part.is_own(name)},
    )
    item.renew()


def verify(path: Path, *, threads: int | None = None, progress: Progress = False) -> bool:
    """Check every byte of a checkpoint against its manifest, headers and checksums.

    Returns:
        True if every byte is as it was written. False if the checkpoint has no checksums, because
        it was saved with ``checksum=False`` or by another library: sizes and headers are as they
        should be, and the values of tensors were not checked.

    Raises:
        CorruptionError: the first damage found; the message names file, tensor and byte.
        StorageError: the checkpoint is not there or cannot be read.
    """
    options = ReadOptions(threads=threads)
    reader = ChunkReader.open(path, options, ChunkReader.check_all)
    with closing(reader):
        size_bytes = sum(file.size_bytes for file in reader.manifest.files.values())
        with tracking(progress, size_bytes, "verifying") as advance:
            reader.verify_all(advance)
    return reader.manifest.has_checksums
