"""Collectives over several hosts: shared memory within each, messages or a switch between them.

H hosts with L ranks each and a message of m bytes; `leader` is one rank of each host. Bytes are
those of a host's link, each way:

  all_reduce      by TCP in the native core (host_collectives.h): each rank sums its share over
                  its host and the hosts; 2(H-1)/H*m bytes. Through a switch, in pieces, in a
                  pipeline: each host reduces a piece to its leader; the leaders reduce it over the
                  hosts; each leader broadcasts the piece on its host. m bytes, and 3 % more for
                  float32's exponents
  reduce          as through a switch: leader h gets part h from the other leaders, adds the H
                  parts in the order of the hosts, and sends the sum to the root
  reduce_scatter  each host reduces the blocks of each other host's ranks and sends them to these;
                  every rank adds what it gets. (H-1)*L blocks
  broadcast       one piece: from the root to the leaders; more: from host to host in a chain.
                  m bytes
  all_gather      each rank sends its block to one rank of each other host, which broadcasts it
                  there. (H-1)*L blocks
  gather, scatter, all_to_all   through shared memory within a host, directly between ranks of two
                                hosts

The order of addition depends on the placement and the size alone: results have the same bits every
time, on all ranks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from torchrelay._native import Messenger
from torchrelay.aggregation._dtypes import NATIVE
from torchrelay.aggregation._exchange import Call, Exchange
from torchrelay.aggregation._inter_host import InterHostTransport, combine, divide, partial
from torchrelay.aggregation._placement import Placement
from torchrelay.aggregation._plane import Op
from torchrelay.aggregation._shm import ShmPlane

__all__ = ["Hierarchy"]

_RECORDS, _PARTS = -1, -2  # tags; those of users are not negative


class Hierarchy:
    """Runs one collective at a time; every method blocks. Calls of all ranks match by their order.

    Args:
        shm: the data plane of this host's ranks.
        transports: those that reduce between hosts; the first that supports a reduction is used.
        piece_bytes: of what is copied between hosts.
        share_bytes: of what each rank sums at a time; equal on all ranks.
    """

    def __init__(
        self,
        placement: Placement,
        shm: ShmPlane,
        messages: Messenger,
        transports: Sequence[InterHostTransport],
        piece_bytes: int,
        share_bytes: int,
    ) -> None:
        self._at = placement
        self._shm = shm
        self._messages = messages
        self._transports = transports
        self._piece_bytes = piece_bytes
        self._share_bytes = share_bytes
        self.shm_s = 0.0
        self.shared_bytes = 0  # by reductions of the native core

    # --- collectives

    def share(self, call: Call, mine: torch.Tensor) -> torch.Tensor:
        """Return all ranks' ``mine``, a row each; bytes, of one size on all ranks."""
        at = self._at
        by_host = torch.empty(at.size, mine.numel(), dtype=torch.uint8)
        blocks = _split(by_host, [len(ranks) for ranks in at.hosts])
        rows = list(blocks[at.host])
        self._local(lambda: self._shm.all_gather(rows, mine, call.left_s(), True))
        if at.rank in at.leaders:
            exchange = self._exchange()
            for host in at.other_hosts:
                exchange.send(at.leaders[host], _RECORDS, blocks[at.host])
                exchange.receive(at.leaders[host], _RECORDS, blocks[host])
            exchange.finish(call)
        self._broadcast_here(call, by_host, at.local[0])
        order = [rank for ranks in at.hosts for rank in ranks]
        table = torch.empty_like(by_host)
        table[order] = by_host
        return table

    def all_reduce(self, call: Call, tensor: torch.Tensor, op: Op) -> None:
        if self._transport(tensor.dtype, op, None) is not self._transports[-1]:
            self._reduce(call, tensor, op, None)
            return
        self.shared_bytes += tensor.nbytes
        dtype = NATIVE[tensor.dtype]
        self._messages.all_reduce(
            tensor.data_ptr(), tensor.numel(), dtype, op, self._share_bytes, call.left_s()
        )
        if op is Op.AVG:
            divide(tensor, self._at.size)

    def reduce(self, call: Call, tensor: torch.Tensor, op: Op, root: int) -> None:
        self._reduce(call, tensor, op, root)

    def _reduce(self, call: Call, tensor: torch.Tensor, op: Op, root: int | None) -> None:
        """Reduce to ``root``, or to all ranks: in pieces, each a stage behind the one before it."""
        transport = self._transport(tensor.dtype, op, root)
        leader = self._at.leaders_for(root)[self._at.host]
        leads = self._at.rank == leader
        pieces = list(_pieces(tensor, transport.piece_bytes))
        runs: list[Iterator[None]] = []
        for step in range(len(pieces) + transport.stages):
            for stage in range(transport.stages + 1):
                index = step - stage
                if not 0 <= index < len(pieces):
                    continue
                if stage == 0:
                    keeps = root is not None and leads and root != self._at.rank
                    work = pieces[index].clone() if keeps else pieces[index]
                    self._reduce_here(call, work, op, leader)
                    runs.append(transport.reduce(call, work, op, root) if leads else iter(()))
                next(runs[index], None)
                if stage == transport.stages and root is None:
                    self._broadcast_here(call, pieces[index], leader)

    def _transport(self, dtype: torch.dtype, op: Op, root: int | None) -> InterHostTransport:
        return next(each for each in self._transports if each.takes(dtype, op, root))

    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op
    ) -> None:
        blocks = [list(self._pieces(block)) for block in inputs]
        outputs = list(self._pieces(output))
        in_progress: list[tuple[Exchange, list[torch.Tensor], list[torch.Tensor]]] = []
        for step in range(len(outputs) + 1):
            if step < len(outputs):
                in_progress.append(
                    self._scatter_sums(call, [pieces[step] for pieces in blocks], op)
                )
                own = [blocks[rank][step] for rank in self._at.local]
                self._reduce_scatter_here(call, outputs[step], own, op)
            if step >= 1:
                exchange, received, _ = in_progress.pop(0)
                exchange.finish(call)
                combine(self._at, outputs[step - 1], received, op)

    def _scatter_sums(
        self, call: Call, blocks: Sequence[torch.Tensor], op: Op
    ) -> tuple[Exchange, list[torch.Tensor], list[torch.Tensor]]:
        """Send this host's sums of others' blocks to their owners; receive their sums of ours.

        Returns what is in progress, what it receives, and what it sends.
        """
        at, exchange = self._at, self._exchange()
        received = [torch.empty_like(blocks[at.rank]) for _ in at.other_hosts]
        sent = []
        for host, part in zip(at.other_hosts, received, strict=True):
            exchange.receive(at.counterpart(host, at.rank), _PARTS, part)
        for host in at.other_hosts:
            for owner in at.hosts[host]:
                sender = at.counterpart(at.host, owner)
                work = blocks[owner].clone() if sender == at.rank else blocks[owner]
                self._reduce_here(call, work, op, sender)
                if sender == at.rank:
                    sent.append(work)
                    exchange.send(owner, _PARTS, work)
        return exchange, received, sent

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
        incoming = [self._exchange() for _ in pieces]
        outgoing = self._exchange()
        for piece, exchange in zip(pieces, incoming, strict=True):
            if at.rank in sources:
                exchange.receive(sources[at.rank], _PARTS, piece)
        for piece, exchange in zip(pieces, incoming, strict=True):
            exchange.finish(call)
            for target in targets:
                outgoing.send(target, _PARTS, piece)
            self._broadcast_here(call, piece, leaders[at.host])
        outgoing.finish(call)

    def all_gather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        at = self._at
        outgoing = self._exchange()
        for host in at.other_hosts:
            for piece in self._pieces(tensor):
                outgoing.send(at.counterpart(host, at.rank), _PARTS, piece)
        incoming = {
            rank: self._receive_pieces(outputs[rank], rank)
            for rank in at.remote
            if at.counterpart(at.host, rank) == at.rank
        }
        local = [outputs[rank] for rank in at.local]
        self._local(lambda: self._shm.all_gather(local, tensor, call.left_s(2), True))
        for rank in sorted(at.remote, key=at.local_index):
            for index, piece in enumerate(self._pieces(outputs[rank])):
                if rank in incoming:
                    incoming[rank][index].finish(call)
                self._broadcast_here(call, piece, at.counterpart(at.host, rank))
        outgoing.finish(call)

    def _receive_pieces(self, output: torch.Tensor, source: int) -> list[Exchange]:
        exchanges = []
        for piece in self._pieces(output):
            exchanges.append(self._exchange())
            exchanges[-1].receive(source, _PARTS, piece)
        return exchanges

    def gather(
        self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int
    ) -> None:
        def local(blocks: Sequence[torch.Tensor], index: int) -> None:
            self._shm.gather(blocks, tensor, index, call.left_s(2), True)

        self._with_root(call, root, tensor, outputs, Exchange.send, Exchange.receive, local)

    def scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int
    ) -> None:
        def local(blocks: Sequence[torch.Tensor], index: int) -> None:
            self._shm.scatter(output, blocks, index, call.left_s(2), True)

        self._with_root(call, root, output, inputs, Exchange.receive, Exchange.send, local)

    def _with_root(
        self,
        call: Call,
        root: int,
        own: torch.Tensor,
        blocks: Sequence[torch.Tensor],
        by_others: Callable[[Exchange, int, int, torch.Tensor], None],
        by_root: Callable[[Exchange, int, int, torch.Tensor], None],
        local: Callable[[Sequence[torch.Tensor], int], None],
    ) -> None:
        """Move each rank's ``own`` to or from ``root``, which has a block for each rank.

        Args:
            by_others, by_root: what they do with the exchange: one sends, the other receives.
            local: does the same for the ranks of the root's host.
        """
        at, exchange = self._at, self._exchange()
        if root not in at.local:
            by_others(exchange, root, _PARTS, own)
        elif at.rank == root:
            for rank in at.remote:
                by_root(exchange, rank, _PARTS, blocks[rank])
        if root in at.local:
            here = [blocks[rank] for rank in at.local] if at.rank == root else []
            self._local(lambda: local(here, at.local_index(root)))
        exchange.finish(call)

    def all_to_all(
        self, call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        at, exchange = self._at, self._exchange()
        for rank in at.remote:
            exchange.receive(rank, _PARTS, outputs[rank])
            exchange.send(rank, _PARTS, inputs[rank])
        into, blocks = [outputs[rank] for rank in at.local], [inputs[rank] for rank in at.local]
        self._local(lambda: self._shm.all_to_all(into, blocks, call.left_s(2), True))
        exchange.finish(call)

    # --- within this host

    def _reduce_here(self, call: Call, tensor: torch.Tensor, op: Op, to: int) -> None:
        """Reduce to one rank; an average is divided at the end."""
        if len(self._at.local) > 1:
            index = self._at.local_index(to)
            self._local(lambda: self._shm.reduce(tensor, partial(op), index, call.left_s(2), True))

    def _reduce_scatter_here(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op
    ) -> None:
        self._local(
            lambda: self._shm.reduce_scatter(output, inputs, partial(op), call.left_s(2), True)
        )

    def _broadcast_here(self, call: Call, tensor: torch.Tensor, root: int) -> None:
        if len(self._at.local) > 1:
            index = self._at.local_index(root)
            self._local(lambda: self._shm.broadcast(tensor, index, call.left_s(2), True))

    def _local(self, step: Callable[[], object]) -> None:
        started_s = time.monotonic()
        step()
        self.shm_s += time.monotonic() - started_s

    # --- between hosts

    def _exchange(self) -> Exchange:
        return Exchange(self._messages)

    def _pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        return _pieces(tensor, self._piece_bytes)


def _split(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return views of so many rows each."""
    bounds = itertools.accumulate(counts, initial=0)
    return [tensor[start:end] for start, end in itertools.pairwise(bounds)]


def _pieces(tensor: torch.Tensor, size_bytes: int) -> Iterator[torch.Tensor]:
    flat = tensor.detach().reshape(-1)
    count = max(1, size_bytes // flat.element_size())
    for start in range(0, flat.numel(), count):
        yield flat[start : start + count]
