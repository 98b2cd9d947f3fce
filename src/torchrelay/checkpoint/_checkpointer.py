"""Checkpoints of one path in several tiers: in the memory of each host, in that of a partner, and
on the disk.

The ranks decide together, at the next save, that the last checkpoint is whole in memory: each waits
until its own part is, with its copy. So the memory of the one before is used again only when nobody
needs it any more, and no server has to agree with another.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import Self

from torchrelay import _telemetry, config
from torchrelay._addresses import address_for_peers
from torchrelay._names import names_options
from torchrelay._platform import need_core
from torchrelay.checkpoint._background import SaveHandle, Staging, saver
from torchrelay.checkpoint._catalog import Keep, latest
from torchrelay.checkpoint._engine import Save, SaveOptions, described
from torchrelay.checkpoint._group import Group, group_of
from torchrelay.checkpoint._inventory import Inventory
from torchrelay.checkpoint._load import load
from torchrelay.checkpoint._manifest import Head
from torchrelay.checkpoint._memory import Memory, memory_url
from torchrelay.checkpoint._memory_part import FileLayout, PartInfo
from torchrelay.checkpoint._memory_socket import MemoryClient, job_of
from torchrelay.checkpoint._plan import Plan
from torchrelay.checkpoint._storage import Path, split, storage_errors, text_of
from torchrelay.checkpoint._types import check_count
from torchrelay.checkpoint._writer_process import WriteJob
from torchrelay.checkpoint._written import assemble
from torchrelay.errors import (
    ArgumentError,
    CorruptionError,
    MismatchError,
    StorageError,
    TorchRelayError,
    from_json,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer"]

_logger = logging.getLogger("torchrelay.checkpoint")
_SERIES = "step-*"


class _Candidate(NamedTuple):
    """A checkpoint that may be loaded; ``save_id`` is empty for one that is not in memory."""

    step: int
    path: str
    save_id: str


class _Buffer:
    """Memory that a checkpoint is staged in."""

    def __init__(self) -> None:
        self.staging = Staging()
        self.save_id = ""  # of the checkpoint that is in it
        self.writing: SaveHandle | None = None  # what writes it to the disk

    def is_free(self, kept: str) -> bool:
        return self.save_id != kept and (self.writing is None or self.writing.done())


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
        split(f"{self.path}/step-0")
        self._memory, self._partner, self._disk_every = memory, partner, disk_every
        self._options = SaveOptions(keep=keep)
        self._group, self._no_dist = group, no_dist
        self._client: MemoryClient | None = None
        self._staged: PartInfo | None = None  # what is not known to be whole yet
        self._whole = ""  # the newest checkpoint that all ranks know to be whole
        self._newest: int | None = None  # the last step that was saved or loaded
        self._is_new = True  # nothing was saved or loaded yet
        self._layout: FileLayout | None = None
        self._plan: Plan | None = None  # of the layout
        self._sent: FileLayout | None = None  # what the memory server has
        self._buffers: list[_Buffer] = []
        self._writing: SaveHandle | None = None

    @names_options()
    def save(self, state: Any, *, step: int) -> None:
        """Save ``state`` as the checkpoint of ``step``. Returns once it is copied; it may change
        then.

        Before, waits until the last one is whole in memory, with its copies at partners.

        Args:
            state: as for :func:`torchrelay.checkpoint.save`.
            step: more than that of the last checkpoint.

        Raises:
            ArgumentError: a value that a checkpoint cannot hold, or a ``step`` that is not more
                than the last one's.
            CapacityError: the memory for checkpoints of a host is used up.
            TorchRelayError: the last save has failed, and nobody has raised that yet; nothing is
                saved. The next save tries anew.
            MismatchError, UnsupportedError, StorageError, PeerLostError: as for
                :func:`torchrelay.checkpoint.async_save`.
        """
        place = f"{self.path}/step-{step}"
        with _telemetry.event("checkpoint", "tiered_save", place) as running, ExitStack() as held:
            ranks = self._ranks(for_save=True)
            self._settle(ranks)
            if self._is_new:
                self._begin_after(ranks, step)
            if self._newest is not None and step <= self._newest:
                raise ArgumentError(
                    f"step={step}: the last checkpoint that was saved or loaded is of step "
                    f"{self._newest}; steps ascend, because load() takes the highest"
                )
            to_disk = self._disk_every is not None and step % self._disk_every == 0
            one = Save(place, self._options) if to_disk else None

            def before() -> None:
                if one is None:
                    saver.raise_failure()
                else:
                    held.enter_context(saver.turn(one.path, waits=ranks.size == 1))

            def begin() -> tuple[str, int, str]:
                disk_id = "" if one is None else one.transaction.begin()
                return secrets.token_hex(8), time.time_ns(), disk_id

            with one.discarding(ranks) if one is not None else ExitStack():
                ids, mine, everyone = saver.planner.begin(state, begin, ranks, before)
                plan = saver.planner.plan(mine, everyone, ranks)
                objects = [each.objects for each in everyone] if ranks.is_coordinator else []
                running.size_bytes = int(plan.sizes.sum())
                buffer, info = self._stage(ranks, mine, plan, objects, (step, *ids), one)
                fds = () if one is None or not ranks.is_coordinator else one.transaction.hand_over()
            if one is not None:
                self._write(ranks, one, objects, ids[2], fds, buffer)
            self._staged, self._newest = info, step

    def _stage(
        self,
        ranks: Group,
        mine: Inventory,
        plan: Plan,
        objects: Sequence[Mapping[str, Any]],
        ids: tuple[int, str, int, str],
        one: Save | None,
    ) -> tuple[_Buffer, PartInfo]:
        """Copy this rank's part, and pass it to the memory server."""
        step, save_id, saved_at_ns, disk_id = ids
        staged: list[tuple[_Buffer, PartInfo]] = []

        def stage() -> tuple[int, bool]:
            is_new = self._lay_out(plan)
            assert self._layout is not None
            layout, buffer = self._layout, self._free_buffer()
            place = ranks.size, ranks.rank, ranks.global_rank
            info = PartInfo(save_id, step, saved_at_ns, *place, layout.size_bytes)
            if self._client is not None:
                self._client.ask("begin", info, self._whole)
            if one is not None:
                one.check_shared(disk_id)
                saver.start()
            staging, buffer.save_id = buffer.staging, save_id
            if staging.segment is None:
                staging.reserve(layout.size_bytes, locked=False)
                os.pwrite(staging.fd, layout.header, 0)
            blocks = [mine.blocks[chunk.block] for chunk in layout.plan.chunks]
            staging.copy(blocks, layout.plan.starts, layout.plan.sizes)
            if self._client is not None:
                new = None if layout is self._sent else layout
                self._client.ask("stage", info, self._whole, new, objects, fds=[staging.fd])
                self._sent = layout
            staged.append((buffer, info))
            return step, is_new

        found = ranks.together(stage)
        steps = {each for each, _ in found}
        if len(steps) > 1:
            raise MismatchError(f"the ranks save different steps: {sorted(steps)}")
        if any(is_new for _, is_new in found):
            self._check_whole(ranks, objects)
        return staged[0]

    def _lay_out(self, plan: Plan) -> bool:
        """Lay out this rank's file for a plan; return whether it differs from the last one."""
        if plan is self._plan:
            return False
        layout, old = FileLayout.of(plan), self._layout
        self._layout, self._plan = layout, plan
        if old is not None and old.header == layout.header:
            return False
        self._buffers = []  # what they hold stays with the server
        return True

    def _free_buffer(self) -> _Buffer:
        for buffer in self._buffers:
            if buffer.is_free(self._whole):
                return buffer
        self._buffers.append(_Buffer())
        return self._buffers[-1]

    def _check_whole(self, ranks: Group, objects: Sequence[Mapping[str, Any]]) -> None:
        """Check that the parts of all ranks make a manifest, so that they can be loaded.

        Raises:
            ArgumentError, MismatchError: they do not.
        """
        layout = self._layout
        assert layout is not None
        everyone = layout.descriptions(objects)
        ranks.conclude(
            lambda: layout.written(ranks.global_rank),
            lambda parts: assemble(everyone, parts, Head(0, "", ""))[1],
        )

    def _write(
        self,
        ranks: Group,
        one: Save,
        objects: Sequence[Mapping[str, Any]],
        save_id: str,
        fds: Sequence[int],
        buffer: _Buffer,
    ) -> None:
        """Let the writer process write what is staged to the disk."""
        assert self._layout is not None
        timeout_s = config.load(config.Checkpoint).commit_timeout_s
        places = (ranks.ranks, ranks.rank)
        job = WriteJob(one.path, self._options, save_id, *places, objects, timeout_s)
        try:
            with storage_errors(f"starting to save {one.path}"):
                plan = self._layout.plan
                buffer.writing = saver.submit(one, job, plan, fds, buffer.staging)
                self._writing = buffer.writing
        finally:
            for fd in fds:
                os.close(fd)

    def wait(self) -> None:
        """Wait until the last checkpoint is whole: in memory, at partners and, if it is written
        there, on the disk.

        Raises:
            TorchRelayError: why it never will be; on every rank.
        """
        ranks = self._ranks()
        self._settle(ranks)
        writing, self._writing = self._writing, None
        ranks.together(lambda: writing and writing.result())

    def _settle(self, ranks: Group) -> None:
        """Wait until the last checkpoint is whole in memory on all ranks.

        Raises:
            TorchRelayError: it is not, and never will be.
        """
        if not self._memory:
            return
        self._join(ranks)
        timeout_s = config.load(config.Checkpoint).commit_timeout_s

        def settled() -> tuple[str, dict[str, Any] | None]:
            if self._staged is None:
                return "", None
            try:
                assert self._client is not None
                self._client.ask("wait", self._staged.key, timeout_s)
            except TorchRelayError as error:
                return self._staged.save_id, described(error, ranks.global_rank)
            return self._staged.save_id, None

        found = ranks.together(settled)
        self._staged = None
        failure = next((each for _, each in found if each is not None), None)
        if failure is not None:
            self._leave()  # one may have to be started again
            saver.ended[True] += 1
            error = from_json(failure)
            _logger.error("a checkpoint in memory has failed: %s", error)
            raise error
        if len({save_id for save_id, _ in found}) == 1 and found[0][0]:
            self._whole = found[0][0]

    def _join(self, ranks: Group) -> None:
        """Connect all ranks to the memory servers of their hosts, and these to each other."""
        if self._client is not None:
            return
        job = job_of(self.path)
        clients: list[MemoryClient] = []

        def started() -> tuple[str, str, bytes]:
            clients.append(MemoryClient.started(job))
            server = str(clients[0].ask("status")["id"])
            return server, secrets.token_hex(8), secrets.token_bytes(16)

        try:
            everyone = ranks.together(started)
            _, attempt, token = everyone[0]
            servers = [*dict.fromkeys(server for server, *_ in everyone)]
            interface = address_for_peers(
                lambda _, value: ranks.together(lambda: value),
                f"rank {ranks.global_rank}",
                os.environ.get("MASTER_ADDR"),
                config.load(config.TransportSettings).interface,
            )
            joined = ranks.together(lambda: clients[0].ask("join", attempt, token, interface))
            addresses = dict(zip((server for server, *_ in everyone), joined, strict=True))
            mine = servers.index(everyone[ranks.rank][0])
            others = [addresses[each] for each in servers[mine + 1 :] + servers[:mine]]
            ranks.together(
                lambda: clients[0].ask(
                    "meet", others, (*others, None)[0] if self._partner else None
                )
            )
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
            self._client, self._sent = None, None

    def _ranks(self, *, for_save: bool = False) -> Group:
        return group_of(self._group, self._no_dist, for_save=for_save)

    @contextmanager
    def _seen(self) -> Iterator[Memory]:
        assert self._client is not None
        memory = Memory(self._client.job)
        try:
            yield memory
        finally:
            memory.close()

    def _candidates(self) -> list[_Candidate]:
        """Return what can be loaded, the newest first, memory before the disk; report what is
        lost. Coordinator only.
        """
        found: list[_Candidate] = []
        lost: dict[int, list[int]] = {}
        if self._memory:
            with self._seen() as memory:
                for one in memory.checkpoints():
                    if one.missing:
                        lost[one.info.step] = one.missing
                        continue
                    url = memory_url(memory.client.job, one.info.step)
                    found.append(_Candidate(one.info.step, url, one.info.save_id))
        on_disk = latest(self.path, None, pattern=_SERIES)
        if on_disk is not None:
            step = int(split(on_disk)[1].removeprefix(_SERIES[:-1]))
            found.append(_Candidate(step, on_disk, ""))
        found.sort(key=lambda each: -each.step)
        for step, missing in lost.items():
            if not found or step > found[0].step:
                _logger.warning(
                    "%s: step %d is not whole in memory: the parts of %d ranks, such as %d, are "
                    "lost, or were not saved in time; %s",
                    self.path,
                    step,
                    len(missing),
                    missing[0],
                    f"step {found[0].step} is the newest" if found else "there is no other",
                )
        return found

    def _begin_after(self, ranks: Group, step: int) -> None:
        """Find what an earlier job has left, which the first save must not lose.

        Raises:
            ArgumentError: ``load()`` would take that instead of ``step``.
        """
        found = ranks.coordinate(self._candidates)
        if found and found[0].step >= step:
            raise ArgumentError(
                f"step={step}: {found[0].path} is there already, and load() would take it instead; "
                "load() it first, or save to another path"
            )
        self._is_new = False
        self._whole = next((each.save_id for each in found if each.save_id), "")

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
        ranks = self._ranks()
        with suppress(TorchRelayError):  # logged; older ones are there
            self._settle(ranks)
        if self._memory:
            self._join(ranks)
        found = ranks.coordinate(self._candidates)
        failure: Exception | None = None
        for index, each in enumerate(found):
            try:
                load(
                    state,
                    each.path,
                    group=self._group,
                    no_dist=self._no_dist,
                    **{"overwrite": bool(each.save_id), **options},
                )
            except (CorruptionError, StorageError) as error:
                failure = failure or error
                _logger.warning("step %d cannot be loaded: %s", each.step, error)
                continue
            self._newest, self._is_new = each.step, False
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
            drop: whether to release what is in memory. Otherwise it stays there until
                ``memory_ttl_s`` ([settings](settings.md)) after the last trainer has left.

        Raises:
            TorchRelayError: as for :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            if self._client is not None:
                with suppress(TorchRelayError):
                    if drop:
                        self._client.ask("drop")
            self._leave()
            self._buffers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()
