"""Collectives over ranks of several hosts: shared memory within each host, messages between them.

H hosts with L ranks each and a message of m bytes; `leader` is one rank of each host. Bytes are those of a host's link,
each way:

  all_reduce      in pieces, in a pipeline: each host reduces a piece to its leader; leader h gets part h of it from
                  the other leaders, adds the H parts in the order of the hosts, and sends the sum back to them; each
                  leader broadcasts the piece on its host. 2(H-1)/H*m bytes
  reduce          the same, but sums are sent to the root only
  reduce_scatter  each host reduces the blocks of each other host's ranks and sends them to these; every rank adds what
                  it gets. (H-1)*L blocks
  broadcast       one piece: from the root to the leaders; more: from host to host in a chain. m bytes
  all_gather      each rank sends its block to one rank of each other host, which broadcasts it there. (H-1)*L blocks
  gather, scatter, all_to_all   through shared memory within a host, directly between ranks of two hosts

The order of addition depends on the placement and the size alone: results have the same bits every time, on all ranks.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from torchrelay import _native
from torchrelay.aggregation._dtypes import NATIVE
from torchrelay.aggregation._executor import Completion
from torchrelay.aggregation._messages import Messages
from torchrelay.aggregation._placement import Placement
from torchrelay.aggregation._plane import Op
from torchrelay.aggregation._shm import ShmPlane

__all__ = ["GRACE_S", "INSTRUCTION_SET", "Call", "Hierarchy", "bytes_of"]

# The cause of a delay is named by whoever waits for it directly; those behind it wait this much longer each.
GRACE_S = 1.0

_RECORDS, _PARTS, _SUMS = -1, -2, -3  # tags; those of users are not negative
INSTRUCTION_SET = _native.instruction_sets()[0]


_PyBUF_WRITE = 0x200
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def split(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Views of so many rows each."""
    bounds = itertools.accumulate(counts, initial=0)
    return [tensor[start:end] for start, end in itertools.pairwise(bounds)]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which the caller keeps.

    ``Tensor.numpy()`` would make the tensor's storage one that cannot be resized, as FSDP does.
    """
    if not tensor.nbytes:
        return memoryview(bytearray())  # it has no address
    view: memoryview = _memory_view(tensor.data_ptr(), tensor.nbytes, _PyBUF_WRITE)
    return view


@dataclass
class Call:
    """A collective in progress."""

    name: str
    deadline_s: float  # of the monotonic clock

    def left_s(self, grace: int = 0) -> float:
        """How long it may still take, for a wait of whose cause others may know more."""
        return max(0.0, self.deadline_s - time.monotonic()) + grace * GRACE_S


@dataclass
class _Exchange:
    """Messages in progress, with the ranks at the other ends and the buffers that they use."""

    transfers: list[tuple[Completion, int]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)


class Hierarchy:
    """Runs one collective at a time; every method blocks. Calls of all ranks match by their order.

    Args:
        shm: the data plane of this host's ranks.
        chunk_bytes: the size of a piece.
    """

    def __init__(self, placement: Placement, shm: ShmPlane, messages: Messages, chunk_bytes: int) -> None:
        self._at = placement
        self._shm = shm
        self._messages = messages
        self._chunk_bytes = chunk_bytes
        self.shm_s = self.network_s = 0.0

    # --- collectives

    def share(self, call: Call, mine: torch.Tensor) -> torch.Tensor:
        """All ranks' ``mine``, a row each; bytes, of one size on all ranks."""
        at = self._at
        by_host = torch.empty(at.size, mine.numel(), dtype=torch.uint8)
        blocks = split(by_host, [len(ranks) for ranks in at.hosts])
        rows = list(blocks[at.host])
        self._local(lambda: self._shm.all_gather(rows, mine, call.left_s(), True))
        if at.rank in at.leaders:
            exchange = _Exchange()
            for host in at.other_hosts:
                self._send(exchange, at.leaders[host], _RECORDS, blocks[at.host])
                self._receive(exchange, at.leaders[host], _RECORDS, blocks[host])
            self._finish(call, exchange)
        self._broadcast_here(call, by_host, at.local[0])
        order = [rank for ranks in at.hosts for rank in ranks]
        table = torch.empty_like(by_host)
        table[order] = by_host
        return table

    def all_reduce(self, call: Call, tensor: torch.Tensor, op: Op) -> None:
        self._reduce(call, tensor, op, None)

    def reduce(self, call: Call, tensor: torch.Tensor, op: Op, root: int) -> None:
        self._reduce(call, tensor, op, root)

    def _reduce(self, call: Call, tensor: torch.Tensor, op: Op, root: int | None) -> None:
        """Reduce to ``root``, or to all ranks."""
        leaders = self._at.leaders_for(root)
        leads = self._at.rank in leaders
        pieces = list(self._pieces(tensor))
        works: list[torch.Tensor] = []
        parts: list[_Exchange] = []
        sums: list[_Exchange] = []
        for step in range(len(pieces) + 2):
            if step < len(pieces):
                keeps = root is not None and leads and root != self._at.rank
                works.append(pieces[step].clone() if keeps else pieces[step])
                self._reduce_here(call, works[step], op, leaders[self._at.host])
                parts.append(self._exchange_parts(works[step], leaders) if leads else _Exchange())
            if 1 <= step <= len(pieces) and leads:
                self._finish(call, parts[step - 1])
                self._add_parts(works[step - 1], parts[step - 1].buffers, op)
                sums.append(self._exchange_sums(works[step - 1], leaders, root))
            if step >= 2:
                if leads:
                    self._finish(call, sums[step - 2])
                if root is None:
                    self._broadcast_here(call, pieces[step - 2], leaders[self._at.host])

    def _exchange_parts(self, work: torch.Tensor, leaders: Sequence[int]) -> _Exchange:
        """Send each other leader its part of this host's sum; get theirs of ours."""
        exchange = _Exchange()
        segments = self._segments(work)
        own = segments[self._at.host]
        for host in self._at.other_hosts:
            self._send(exchange, leaders[host], _PARTS, segments[host])
            exchange.buffers.append(torch.empty_like(own))
            self._receive(exchange, leaders[host], _PARTS, exchange.buffers[-1])
        return exchange

    def _add_parts(self, work: torch.Tensor, parts: Sequence[torch.Tensor], op: Op) -> None:
        self._combine(self._segments(work)[self._at.host], parts, op)

    def _exchange_sums(self, work: torch.Tensor, leaders: Sequence[int], root: int | None) -> _Exchange:
        exchange = _Exchange()
        segments = self._segments(work)
        for host in self._at.other_hosts:
            if root is None or root == leaders[host]:
                self._send(exchange, leaders[host], _SUMS, segments[self._at.host])
            if root is None or root == self._at.rank:
                self._receive(exchange, leaders[host], _SUMS, segments[host])
        return exchange

    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op
    ) -> None:
        blocks = [list(self._pieces(block)) for block in inputs]
        outputs = list(self._pieces(output))
        exchanges: list[_Exchange] = []
        for step in range(len(outputs) + 1):
            if step < len(outputs):
                exchanges.append(self._scatter_sums(call, [pieces[step] for pieces in blocks], op))
                own = [blocks[rank][step] for rank in self._at.local]
                self._reduce_scatter_here(call, outputs[step], own, op)
            if step >= 1:
                self._finish(call, exchanges[step - 1])
                received = exchanges[step - 1].buffers[: len(self._at.other_hosts)]
                self._combine(outputs[step - 1], received, op)

    def _scatter_sums(self, call: Call, blocks: Sequence[torch.Tensor], op: Op) -> _Exchange:
        """Send this host's sums of the other hosts' blocks to their owners; get the others' sums of ours."""
        at, exchange = self._at, _Exchange()
        for host in at.other_hosts:
            exchange.buffers.append(torch.empty_like(blocks[at.rank]))
            self._receive(exchange, at.counterpart(host, at.rank), _PARTS, exchange.buffers[-1])
        for host in at.other_hosts:
            for owner in at.hosts[host]:
                sender = at.counterpart(at.host, owner)
                work = blocks[owner].clone() if sender == at.rank else blocks[owner]
                self._reduce_here(call, work, op, sender)
                if sender == at.rank:
                    exchange.buffers.append(work)
                    self._send(exchange, owner, _PARTS, work)
        return exchange

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> None:
        at = self._at
        leaders = at.leaders_for(root)
        pieces = list(self._pieces(tensor))
        first = at.host_of(root)
        chain = [leaders[(first + i) % len(leaders)] for i in range(len(leaders))]
        if len(pieces) > 1:
            sources = dict(zip(chain[1:], chain, strict=False))
        else:
            sources = dict.fromkeys(chain[1:], root)
        targets = [rank for rank, source in sources.items() if source == at.rank]
        incoming = [_Exchange() for _ in pieces]
        outgoing = _Exchange()
        for piece, exchange in zip(pieces, incoming, strict=True):
            if at.rank in sources:
                self._receive(exchange, sources[at.rank], _PARTS, piece)
        for piece, exchange in zip(pieces, incoming, strict=True):
            self._finish(call, exchange)
            for target in targets:
                self._send(outgoing, target, _PARTS, piece)
            self._broadcast_here(call, piece, leaders[at.host])
        self._finish(call, outgoing)

    def all_gather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        at = self._at
        exchange = _Exchange()
        for host in at.other_hosts:
            for piece in self._pieces(tensor):
                self._send(exchange, at.counterpart(host, at.rank), _PARTS, piece)
        remote = [rank for rank in range(at.size) if rank not in at.local]
        incoming = {
            rank: self._receive_pieces(outputs[rank], rank)
            for rank in remote
            if at.counterpart(at.host, rank) == at.rank
        }
        local = [outputs[rank] for rank in at.local]
        self._local(lambda: self._shm.all_gather(local, tensor, call.left_s(2), True))
        for rank in sorted(remote, key=at.local_index):
            for index, piece in enumerate(self._pieces(outputs[rank])):
                if rank in incoming:
                    self._finish(call, incoming[rank][index])
                self._broadcast_here(call, piece, at.counterpart(at.host, rank))
        self._finish(call, exchange)

    def _receive_pieces(self, output: torch.Tensor, source: int) -> list[_Exchange]:
        exchanges = []
        for piece in self._pieces(output):
            exchanges.append(_Exchange())
            self._receive(exchanges[-1], source, _PARTS, piece)
        return exchanges

    def gather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        at, exchange = self._at, _Exchange()
        if at.host_of(root) != at.host:
            self._send(exchange, root, _PARTS, tensor)
        elif at.rank == root:
            for rank in range(at.size):
                if rank not in at.local:
                    self._receive(exchange, rank, _PARTS, outputs[rank])
        if root in at.local:
            local = [outputs[rank] for rank in at.local] if at.rank == root else []
            index = at.local_index(root)
            self._local(lambda: self._shm.gather(local, tensor, index, call.left_s(2), True))
        self._finish(call, exchange)

    def scatter(self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        at, exchange = self._at, _Exchange()
        if at.host_of(root) != at.host:
            self._receive(exchange, root, _PARTS, output)
        elif at.rank == root:
            for rank in range(at.size):
                if rank not in at.local:
                    self._send(exchange, rank, _PARTS, inputs[rank])
        if root in at.local:
            local = [inputs[rank] for rank in at.local] if at.rank == root else []
            index = at.local_index(root)
            self._local(lambda: self._shm.scatter(output, local, index, call.left_s(2), True))
        self._finish(call, exchange)

    def all_to_all(self, call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        at, exchange = self._at, _Exchange()
        for rank in range(at.size):
            if rank not in at.local:
                self._receive(exchange, rank, _PARTS, outputs[rank])
                self._send(exchange, rank, _PARTS, inputs[rank])
        into, blocks = [outputs[rank] for rank in at.local], [inputs[rank] for rank in at.local]
        self._local(lambda: self._shm.all_to_all(into, blocks, call.left_s(2), True))
        self._finish(call, exchange)

    # --- within this host

    def _reduce_here(self, call: Call, tensor: torch.Tensor, op: Op, to: int) -> None:
        """Reduce to one rank; an average is divided at the end."""
        if len(self._at.local) > 1:
            index = self._at.local_index(to)
            self._local(lambda: self._shm.reduce(tensor, _partial(op), index, call.left_s(2), True))

    def _reduce_scatter_here(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op
    ) -> None:
        self._local(lambda: self._shm.reduce_scatter(output, inputs, _partial(op), call.left_s(2), True))

    def _broadcast_here(self, call: Call, tensor: torch.Tensor, root: int) -> None:
        if len(self._at.local) > 1:
            index = self._at.local_index(root)
            self._local(lambda: self._shm.broadcast(tensor, index, call.left_s(2), True))

    def _local(self, step: Callable[[], object]) -> None:
        started_s = time.monotonic()
        step()
        self.shm_s += time.monotonic() - started_s

    def _combine(self, own: torch.Tensor, others: Sequence[torch.Tensor], op: Op) -> None:
        """Reduce this host's part and the others', in the order of the hosts, into ``own``."""
        parts = [*others]
        parts.insert(self._at.host, own)
        if own.numel():
            addresses = [part.data_ptr() for part in parts]
            dtype = NATIVE[own.dtype]
            _native.reduce(addresses, own.data_ptr(), own.numel(), dtype, _partial(op), INSTRUCTION_SET)
        if op is Op.AVG:
            _divide(own, self._at.size)

    # --- between hosts

    def _send(self, exchange: _Exchange, to: int, tag: int, tensor: torch.Tensor) -> None:
        if tensor.numel():
            exchange.transfers.append((self._messages.send(to, tag, bytes_of(tensor)), to))

    def _receive(self, exchange: _Exchange, source: int, tag: int, tensor: torch.Tensor) -> None:
        if tensor.numel():
            receive = self._messages.receive(source, tag, bytes_of(tensor))
            exchange.transfers.append((receive.completion, source))

    def _finish(self, call: Call, exchange: _Exchange) -> None:
        started_s = time.monotonic()
        for completion, peer in exchange.transfers:
            self._messages.wait(completion, peer, call.name, call.deadline_s + GRACE_S, self._shm.check)
        self.network_s += time.monotonic() - started_s

    def _pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        flat = tensor.detach().reshape(-1)
        count = max(1, self._chunk_bytes // flat.element_size())
        for start in range(0, flat.numel(), count):
            yield flat[start : start + count]

    def _segments(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """One part for each host."""
        hosts, count = len(self._at.hosts), piece.numel()
        bounds = [count * host // hosts for host in range(hosts + 1)]
        return [piece[start:end] for start, end in itertools.pairwise(bounds)]


def _divide(tensor: torch.Tensor, ranks: int) -> None:
    """Divide in place; whole numbers are cut off towards zero, and may be narrower than ``ranks``."""
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.div_(ranks)
        else:
            tensor.copy_(torch.div(tensor.long(), ranks, rounding_mode="trunc"))


def _partial(op: Op) -> Op:
    return Op.SUM if op is Op.AVG else op
