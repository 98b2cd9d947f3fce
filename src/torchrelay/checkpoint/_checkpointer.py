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
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

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
from torchrelay.checkpoint.engine._written import assemble
from torchrelay.checkpoint.format._manifest import Head
from torchrelay.checkpoint.memory._folder import SCHEME, InMemory, MemoryFolder
from torchrelay.checkpoint.memory._part import FileLayout, PartInfo
from torchrelay.checkpoint.memory._socket import MemoryClient, job_of
from torchrelay.checkpoint.plan._plan import Plan
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
        disk_every: checkpoints whose step is a multiple of it are written to ``path``, too; None:
            none is.
        keep: which of these to keep, as for :func:`save`.
        group: the ranks that take part; by default the default process group, or this process
            alone.
        no_dist: whether this process is alone, although there is a process group or a launcher.

    Raises:
        ArgumentError: ``partner`` without ``memory``, nothing is saved anywhere, or a number is out
            of range.
        UnsupportedError: ``memory`` without the native core.
    """

    @names_options()
    def __init__(
        self,
        path: Path,
        *,
        memory: bool = True,
        partner: bool = False,
        disk_every: int | None = 1,
        keep: int | Keep | None = None,
        group: ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        check_count("disk_every", disk_every)
        if not memory and (partner or disk_every is None):
            raise ArgumentError(
                "memory=False: a partner keeps copies of what is in memory, and disk_every=None "
                "writes nothing to the disk; give memory=True, or only disk_every="
            )
        if memory:
            need_core("Checkpointer", "pass memory=False")
        self.path = text_of(path).rstrip("/")
        self._keep = check_keep(keep, f"{self.path}/step-0")
        self._memory, self._partner, self._disk_every = memory, partner, disk_every
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
        then.

        Before, waits until the last one is whole in memory, with its copies at partners.

        Args:
            state: as for :func:`torchrelay.checkpoint.save`.
            step: more than that of the newest checkpoint at the path.

        Raises:
            ArgumentError: a value that a checkpoint cannot hold, or a ``step`` that is not more
                than that of the newest checkpoint at the path.
            CapacityError: the memory for checkpoints of a host is used up.
            TorchRelayError: the last save has failed, and nobody has raised that yet; nothing is
                saved. The next save tries anew.
            MismatchError, UnsupportedError, StorageError, PeerLostError: as for
                :func:`torchrelay.checkpoint.async_save`.
        """
        place = f"{self.path}/step-{step}"
        with _telemetry.event("checkpoint", "tiered_save", place) as running:
            ranks = group_of(self._group, self._no_dist, for_save=True)
            self._wait_until_whole(ranks)
            if not self._is_known:
                self._find(ranks)
            steps = sorted({*ranks.together(lambda: self._checked(step))})
            if len(steps) > 1:
                raise MismatchError(f"the ranks save different steps: {steps}")
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
            self._client.ask("begin", *staged, self._whole)
            used = next((save_id for save_id in self._buffers if save_id != self._whole), None)
            staging = Staging() if used is None else self._buffers.pop(used)
            if used is None:
                staging.reserve(layout.size_bytes, locked=False)
                os.pwrite(staging.fd, layout.header, 0)
            self._buffers[ids[0]] = staging
            blocks = [mine.blocks[chunk.block] for chunk in layout.plan.chunks]
            staging.copy(blocks, layout.plan.starts, layout.plan.sizes)
            new = None if layout is old else layout
            self._client.ask("stage", *staged, self._whole, new, objects, fds=[staging.fd])
            return is_new

        if any(ranks.together(stage)):
            layout = self._layout
            assert layout is not None
            ranks.conclude(  # that the parts of all make a manifest
                lambda: layout.written(ranks.global_rank),
                lambda parts: assemble(descriptions, parts, Head(0, "", ""))[1],
            )
        return staged[0]

    def wait(self) -> None:
        """Wait until the last checkpoint is whole: in memory, at partners and, if it is written
        there, on the disk.

        Raises:
            TorchRelayError: why it never will be; on every rank.
        """
        ranks = group_of(self._group, self._no_dist)
        self._wait_until_whole(ranks)
        writing, self._writing = self._writing, None
        ranks.together(lambda: writing and writing.result())

    def _wait_until_whole(self, ranks: Group) -> None:
        """Wait until the last checkpoint is whole in memory on all ranks.

        Raises:
            TorchRelayError: it is not, and never will be.
        """
        self._join(ranks)
        timeout_s = config.load(config.Checkpoint).commit_timeout_s

        def waited() -> dict[str, Any] | None:
            try:
                if self._staged is not None and self._client is not None:
                    self._client.ask("wait", self._staged.key, timeout_s, waits_s=timeout_s)
            except TorchRelayError as error:
                return described(error, ranks.global_rank)
            return None

        failure = next((each for each in ranks.together(waited) if each is not None), None)
        staged, self._staged = self._staged, None
        if failure is not None:
            self._leave()  # one may have to be started again
            saver.ended[True] += 1
            error = from_json(failure)
            _logger.error("a checkpoint in memory has failed: %s", error)
            raise error
        if staged is not None:
            self._whole = staged.save_id

    def _join(self, ranks: Group) -> None:
        """Connect all ranks to the memory servers of their hosts, and these to each other."""
        if self._client is not None or not self._memory:
            return
        job = job_of(self.path)
        clients: list[MemoryClient] = []

        def started() -> tuple[str, str, bytes]:
            clients.append(MemoryClient.started(job))
            return clients[0].server, secrets.token_hex(8), secrets.token_bytes(16)

        try:
            answers = ranks.together(started)
            _, attempt, token = answers[0]
            servers = [*dict.fromkeys(server for server, *_ in answers)]
            interface = address_for_peers(
                lambda _, value: ranks.together(lambda: value),
                f"rank {ranks.global_rank}",
                os.environ.get("MASTER_ADDR"),
                config.load(config.TransportSettings).interface,
            )
            joined = ranks.together(lambda: clients[0].ask("join", attempt, token, interface))
            addresses = dict(zip((server for server, *_ in answers), joined, strict=True))
            mine = servers.index(answers[ranks.rank][0])
            others = [addresses[each] for each in servers[mine + 1 :] + servers[:mine]]
            partner = others[0] if self._partner and others else None
            ranks.together(lambda: clients[0].ask("meet", others, partner))
        except BaseException:
            for client in clients:
                client.close()
            raise
        if self._partner and len(servers) == 1 and ranks.is_coordinator:
            _logger.warning(
                "%s: partner=True, but all ranks share one host: its memory is copied nowhere, and "
                "lost with the host",
                self.path,
            )
        (self._client,) = clients

    def _leave(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = self._layout = None  # it is sent, and checked, again

    def _release(self) -> None:
        for staging in self._buffers.values():
            staging.close()
        self._buffers.clear()

    def _candidates(self) -> list[_Candidate]:
        """Return what can be loaded, the newest first, memory before the disk; report what is
        lost. Coordinator only.
        """
        found: list[_Candidate] = []
        lost: list[InMemory] = []
        if self._memory:
            url = SCHEME + job_of(self.path)
            with closing(MemoryFolder(url)) as folder:
                for one in folder.checkpoints:
                    step, save_id = one.info.step, one.info.save_id
                    if one.missing:
                        lost.append(one)
                    else:
                        found.append(_Candidate(step, f"{url}/step-{step}", save_id))
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

    def _find(self, ranks: Group) -> list[_Candidate]:
        """Find what there is; remember what the next save must not lose."""
        found = ranks.coordinate(self._candidates)
        self._is_known, self._newest = True, found[0].step if found else None
        self._whole = next((each.save_id for each in found if each.save_id), "")
        return found

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
        with suppress(TorchRelayError):  # logged; older ones are there
            self._wait_until_whole(ranks)
        self._leave()  # the server may have ended since
        self._join(ranks)
        found, failure = self._find(ranks), None
        common: Any = {"group": self._group, "no_dist": self._no_dist}
        for index, each in enumerate(found):
            try:
                load(state, each.path, **{"overwrite": bool(each.save_id), **common, **options})
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
        finally:
            if self._client is not None and drop:
                with suppress(PeerLostError):
                    self._client.ask("drop")
            self._leave()
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()
