"""The data plane of ranks on several hosts: shared memory within each host, TCP between them."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from torchrelay import _native, telemetry
from torchrelay.aggregation._agreement import (
    ANY_SIZE,
    INLINE_BYTES,
    Record,
    check_matrix,
    check_records,
    is_uniform,
    payloads,
)
from torchrelay.aggregation._dtypes import NATIVE, code
from torchrelay.aggregation._executor import Completion, Executor
from torchrelay.aggregation._hierarchy import INSTRUCTION_SET, Call, Hierarchy, bytes_of
from torchrelay.aggregation._listener import listen
from torchrelay.aggregation._messages import ANY_RANK, TOKEN_BYTES, Failure, Header, Messages, Receive
from torchrelay.aggregation._placement import Placement
from torchrelay.aggregation._plane import LinkStats, Op, PlaneStats
from torchrelay.aggregation._shm import ShmPlane
from torchrelay.config import Aggregation
from torchrelay.errors import OperationTimeoutError, PeerLostError, TorchRelayError
from torchrelay.world import Meeting

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from torchrelay._native import Transfer

__all__ = ["HostsPlane"]

_logger = logging.getLogger(__name__)
_MAX_LOCAL_TAG = 1 << 31
_LONG_S = 1e9


class HostsPlane:
    """One rank's part in a group whose ranks run on several hosts; see :class:`_plane.Plane`.

    Making one is collective over the ranks of ``meeting``.

    Args:
        store: what the ranks met over; its server's address tells which of this host's addresses others can reach.

    Raises:
        OperationTimeoutError: a rank did not come within ``timeout_s``, or cannot be reached.
        PeerLostError: a rank died meanwhile.
        UnavailableError: there is no such interface.
    """

    name = "hosts"

    def __init__(self, meeting: Meeting, store: Store, timeout_s: float, settings: Aggregation) -> None:
        self._rank, self._names = meeting.rank, meeting.names
        self._at = Placement.of(meeting.rank, [process.host for process in meeting.processes])
        self._shm = ShmPlane(_meeting_here(meeting, self._at, timeout_s), timeout_s, settings)
        self._executor = Executor("sml-hosts")
        self._jobs = self._payload_bytes = 0
        self._local_tags = [0] * meeting.size
        self._closing = threading.Lock()
        self._closed = False
        listener = listen(settings.interface, store)
        host, port = listener.getsockname()[:2]
        about = {
            "address": [host, port],
            "token": secrets.token_hex(TOKEN_BYTES),
            "chunk_bytes": settings.chunk_bytes,
        }
        meeting.announce("hosts", json.dumps(about))
        abouts = [json.loads(text) for text in meeting.wait("hosts", timeout_s)]
        self._messages = Messages(
            meeting.rank,
            meeting.names,
            [(each["address"][0], each["address"][1]) for each in abouts],
            self._at.hosts,
            listener,
            bytes.fromhex(abouts[0]["token"]),
            self._take_local,
            self._report,
        )
        self._on = Hierarchy(self._at, self._shm, self._messages, abouts[0]["chunk_bytes"])
        try:
            self.barrier(timeout_s, True)
        except BaseException:
            self.close()
            raise
        self._log()

    # --- collectives

    def all_reduce(self, tensor: torch.Tensor, op: Op, timeout_s: float, block: bool) -> Completion | None:
        record = Record("all_reduce", tensor.dtype, op, count=tensor.numel())

        def body(call: Call) -> None:
            rows = self._agree(call, record, tensor)
            if rows is not None:
                _reduce_rows(rows, tensor, op)
            else:
                self._on.all_reduce(call, tensor, op)

        return self._run("all_reduce", tensor.nbytes, timeout_s, block, body)

    def reduce(
        self, tensor: torch.Tensor, op: Op, root: int, timeout_s: float, block: bool
    ) -> Completion | None:
        record = Record("reduce", tensor.dtype, op, root, tensor.numel())

        def body(call: Call) -> None:
            rows = self._agree(call, record, tensor)
            if rows is None:
                self._on.reduce(call, tensor, op, root)
            elif self._rank == root:
                _reduce_rows(rows, tensor, op)

        return self._run("reduce", tensor.nbytes, timeout_s, block, body)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op, timeout_s: float, block: bool
    ) -> Completion | None:
        record = Record("reduce_scatter", output.dtype, op, count=output.numel())

        def body(call: Call) -> None:
            self._agree(call, record)
            self._on.reduce_scatter(call, output, inputs, op)

        return self._run("reduce_scatter", output.nbytes * len(inputs), timeout_s, block, body)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float, block: bool) -> Completion | None:
        record = Record("broadcast", tensor.dtype, root=root, count=tensor.numel())

        def body(call: Call) -> None:
            rows = self._agree(call, record, tensor)
            if rows is None:
                self._on.broadcast(call, tensor, root)
            elif self._rank != root:
                _copy_row(rows, root, tensor)

        return self._run("broadcast", tensor.nbytes, timeout_s, block, body)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float, block: bool
    ) -> Completion | None:
        sizes = [output.nbytes for output in outputs]
        record = Record("all_gather", tensor.dtype, mine=tensor.nbytes, sizes=sizes)

        def body(call: Call) -> None:
            rows = self._agree(call, record, tensor, max(sizes))
            if rows is None:
                self._on.all_gather(call, outputs, tensor)
                return
            for rank, output in enumerate(outputs):
                _copy_row(rows, rank, output)

        return self._run("all_gather", tensor.nbytes, timeout_s, block, body)

    def gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int, timeout_s: float, block: bool
    ) -> Completion | None:
        sizes = [output.nbytes for output in outputs]
        record = Record("gather", tensor.dtype, root=root, mine=tensor.nbytes, sizes=sizes)

        def body(call: Call) -> None:
            self._agree(call, record)
            self._on.gather(call, outputs, tensor, root)

        return self._run("gather", tensor.nbytes, timeout_s, block, body)

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, timeout_s: float, block: bool
    ) -> Completion | None:
        sizes = [block.nbytes for block in inputs]
        record = Record("scatter", output.dtype, root=root, mine=output.nbytes, sizes=sizes)

        def body(call: Call) -> None:
            self._agree(call, record)
            self._on.scatter(call, output, inputs, root)

        return self._run("scatter", output.nbytes, timeout_s, block, body)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout_s: float,
        block: bool,
    ) -> Completion | None:
        sizes = [tensor.nbytes for tensor in (*inputs, *outputs)]
        is_uniform_here = len(set(sizes)) == 1
        record = Record("all_to_all", inputs[0].dtype, mine=sizes[0] if is_uniform_here else ANY_SIZE)

        def body(call: Call) -> None:
            if not is_uniform(self._share_record(call, record)):
                self._agree_on_pairs(call, sizes)
            self._on.all_to_all(call, outputs, inputs)

        return self._run("all_to_all", sum(sizes[: len(inputs)]), timeout_s, block, body)

    def barrier(self, timeout_s: float, block: bool) -> Completion | None:
        def body(call: Call) -> None:
            self._share_record(call, Record("barrier"))

        return self._run("barrier", 0, timeout_s, block, body)

    # --- messages

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout_s: float) -> _Transfer:
        self._begin(tensor.nbytes)
        if to not in self._at.local:
            sent = self._messages.send(to, tag, bytes_of(tensor), code(tensor.dtype))
            return _Transfer(sent, self._deadline(timeout_s), to)
        local_tag = self._local_tags[to] = (self._local_tags[to] + 1) % _MAX_LOCAL_TAG
        as_bytes = tensor.detach().reshape(-1).view(torch.uint8)
        native = self._shm.send(as_bytes, self._at.local_index(to), local_tag, timeout_s)
        self._messages.send(to, tag, bytes_of(tensor), code(tensor.dtype), local_tag)
        transfer = _Transfer(Completion(), self._deadline(timeout_s), to)
        _follow(native, transfer.ticket, as_bytes)
        return transfer

    def receive(self, tensor: torch.Tensor, source: int, tag: int, timeout_s: float) -> _Transfer:
        self._begin(0)
        receive = self._messages.receive(source, tag, bytes_of(tensor), code(tensor.dtype))
        return _Transfer(receive.completion, self._deadline(timeout_s), source, receive)

    def wait_transfer(self, transfer: Any, timeout_s: float) -> bool:
        mine = cast(_Transfer, transfer)
        left_s = max(0.0, mine.deadline_s - time.monotonic())
        if mine.ticket.wait(min(timeout_s, left_s)):
            return True
        if timeout_s < left_s:
            return False
        error = OperationTimeoutError(
            f"rank {self._names[self._rank]}, {mine.describe(self._names)}: it did not end within the group's timeout; a "
            "longer one can be given to init_process_group",
            ranks=[] if mine.peer == ANY_RANK else [self._names[mine.peer]],
        )
        self._messages.cancel(mine.ticket, error)
        return mine.ticket.wait(0)

    def _begin(self, size_bytes: int) -> None:
        self._executor.require_usable()
        if self._messages.failure is not None:
            raise self._broken(self._messages.failure)
        self._jobs += 1
        self._payload_bytes += size_bytes

    def _deadline(self, timeout_s: float) -> float:
        return time.monotonic() + timeout_s

    def _take_local(self, receive: Receive, source: int, header: Header) -> None:
        """Receive the bytes of a message through shared memory; also those that its receiver does not expect."""
        _, dtype_code, local_tag, _, size = header
        fits = (size, dtype_code) == (receive.view.nbytes, receive.code)
        into = torch.from_numpy(np.asarray(receive.view)) if fits else torch.empty(size, dtype=torch.uint8)
        completion = receive.completion if fits else Completion()
        try:
            native = self._shm.receive(into, self._at.local_index(source), local_tag, _LONG_S)
            _follow(native, completion, into)
        except TorchRelayError as error:
            completion.finish(error)
        if not fits:
            receive.completion.finish(self._messages.size_error(source, receive, header))

    # --- what a group says about itself, and its end

    def stats(self) -> PlaneStats:
        shm, messages = self._shm.stats(), self._messages
        links = (
            LinkStats("shm", "ranks that share a host", shm.payload_bytes, self._on.shm_s),
            LinkStats("tcp", "no switch is configured", messages.sent_bytes, self._on.network_s),
        )
        waiting_s = shm.waiting_s + self._on.network_s
        return PlaneStats(self.name, self._jobs, self._payload_bytes, waiting_s, links)

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
        self._messages.close()
        self._shm.close()

    # --- common to all

    def _run(
        self, name: str, size_bytes: int, timeout_s: float, block: bool, body: Callable[[Call], None]
    ) -> Completion | None:
        self._jobs += 1
        self._payload_bytes += size_bytes

        def job() -> None:
            if self._messages.failure is not None:
                raise self._broken(self._messages.failure)
            try:
                body(Call(name, time.monotonic() + timeout_s))
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

    def _agree(
        self, call: Call, record: Record, tensor: torch.Tensor | None = None, largest_bytes: int = -1
    ) -> torch.Tensor | None:
        """Raise MismatchError on every rank unless all made the same call.

        Returns all ranks' ``tensor`` as rows of bytes, if they are small.
        """
        if tensor is None or max(largest_bytes, tensor.nbytes) > INLINE_BYTES:
            self._share_record(call, record)
            return None
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        return payloads(self._share_record(call, record, flat))

    def _share_record(self, call: Call, record: Record, payload: torch.Tensor | None = None) -> torch.Tensor:
        table = self._on.share(call, record.pack(payload))
        check_records(table, self._rank, self._names)
        return table

    def _agree_on_pairs(self, call: Call, sizes: Sequence[int]) -> None:
        mine = torch.tensor(sizes).view(torch.uint8)
        table = self._on.share(call, mine).view(torch.int64)
        size = self._at.size
        check_matrix(table[:, :size], table[:, size:], self._rank, self._names)

    # --- failures

    def _explain(self, name: str, error: Failure) -> Failure:
        """What this rank raises for ``error``; breaks the group on all ranks."""
        first = self._break(error)
        here = f"rank {self._names[self._rank]}, {name}"
        if str(first).startswith(here):
            return first
        return type(first)(f"{here}: {first}", ranks=first.ranks)

    def _break(self, error: Failure) -> Failure:
        return self._messages.fail(error, [self._at.leaders[host] for host in self._at.other_hosts])

    def _report(self, error: Failure) -> None:
        """Tell the ranks of this host; those that wait in shared memory wake up."""
        self._shm.report(str(error), error.ranks, isinstance(error, OperationTimeoutError))

    def _broken(self, cause: Failure) -> Failure:
        return type(cause)(
            f"rank {self._names[self._rank]}: this group failed before and cannot be used any more. The cause was: {cause}",
            ranks=cause.ranks,
        )

    def _log(self) -> None:
        telemetry.event("aggregation.hosts", rank=self._rank, hosts=len(self._at.hosts))
        if self._rank == 0:
            counts = " + ".join(str(len(ranks)) for ranks in self._at.hosts)
            _logger.info(
                "sml: %s ranks on %d hosts: shared memory within each, TCP between them (no switch is configured)",
                counts,
                len(self._at.hosts),
            )


class _Transfer:
    """A send or receive in progress."""

    def __init__(
        self, ticket: Completion, deadline_s: float, peer: int, receive: Receive | None = None
    ) -> None:
        self.ticket = ticket
        self.deadline_s = deadline_s
        self.peer = peer
        self.receive = receive

    @property
    def source(self) -> int:
        return self.peer if self.receive is None else self.receive.source

    def describe(self, names: Sequence[int]) -> str:
        name = "any rank" if self.peer == ANY_RANK else f"rank {names[self.peer]}"
        return f"send to {name}" if self.receive is None else f"recv from {name}, tag {self.receive.tag}"


def _follow(native: Transfer, completion: Completion, buffer: torch.Tensor) -> None:
    """End ``completion`` as the native transfer ends; keeps it and its buffer until then."""

    def finish() -> None:
        del held[:]
        try:
            native.ticket.wait(0)
        except TorchRelayError as error:
            completion.finish(error)
        else:
            completion.finish()

    held = [buffer]
    native.ticket.when_done(finish)


def _reduce_rows(rows: torch.Tensor, into: torch.Tensor, op: Op) -> None:
    """Reduce all ranks' payloads in the order of the ranks."""
    if into.numel():
        addresses = [row.data_ptr() for row in rows]
        _native.reduce(addresses, into.data_ptr(), into.numel(), NATIVE[into.dtype], op, INSTRUCTION_SET)


def _copy_row(rows: torch.Tensor, rank: int, into: torch.Tensor) -> None:
    into.detach().reshape(-1).view(torch.uint8).copy_(rows[rank, : into.nbytes])


def _meeting_here(meeting: Meeting, at: Placement, timeout_s: float) -> Meeting:
    """The ranks of this host among themselves."""
    store = dist.PrefixStore(f"host/{at.host}", meeting.store)  # type: ignore[attr-defined]
    names = [meeting.names[rank] for rank in at.local]
    return Meeting(store, at.local_index(at.rank), len(names), timeout_s, names, meeting.by_name)
