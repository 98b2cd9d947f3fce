"""The data plane of ranks on several hosts: shared memory within each, TCP and a switch between
them.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchrelay import _native, _torch, config
from torchrelay._addresses import address_for_peers, is_loopback, listen_at
from torchrelay.aggregation._agreement import (
    ANY_SIZE,
    Record,
    check_matrix,
    check_records,
    inline_bytes,
    is_uniform,
    payloads,
)
from torchrelay.aggregation._dtypes import NATIVE, code
from torchrelay.aggregation._exchange import Call, Lost, error_of, failure_of
from torchrelay.aggregation._executor import Completion, Executor
from torchrelay.aggregation._hierarchy import Hierarchy
from torchrelay.aggregation._inter_host import INSTRUCTION_SET, InterHostTransport, TcpTransport
from torchrelay.aggregation._placement import Placement
from torchrelay.aggregation._plane import LinkStats, Op, PlaneStats
from torchrelay.aggregation._shm import ShmPlane
from torchrelay.aggregation._switch_transport import (
    SwitchTransport,
    check_agreement,
    is_used,
    join,
    terms,
)
from torchrelay.config import Aggregation
from torchrelay.errors import (
    OperationTimeoutError,
    PeerLostError,
    TorchRelayError,
    UnsupportedError,
)
from torchrelay.world import Meeting

if TYPE_CHECKING:
    from torch.distributed import Store

    from torchrelay._native import Transfer

__all__ = ["HostsPlane"]

_logger = logging.getLogger("torchrelay.aggregation")
_MAX_LOCAL_TAG = (1 << 31) - 1
_TOKEN_BYTES = 16
_LINE_BYTES = 64  # two ranks do not write to one cache line


class HostsPlane:
    """One rank's part in a group whose ranks run on several hosts; see :class:`_plane.Plane`.

    Making one is collective over the ranks of ``meeting``.

    Args:
        store: what the ranks met over; its server's address determines which of this host's
            addresses others can reach.

    Raises:
        OperationTimeoutError: a rank did not join within ``timeout_s``, or cannot be reached.
        PeerLostError: a rank died meanwhile.
        UnavailableError: a rank cannot be reached from other hosts, or the switch does not answer;
            on every rank.
        UnsupportedError: there is a key file, but bytes between hosts are not encrypted.
        ConfigError: the ranks have different settings for the switch; on every rank.
    """

    name = "hosts"

    def __init__(
        self, meeting: Meeting, store: Store, timeout_s: float, settings: Aggregation
    ) -> None:
        self._rank, self._names = meeting.rank, meeting.names
        self._at = Placement.of(meeting.rank, [process.host for process in meeting.processes])
        self._inline_bytes = inline_bytes(meeting.size, is_used(settings))
        listener = listen_at(self._address(meeting, store, timeout_s))
        self._shm = ShmPlane(meeting.among(self._at.local), timeout_s, settings)
        self._executor = Executor("sml-hosts")
        self._jobs = self._payload_bytes = 0
        self._local_tags = [0] * meeting.size
        self._closing = threading.Lock()
        self._closed = False
        self._switch: SwitchTransport | None = None
        host, port = listener.getsockname()[:2]
        about = {
            "address": [host, port],
            "token": secrets.token_hex(_TOKEN_BYTES),
            "session_id": secrets.randbits(64),
            "chunk_bytes": settings.chunk_bytes,
            "share_bytes": min(settings.chunk_bytes, settings.slot_bytes // len(self._at.local)),
            "terms": terms(settings),
        }
        abouts = meeting.gather("hosts", about, timeout_s)
        self._messages = _native.Messenger(
            meeting.rank,
            meeting.names,
            [(each["address"][0], each["address"][1]) for each in abouts],
            self._at.hosts,
            listener.detach(),
            bytes.fromhex(abouts[0]["token"]),
            self._shm.native,
            self._report,
        )
        try:
            check_agreement([each["terms"] for each in abouts], self._rank, self._names)
            self._switch = self._join_switch(meeting, settings, abouts[0]["session_id"], timeout_s)
            share_bytes = min(each["share_bytes"] for each in abouts) // _LINE_BYTES * _LINE_BYTES
            self._on = self._hierarchy(abouts[0]["chunk_bytes"], max(share_bytes, _LINE_BYTES))
            self.barrier(timeout_s, True)
        except BaseException:
            self.close()
            raise
        self._log()

    def _address(self, meeting: Meeting, store: Store, timeout_s: float) -> str:
        settings = config.load(config.TransportSettings)
        me = f"sml, rank {self._names[self._rank]}"
        address = address_for_peers(
            lambda step, mine: meeting.gather(step, mine, timeout_s),
            me,
            _torch.store_host(store),
            settings.interface,
        )
        if settings.key_file and not is_loopback(address):
            raise UnsupportedError(
                f"{me}: TORCHRELAY_TRANSPORT_KEY_FILE is set, but sml does not encrypt what it "
                "sends to other hosts; unset it, or use another backend"
            )
        return address

    def _join_switch(
        self, meeting: Meeting, settings: Aggregation, session_id: int, timeout_s: float
    ) -> SwitchTransport | None:
        if not is_used(settings):
            return None
        client = join(meeting, self._at, settings, session_id, timeout_s)
        return SwitchTransport(
            self._at, self._names, settings, client, self._messages, self._shm.check
        )

    def _hierarchy(self, piece_bytes: int, share_bytes: int) -> Hierarchy:
        reason = (
            "no switch is configured" if self._switch is None else "what the switch does not sum"
        )
        tcp = TcpTransport(self._at, self._messages, piece_bytes, reason)
        self._transports: list[InterHostTransport] = (
            [tcp] if self._switch is None else [self._switch, tcp]
        )
        return Hierarchy(
            self._at, self._shm, self._messages, self._transports, piece_bytes, share_bytes
        )

    # --- collectives

    def all_reduce(
        self, tensor: torch.Tensor, op: Op, timeout_s: float, block: bool
    ) -> Completion | None:
        return self._run(
            Record("all_reduce", tensor.dtype, op, count=tensor.numel()),
            tensor.nbytes,
            timeout_s,
            block,
            lambda call: self._on.all_reduce(call, tensor, op),
            _Inline(tensor, tensor.nbytes, lambda rows: _reduce_rows(rows, tensor, op)),
        )

    def reduce(
        self, tensor: torch.Tensor, op: Op, root: int, timeout_s: float, block: bool
    ) -> Completion | None:
        def finish(rows: torch.Tensor) -> None:
            if self._rank == root:
                _reduce_rows(rows, tensor, op)

        return self._run(
            Record("reduce", tensor.dtype, op, root, tensor.numel()),
            tensor.nbytes,
            timeout_s,
            block,
            lambda call: self._on.reduce(call, tensor, op, root),
            _Inline(tensor, tensor.nbytes, finish),
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Op,
        timeout_s: float,
        block: bool,
    ) -> Completion | None:
        return self._run(
            Record("reduce_scatter", output.dtype, op, count=output.numel()),
            output.nbytes * len(inputs),
            timeout_s,
            block,
            lambda call: self._on.reduce_scatter(call, output, inputs, op),
        )

    def broadcast(
        self, tensor: torch.Tensor, root: int, timeout_s: float, block: bool
    ) -> Completion | None:
        def finish(rows: torch.Tensor) -> None:
            if self._rank != root:
                _copy_row(rows, root, tensor)

        return self._run(
            Record("broadcast", tensor.dtype, root=root, count=tensor.numel()),
            tensor.nbytes,
            timeout_s,
            block,
            lambda call: self._on.broadcast(call, tensor, root),
            _Inline(tensor, tensor.nbytes, finish),
        )

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float, block: bool
    ) -> Completion | None:
        sizes = [output.nbytes for output in outputs]

        def finish(rows: torch.Tensor) -> None:
            for rank, output in enumerate(outputs):
                _copy_row(rows, rank, output)

        return self._run(
            Record("all_gather", tensor.dtype, mine=tensor.nbytes, sizes=sizes),
            tensor.nbytes,
            timeout_s,
            block,
            lambda call: self._on.all_gather(call, outputs, tensor),
            _Inline(tensor, max(sizes), finish),
        )

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout_s: float,
        block: bool,
    ) -> Completion | None:
        sizes = [output.nbytes for output in outputs]
        return self._run(
            Record("gather", tensor.dtype, root=root, mine=tensor.nbytes, sizes=sizes),
            tensor.nbytes,
            timeout_s,
            block,
            lambda call: self._on.gather(call, outputs, tensor, root),
        )

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout_s: float,
        block: bool,
    ) -> Completion | None:
        sizes = [each.nbytes for each in inputs]
        return self._run(
            Record("scatter", output.dtype, root=root, mine=output.nbytes, sizes=sizes),
            output.nbytes,
            timeout_s,
            block,
            lambda call: self._on.scatter(call, output, inputs, root),
        )

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout_s: float,
        block: bool,
    ) -> Completion | None:
        sizes = [tensor.nbytes for tensor in (*inputs, *outputs)]
        is_uniform_here = len(set(sizes)) == 1

        def move(call: Call, table: torch.Tensor) -> None:
            if not is_uniform(table):
                self._agree_on_pairs(call, sizes)
            self._on.all_to_all(call, outputs, inputs)

        record = Record(
            "all_to_all", inputs[0].dtype, mine=sizes[0] if is_uniform_here else ANY_SIZE
        )
        return self._submit(record, None, sum(sizes[: len(inputs)]), timeout_s, block, move)

    def barrier(self, timeout_s: float, block: bool) -> Completion | None:
        return self._submit(Record("barrier"), None, 0, timeout_s, block, lambda call, table: None)

    # --- messages

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout_s: float) -> Transfer:
        self._begin(tensor.nbytes)
        size_bytes, dtype = tensor.nbytes, code(tensor.dtype)
        if to not in self._at.local:
            return self._messages.send(tensor.data_ptr(), size_bytes, to, tag, dtype, timeout_s)
        local_tag = self._local_tags[to] = (self._local_tags[to] + 1) % _MAX_LOCAL_TAG
        sent = self._shm.send(tensor, self._at.local_index(to), local_tag, timeout_s)
        self._messages.announce(size_bytes, to, tag, dtype, local_tag)
        return sent

    def receive(self, tensor: torch.Tensor, source: int, tag: int, timeout_s: float) -> Transfer:
        self._begin(0)
        return self._messages.receive(
            tensor.data_ptr(), tensor.nbytes, source, tag, code(tensor.dtype), timeout_s
        )

    def wait_transfer(self, transfer: Transfer, timeout_s: float) -> bool:
        return self._messages.wait(transfer, timeout_s)

    def _begin(self, size_bytes: int) -> None:
        self._executor.require_usable()
        self._require_whole()
        self._jobs += 1
        self._payload_bytes += size_bytes

    def _require_whole(self) -> None:
        """Raise the error of a group that is broken."""
        failure = self._messages.failure
        if failure is not None:
            cause = error_of(failure)
            raise type(cause)(
                f"rank {self._names[self._rank]}: this group failed before and cannot be used any "
                f"more. The cause was: {cause}",
                ranks=cause.ranks,
            )

    # --- what a group says about itself, and its end

    def stats(self) -> PlaneStats:
        shm = self._shm.stats()
        between = [transport.stats() for transport in self._transports]
        shared_bytes = shm.payload_bytes + self._on.shared_bytes
        here = LinkStats("shm", "ranks that share a host", shared_bytes, self._on.shm_s)
        waiting_s = shm.waiting_s + sum(link.busy_s for link in between)
        return PlaneStats(self.name, self._jobs, self._payload_bytes, waiting_s, (here, *between))

    def close(self) -> None:
        with self._closing:
            if self._closed or self._executor.is_forked:
                return
            self._closed = True
        if self._executor.busy:
            me = self._names[self._rank]
            reason = f"rank {me} has left the group (destroy_process_group, or its process ended)"
            self._break(PeerLostError(reason, ranks=(me,)))
        self._executor.stop()
        if self._switch is not None:
            self._switch.close()
        self._messages.close()
        self._shm.close()

    # --- common to all

    def _run(
        self,
        record: Record,
        size_bytes: int,
        timeout_s: float,
        block: bool,
        move: Callable[[Call], None],
        inline: _Inline | None = None,
    ) -> Completion | None:
        """Run a collective: ``move``, or ``inline.finish`` where all payloads fit the records."""
        fits = (
            inline is not None
            and max(inline.largest_bytes, inline.tensor.nbytes) <= self._inline_bytes
        )

        def body(call: Call, table: torch.Tensor) -> None:
            if inline is not None and fits:
                inline.finish(payloads(table))
            else:
                move(call)

        payload = inline.tensor if inline is not None and fits else None
        return self._submit(record, payload, size_bytes, timeout_s, block, body)

    def _submit(
        self,
        record: Record,
        payload: torch.Tensor | None,
        size_bytes: int,
        timeout_s: float,
        block: bool,
        body: Callable[[Call, torch.Tensor], None],
    ) -> Completion | None:
        """Let all ranks agree on the call, then run ``body`` with the table of their records."""
        self._jobs += 1
        self._payload_bytes += size_bytes
        name = record.function

        def job() -> None:
            self._require_whole()
            call = Call(name, time.monotonic() + timeout_s)
            try:
                body(call, self._agree(call, record, payload))
            except (PeerLostError, OperationTimeoutError) as error:
                raise self._explain(name, error) from None
            except TorchRelayError:
                raise
            except BaseException:
                me = self._names[self._rank]
                self._break(PeerLostError(f"rank {me} was interrupted in {name}", ranks=(me,)))
                raise

        if not block:
            return self._executor.submit(job)
        self._executor.run(job)
        return None

    def _agree(self, call: Call, record: Record, payload: torch.Tensor | None) -> torch.Tensor:
        """Raise MismatchError on every rank unless all made the same call; the table of all
        records.
        """
        flat = None if payload is None else _torch.flat_bytes(payload)
        table = self._on.share(call, record.pack(self._inline_bytes, flat))
        check_records(table, self._rank, self._names)
        return table

    def _agree_on_pairs(self, call: Call, sizes: Sequence[int]) -> None:
        mine = torch.tensor(sizes).view(torch.uint8)
        table = self._on.share(call, mine).view(torch.int64)
        size = self._at.size
        check_matrix(table[:, :size], table[:, size:], self._rank, self._names)

    # --- failures

    def _explain(self, name: str, error: Lost) -> Lost:
        """Break the group on all ranks; return the error that this rank raises for ``error``."""
        first = self._break(error)
        here = f"rank {self._names[self._rank]}, {name}"
        if str(first).startswith(here):
            return first
        return type(first)(f"{here}: {first}", ranks=first.ranks)

    def _break(self, error: Lost) -> Lost:
        return error_of(self._messages.fail(failure_of(error)))

    def _report(self, failure: _native.Failure) -> None:
        """Wake waiting ranks: those of this host in shared memory, this one at the switch."""
        self._shm.report(failure.message, failure.ranks, failure.timed_out)
        if self._switch is not None:
            self._switch.close()

    def _log(self) -> None:
        switch = "" if self._switch is None else self._switch.reason
        if self._rank == 0:
            _logger.info(
                "sml: %s ranks on %d hosts: shared memory within each; between them %s",
                " + ".join(str(len(ranks)) for ranks in self._at.hosts),
                len(self._at.hosts),
                f"{switch}, TCP for the rest" if switch else "TCP (no switch is configured)",
            )


@dataclass
class _Inline:
    """A payload that may be sent in the records."""

    tensor: torch.Tensor  # this rank's
    largest_bytes: int  # of any rank's payload
    finish: Callable[[torch.Tensor], None]  # called with all ranks' payloads, a row each


def _reduce_rows(rows: torch.Tensor, into: torch.Tensor, op: Op) -> None:
    """Reduce all ranks' payloads in the order of the ranks."""
    if into.numel():
        addresses = [row.data_ptr() for row in rows]
        _native.reduce(
            addresses, into.data_ptr(), into.numel(), NATIVE[into.dtype], op, INSTRUCTION_SET
        )


def _copy_row(rows: torch.Tensor, rank: int, into: torch.Tensor) -> None:
    _torch.flat_bytes(into).copy_(rows[rank, : into.nbytes])
