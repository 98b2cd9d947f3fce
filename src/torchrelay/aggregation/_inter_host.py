"""Reductions between hosts: the contract, and TCP, which implements all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from torchrelay import _native
from torchrelay.aggregation._dtypes import NATIVE
from torchrelay.aggregation._exchange import Call, Exchange
from torchrelay.aggregation._placement import Placement
from torchrelay.aggregation._plane import LinkStats, Op

__all__ = ["INSTRUCTION_SET", "InterHostTransport", "TcpTransport", "combine", "divide", "partial"]

INSTRUCTION_SET = _native.instruction_sets()[0]
_PARTS, _SUMS = -2, -3  # tags; those of users are not negative


class InterHostTransport(Protocol):
    """Reduces pieces of tensors over the hosts; one rank of each host, its leader, takes part.

    Tensors are flat, contiguous and on the CPU. Calls of all leaders match by their order.
    """

    @property
    def stages(self) -> int:
        """The number of pipeline stages of a piece."""

    @property
    def piece_bytes(self) -> int:
        """The size of the pieces that it accepts; equal on all ranks."""

    def takes(self, dtype: torch.dtype, op: Op, root: int | None) -> bool:
        """Return whether it supports this reduction, to ``root`` or (None) to all; equal on all
        ranks.
        """

    def reduce(self, call: Call, piece: torch.Tensor, op: Op, root: int | None) -> Iterator[None]:
        """Replace ``piece`` by the hosts' reduction; an average is divided by the number of ranks.

        Yields after each stage; the next stage blocks until the previous one is done. Between
        them the caller may start other pieces. All hosts get the same bits.

        Raises:
            OperationTimeoutError: it did not end by the call's deadline; names what is missing.
            PeerLostError: a host, or what the transport goes through, was lost.
        """

    def stats(self) -> LinkStats: ...


class TcpTransport:
    """Reductions over TCP: leader h receives part h of a piece from the others, adds the parts, and
    sends the sum back.

    Args:
        reason: why it is used, for :meth:`stats`.
    """

    stages = 2

    def __init__(
        self,
        placement: Placement,
        messages: _native.Messenger,
        piece_bytes: int,
        reason: str,
    ) -> None:
        self._at, self._messages = placement, messages
        self.piece_bytes = piece_bytes
        self._reason = reason

    def takes(self, dtype: torch.dtype, op: Op, root: int | None) -> bool:
        return True

    def reduce(self, call: Call, piece: torch.Tensor, op: Op, root: int | None) -> Iterator[None]:
        at, leaders = self._at, self._at.leaders_for(root)
        segments = _segments(piece, len(at.hosts))
        own = segments[at.host]
        parts = Exchange(self._messages)
        received = [torch.empty_like(own) for _ in at.other_hosts]
        for host, part in zip(at.other_hosts, received, strict=True):
            parts.send(leaders[host], _PARTS, segments[host])
            parts.receive(leaders[host], _PARTS, part)
        yield
        parts.finish(call)
        combine(at, own, received, op)
        sums = Exchange(self._messages)
        for host in at.other_hosts:
            if root is None or root == leaders[host]:
                sums.send(leaders[host], _SUMS, own)
            if root is None or root == at.rank:
                sums.receive(leaders[host], _SUMS, segments[host])
        yield
        sums.finish(call)

    def stats(self) -> LinkStats:
        sent, waited_ns = self._messages.sent_bytes, self._messages.waited_ns
        return LinkStats("tcp", self._reason, sent, waited_ns * 1e-9)


def combine(at: Placement, own: torch.Tensor, others: Sequence[torch.Tensor], op: Op) -> None:
    """Reduce this host's part and the others', in the order of the hosts, into ``own``."""
    parts = [*others]
    parts.insert(at.host, own)
    if own.numel():
        addresses = [part.data_ptr() for part in parts]
        dtype = NATIVE[own.dtype]
        _native.reduce(addresses, own.data_ptr(), own.numel(), dtype, partial(op), INSTRUCTION_SET)
    if op is Op.AVG:
        divide(own, at.size)


def divide(tensor: torch.Tensor, ranks: int) -> None:
    """Divide in place; integers round towards zero, and may be narrower than ``ranks``."""
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.div_(ranks)
        else:
            tensor.copy_(torch.div(tensor.long(), ranks, rounding_mode="trunc"))


def partial(op: Op) -> Op:
    """Return the op for a part of the ranks; an average is divided at the end."""
    return Op.SUM if op is Op.AVG else op


def _segments(piece: torch.Tensor, hosts: int) -> list[torch.Tensor]:
    """Return one part for each host."""
    bounds = [piece.numel() * host // hosts for host in range(hosts + 1)]
    return [piece[start:end] for start, end in itertools.pairwise(bounds)]
