"""Checkpoints of one path in several tiers: in the memory of each host, in that of a partner, and
on the disk.

The ranks decide together, at the next save, that the last checkpoint is whole in memory: each waits
until its own part is, with its copy. So the memory of the one before is used again only when nobody
needs it any more, and no server has to agree with another.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Self

from torchrelay import _telemetry, config
from torchrelay._addresses import address_for_peers
from torchrelay._names import names_options
from torchrelay._platform import need_core
from torchrelay.checkpoint._load import load
from torchrelay.checkpoint._save import async_save
from torchrelay.checkpoint._types import check_count
from torchrelay.checkpoint.engine._background import SaveHandle, Staging, saver
from torchrelay.checkpoint.engine._engine import described
from torchrelay.checkpoint.engine._group import Group, group_of
from torchrelay.checkpoint.engine._overlap import OverlappedCopy, finish_copies
from torchrelay.checkpoint.engine._written import assemble
from torchrelay.checkpoint.format._manifest import Head
from torchrelay.checkpoint.memory._folder import SCHEME, InMemory, MemoryFolder, MemoryServers
from torchrelay.checkpoint.memory._part import FileLayout, PartInfo
from torchrelay.checkpoint.memory._socket import MemoryClient, job_of
from torchrelay.checkpoint.plan._inventory import Inventory
from torchrelay.checkpoint.plan._plan import Plan
from torchrelay.checkpoint.state._optimizers import owned_memory
from torchrelay.checkpoint.state._tensors import address_of
from torchrelay.checkpoint.storage._catalog import Keep, check_keep, heads_in
from torchrelay.checkpoint.storage._contract import Path, split, text_of
from torchrelay.errors import (
    ArgumentError,
    CorruptionError,
    MismatchError,
    PeerLostError,
    StorageError,
    TorchRelayError,
    from_json,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer"]

_logger = logging.getLogger("torchrelay.checkpoint")
_NAME = re.compile(r"step-(0|[1-9]\d*)")


class _Candidate(NamedTuple):
    """A checkpoint that may be loaded; ``save_id`` is empty for one that is not in memory."""

    step: int
    path: str
    save_id: str = ""


class Checkpointer:
    """Saves and loads the checkpoints of one job, in memory and on the disk.

    All methods are collective over ``group``, as :func:`save` and :func:`load` are.

    Args:
        path: the folder of the checkpoints, which are called ``step-0``, ``step-1`` and so on; a
            fsspec URL, too. It also names the job: processes of one user on one host that give
            the same path share what is in memory.
        memory: whether each checkpoint stays in the memory of its hosts, in a process that
            outlives its trainers.
        partner: whether each host's part is also copied to the memory of another host.
        overlap: whether a save copies what optimizers change, parameters and the state that they
            keep of these, while training goes on, until the next step of an optimizer. It counts
            from then on; see :meth:`wait_until_copied`.
        disk_every: checkpoints whose step is a multiple of it are written to ``path``, too; None:
            none is.
        keep: which of these to keep, as for :func:`save`.
        group: the ranks that take part; by default the default process group, or this process
            alone.
        no_dist: whether this process is alone, although there is a process group or a launcher.

    Raises:
        ArgumentError: ``partner`` or ``overlap`` without ``memory``, nothing is saved anywhere, or
            a number is out of range.
        UnsupportedError: ``memory`` without the native core.
    """

    @names_options()
    def __init__(
        self,
        path: Path,
        *,
        memory: bool = True,
        partner: bool = False,
        overlap: bool = False,
        disk_every: int | None = 1,
        keep: int | Keep | None = None,
        group: ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        check_count("disk_every", disk_every)
        if not memory and (partner or overlap or disk_every is None):
            raise ArgumentError(
                "memory=False: a partner keeps copies of what is in memory, overlap=True is for "
                "copies to memory, and disk_every=None writes nothing to the disk; give "
                "memory=True, or only disk_every="
            )
        if memory:
            need_core("Checkpointer", "pass memory=False")
        self.path = text_of(path).rstrip("/")
        self._keep = check_keep(keep, f"{self.path}/step-0")
        self._memory, self._partner, self._disk_every = memory, partner, disk_every
        self._overlap = overlap
        self._copying: OverlappedCopy | None = None  # until the next call
        self._hook: Any = None  # of all optimizers
        self._group, self._no_dist = group, no_dist
        self._client: MemoryClient | None = None
        self._staged: PartInfo | None = None  # what is not known to be whole yet
        self._whole = ""  # the newest checkpoint in memory that all ranks know to be whole
        self._newest: int | None = None  # the highest step, once that is known
        self._is_known = False
        self._layout: FileLayout | None = None  # what the memory server has
        self._plan: Plan | None = None  # of the layout
        self._buffers: dict[str, Staging] = {}  # by the checkpoint that is in each
        self._writing: SaveHandle | None = None

    @names_options()
    def save(self, state: Any, *, step: int) -> None:
        """Save ``state`` as the checkpoint of ``step``. Returns once it is copied; it may change
        then. With ``overlap``, returns once all of it is copied but what optimizers change.

        Before, waits until the last one is whole in memory, with its copies at partners.

        Args:
            state: as for :func:`torchrelay.checkpoint.save`.
            step: more than that of the newest checkpoint at the path.

        Raises:
            ArgumentError: a value that a checkpoint cannot hold, or a ``step`` that is not more
                than that of the newest checkpoint at the path. Or, with ``overlap``, a tensor of
                the last save was changed in place before that was copied; nothing is saved.
            CapacityError: the memory for checkpoints of a host is used up.
            TorchRelayError: the last save has failed, and nobody has raised that yet; nothing is
                saved. The next save tries anew.
            MismatchError, UnsupportedError, StorageError, PeerLostError: as for
                :func:`torchrelay.checkpoint.async_save`.
        """
        place = f"{self.path}/step-{step}"
        with _telemetry.event("checkpoint", "tiered_save", place) as running:
            ranks = group_of(self._group, self._no_dist, for_save=True)
            known = ranks.together(lambda: (self._waited(ranks), self._checked(step)))
            self._check_whole([failure for failure, _ in known])
            steps = sorted({each for _, each in known})
            if len(steps) > 1:
                raise MismatchError(f"the ranks save different steps: {steps}")
            if not self._is_known or (self._memory and self._client is None):
                self._find(ranks)
                self._checked(step)  # the newest is the same on all ranks
            if self._memory:
                try:
                    self._staged = self._stage(ranks, state, step)
                except TorchRelayError:
                    self._leave()  # which ends what servers still do for it
                    raise
                running.size_bytes = self._staged.size_bytes
            self._newest = step
            if self._disk_every is not None and step % self._disk_every == 0:
                options: Any = {"group": self._group, "no_dist": self._no_dist}
                self._writing = async_save(state, place, keep=self._keep, **options)

    def _checked(self, step: int) -> int:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ArgumentError(f"step={step!r}: it must be an int of at least 0")
        if self._newest is not None and step <= self._newest:
            raise ArgumentError(
                f"step={step}: {self.path} has step {self._newest}, and steps ascend, because "
                "load() takes the highest: load() it first, or save to another path"
            )
        return step

    def _stage(self, ranks: Group, state: Any, step: int) -> PartInfo:
        """Copy this rank's part, and pass it to the memory server."""

        def begin() -> tuple[str, int]:
            return secrets.token_hex(8), time.time_ns()

        ids, mine, descriptions = saver.planner.begin(state, begin, ranks, saver.raise_failure)
        plan = saver.planner.plan(mine, descriptions, ranks)
        objects = [each.objects for each in descriptions] if ranks.is_coordinator else []
        places = ranks.size, ranks.rank, ranks.global_rank
        staged: list[PartInfo] = []
        copying: list[OverlappedCopy] = []

        def stage() -> bool:
            assert self._client is not None
            old, layout = self._layout, self._layout
            if layout is None or plan is not self._plan:
                layout = FileLayout.of(plan)
                self._layout, self._plan = layout, plan
            is_new = old is None or old.header != layout.header
            if is_new:
                self._release()  # what lies there stays with the server
            staged[:] = [PartInfo(ids[0], step, ids[1], *places, layout.size_bytes)]
            client = self._client
            client.ask("begin", *staged, self._whole)
            used = next((save_id for save_id in self._buffers if save_id != self._whole), None)
            staging = Staging() if used is None else self._buffers.pop(used)
            if used is None:
                staging.reserve(layout.size_bytes, locked=False)
                os.pwrite(staging.fd, layout.header, 0)
            self._buffers[ids[0]] = staging
            new = None if layout is old else layout
            what = *staged, self._whole, new, objects
            send = partial(client.ask, "stage", *what, fds=[staging.fd])
            confirm = partial(client.ask, "confirm", staged[0].key)
            copying[:] = self._copied(staging, state, mine, layout, send, confirm)
            return is_new

        if any(ranks.together(stage)):
            layout = self._layout
            assert layout is not None
            ranks.conclude(  # that the parts of all make a manifest
                lambda: layout.written(ranks.global_rank),
                lambda parts: assemble(descriptions, parts, Head(0, "", ""))[1],
            )
        for one in copying:
            disable: Any = torch.compiler.disable
            self._hook = self._hook or register_optimizer_step_pre_hook(disable(finish_copies))
            one.start()
            self._copying = one
        return staged[0]

    def _copied(
        self,
        staging: Staging,
        state: Any,
        mine: Inventory,
        layout: FileLayout,
        send: Callable[[bool], Any],
        confirm: Callable[[], Any],
    ) -> list[OverlappedCopy]:
        """Copy this rank's part and send it; return what may be copied, and sent, later."""
        chunks, sizes, starts, _ = vars(layout.plan).values()
        blocks = [mine.blocks[chunk.block] for chunk in chunks]
        owned = owned_memory(state, mine.blocks) if self._overlap else {}
        found = [owned.get((address_of(block), block.nbytes), ()) for block in blocks]
        later = np.array([*map(bool, found)], bool)
        staging.copy([*compress(blocks, ~later)], starts[~later], sizes[~later])
        if not later.any():
            send(True)
            return []
        pairs = zip(chunks, found, strict=True)
        watched = [(chunk.keys[0], tensor) for chunk, tensors in pairs for tensor in tensors]
        copy = staging.copier([*compress(blocks, later)], starts[later], sizes[later])
        return [OverlappedCopy(watched, [copy, partial(send, False)], confirm)]

    def wait_until_copied(self) -> None:
        """Wait until the last save with ``overlap`` is copied, so that anything may change.

        Steps of torch's optimizers wait by themselves. Call it before other changes of their
        parameters and state: in place, as when weights are exchanged for averages of them, and
        above all those of which torch does not know, through ``.data``, NumPy or collectives.
        Not collective. What has failed is raised by the next call.
        """
        if self._copying is not None:
            self._copying.finish()

    def wait(self) -> None:
        """Wait until the last checkpoint is whole: in memory, at partners and, if it is written
        there, on the disk.

        Raises:
            TorchRelayError: why it never will be; on every rank.
        """
        ranks = group_of(self._group, self._no_dist)
        self._check_whole(ranks.together(lambda: self._waited(ranks)))
        writing, self._writing = self._writing, None
        ranks.together(lambda: writing and writing.result())

    def _waited(self, ranks: Group) -> dict[str, Any] | None:
        """Wait until this rank's part of the last checkpoint is whole in memory; return why it
        never will be.
        """
        timeout_s = config.load(config.Checkpoint).commit_timeout_s
        try:
            if self._copying is not None:
                self._copying.result()
            if self._staged is not None and self._client is not None:
                self._client.ask("wait", self._staged.key, timeout_s, waits_s=timeout_s)
        except Exception as error:
            return described(error, ranks.global_rank)
        return None

    def _check_whole(self, failures: Iterable[dict[str, Any] | None]) -> None:
        """Note that the last checkpoint is whole in memory, as all ranks have waited for it.

        Raises:
            TorchRelayError: it never will be.
        """
        error = self._concluded(failures)
        if error is not None:
            self._leave()  # one may have to be started again
            raise error

    def _concluded(self, failures: Iterable[dict[str, Any] | None]) -> TorchRelayError | None:
        """Note how the last checkpoint ended, as all ranks have waited for it; return the first
        failure, which is logged.
        """
        failure = next((each for each in failures if each is not None), None)
        staged, self._staged, self._copying = self._staged, None, None
        if failure is None:
            self._whole = self._whole if staged is None else staged.save_id
            return None
        saver.ended[True] += 1
        error = from_json(failure)
        _logger.error("a checkpoint in memory has failed: %s", error)
        return error

    def _join(self, ranks: Group, *, anew: bool = False) -> Callable[[], object]:
        """Connect all ranks to the memory servers of their hosts, unless they are; return what each
        rank calls so that its server knows the others. Waits for the last checkpoint, in the same
        round of messages.
        """
        if not self._memory or (self._client is not None and not anew):
            return lambda: None
        job = job_of(self.path)
        started: list[tuple[str, str, bytes]] = []

        def start() -> tuple[Any, tuple[str, str, bytes]]:
            failure = self._waited(ranks)
            self._leave()  # the server may have ended since
            self._client = MemoryClient.started(job)
            drawn = secrets.token_hex(8), secrets.token_bytes(16)
            return failure, (self._client.server, *drawn)

        def gather(_: str, value: Any) -> list[Any]:
            if started:
                return ranks.together(lambda: value)
            answers = ranks.together(lambda: (*start(), value))
            self._concluded([failure for failure, *_ in answers])
            started[:] = [each for _, each, _ in answers]
            return [given for *_, given in answers]

        interface = address_for_peers(
            gather,
            f"rank {ranks.global_rank}",
            os.environ.get("MASTER_ADDR"),
            config.load(config.TransportSettings).interface,
        )
        client = self._client
        assert client is not None
        _, attempt, token = started[0]
        servers = [*dict.fromkeys(server for server, *_ in started)]
        joined = ranks.together(lambda: client.ask("join", attempt, token, interface))
        addresses = dict(zip((server for server, *_ in started), joined, strict=True))
        mine = servers.index(started[ranks.rank][0])
        others = [addresses[each] for each in servers[mine + 1 :] + servers[:mine]]
        partner = others[0] if self._partner and others else None
        if self._partner and not others and ranks.is_coordinator:
            _logger.warning(
                "%s: partner=True, but all ranks share one host: its memory is copied nowhere, and "
                "lost with the host",
                self.path,
            )
        return lambda: client.ask("meet", others, partner)

    def _leave(self) -> None:
        self.wait_until_copied()
        if self._client is not None:
            self._client.close()
            self._client = self._layout = None  # it is sent, and checked, again

    def _release(self) -> None:
        for staging in self._buffers.values():
            staging.close()
        self._buffers.clear()

    def _candidates(self, in_memory: Sequence[InMemory]) -> list[_Candidate]:
        """Return what can be loaded, the newest first, memory before the disk; report what is
        lost. Coordinator only.
        """
        url = SCHEME + job_of(self.path) if self._memory else ""
        lost = [one for one in in_memory if one.missing]
        found = [
            _Candidate(one.info.step, f"{url}/step-{one.info.step}", one.info.save_id)
            for one in in_memory
            if not one.missing
        ]
        for place in heads_in(self.path):
            if name := _NAME.fullmatch(split(place)[1]):
                found.append(_Candidate(int(name[1]), place))
        found.sort(key=lambda each: -each.step)
        for one in lost:
            if not found or one.info.step > found[0].step:
                _logger.warning(
                    "%s: step %d is not whole in memory: the parts of ranks %s are lost, or were "
                    "not saved in time; the newest that is whole: %s",
                    self.path,
                    one.info.step,
                    one.missing,
                    found[0].path if found else "none",
                )
        return found

    def _find(
        self, ranks: Group, *, anew: bool = False
    ) -> tuple[list[_Candidate], MemoryServers | None]:
        """Join, and find what there is, unless it is known; remember what the next save must not
        lose.
        """
        servers: list[MemoryServers] = []
        in_memory: list[InMemory] = []
        try:
            meet = self._join(ranks, anew=anew)

            def ask() -> None:
                meet()
                if self._client is not None and not self._is_known:
                    servers.append(MemoryServers(self._client))
                    in_memory[:] = servers[0].checkpoints

            find = partial(self._candidates, in_memory)
            found = ranks.conclude(ask, lambda _: [] if self._is_known else find())
        except BaseException:
            self._leave()
            raise
        if not self._is_known:
            self._is_known, self._newest = True, found[0].step if found else None
            self._whole = next((each.save_id for each in found if each.save_id), "")
        return found, servers[0] if servers else None

    def load(self, state: Any, **options: Any) -> int | None:
        """Load the newest checkpoint that is whole and verified, wherever it lies, into any number
        of ranks.

        If one turns out to be damaged, the next older one is loaded, and a warning says so. If all
        are, tensors may have damaged values when the error is raised.

        Args:
            state: as for :func:`torchrelay.checkpoint.load`.
            options: its further arguments, such as ``strict``.

        Returns:
            the step; None if there is no checkpoint.

        Raises:
            CorruptionError, StorageError: none of those that are there can be read.
            TorchRelayError: as for :func:`torchrelay.checkpoint.load`.
        """
        ranks = group_of(self._group, self._no_dist)
        self._is_known = False
        found, servers = self._find(ranks, anew=True)
        failure = None
        common: Any = {"group": self._group, "no_dist": self._no_dist}
        for index, each in enumerate(found):
            place = MemoryFolder(each.path, servers) if each.save_id else each.path
            try:
                load(state, place, **{"overwrite": bool(each.save_id), **common, **options})
            except (CorruptionError, StorageError, PeerLostError) as error:
                failure = failure or error
                _logger.warning("step %d cannot be loaded: %s", each.step, error)
                continue
            self._newest = each.step
            # What could not be loaded is not kept.
            self._whole = next((one.save_id for one in found[index:] if one.save_id), "")
            _logger.info("%s: loaded step %d from %s", self.path, each.step, each.path)
            return each.step
        if failure is not None:
            raise failure
        return None

    @names_options()
    def close(self, *, drop: bool = False) -> None:
        """Wait for the last checkpoint, and leave the memory servers.

        Args:
            drop: whether to release what is in memory, too. Otherwise it stays there until
                ``memory_ttl_s`` ([settings](settings.md)) after the last trainer has left.

        Raises:
            TorchRelayError: as for :meth:`wait`.
        """
        try:
            self.wait()
            if drop:
                ranks = group_of(self._group, self._no_dist)
                ranks.together(self._join(ranks))
        finally:
            if self._client is not None and drop:
                with suppress(PeerLostError):
                    self._client.ask("drop")
            self._leave()
            self._release()
            if self._hook is not None:
                self._hook.remove()
                self._hook = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()
