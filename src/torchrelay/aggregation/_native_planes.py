"""The native core as data planes: of ranks on one host, over a shared segment; of ranks on
several hosts, with shared memory within each, TCP and a switch between them.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchrelay import _native, _torch, config
from torchrelay._addresses import address_for_peers
from torchrelay._communicators import hosts_of, open_between, open_local
from torchrelay.aggregation._dtypes import NATIVE, code
from torchrelay.aggregation._plane import LinkStats, Op, Operations, PlaneStats, Tensors
from torchrelay.aggregation._switch_transport import SwitchTransport, join, terms
from torchrelay.config import Aggregation
from torchrelay.errors import ConfigError
from torchrelay.transport import read_key
from torchrelay.world import Meeting

if TYPE_CHECKING:
    from torch.distributed import Store

    from torchrelay._native import Ticket, Transfer

__all__ = ["HostsPlane", "ShmPlane"]

_logger = logging.getLogger("torchrelay.aggregation")
# The payload in each rank's record: of all ranks' together, at least and at most.
_TABLE_BYTES = 16384
_LEAST_INLINE_BYTES, _MOST_INLINE_BYTES = 256, 2048


class NativePlane:
    """Those methods of a :class:`_plane.Plane` that a native communicator implements."""

    native: _native.Communicator | _native.HostCommunicator
    calls_type: type[_native.CoalescedCalls | _native.CoalescedHostCalls]
    _payload_bytes = 0

    def all_reduce(
        self, output: Tensor, source: Tensor, op: Op, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += output.nbytes
        address = 0 if source is output else source.data_ptr()
        dtype = NATIVE[output.dtype]
        return self.native.all_reduce(
            output.data_ptr(), output.numel(), dtype, op, timeout_s, block, address
        )

    def reduce(
        self, tensor: Tensor, op: Op, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += tensor.nbytes
        return self.native.reduce(
            tensor.data_ptr(), tensor.numel(), NATIVE[tensor.dtype], op, root, timeout_s, block
        )

    def reduce_scatter(
        self, output: Tensor, inputs: Tensors, op: Op, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += output.nbytes * len(inputs)
        addresses = [tensor.data_ptr() for tensor in inputs]
        return self.native.reduce_scatter(
            addresses, output.data_ptr(), output.numel(), NATIVE[output.dtype], op, timeout_s, block
        )

    def _block(self, tensor: Tensor) -> tuple[int, int, int]:
        """Return address, bytes and dtype of a tensor, whose bytes count."""
        self._payload_bytes += tensor.nbytes
        return tensor.data_ptr(), tensor.nbytes, code(tensor.dtype)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, block: bool) -> Ticket | None:
        return self.native.broadcast(*self._block(tensor), root, timeout_s, block)

    def all_gather(
        self, outputs: Tensors, tensor: Tensor, timeout_s: float, block: bool
    ) -> Ticket | None:
        address, size, dtype = self._block(tensor)
        return self.native.all_gather(address, size, _blocks(outputs), dtype, timeout_s, block)

    def gather(
        self, outputs: Tensors, tensor: Tensor, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        address, size, dtype = self._block(tensor)
        return self.native.gather(address, size, _blocks(outputs), dtype, root, timeout_s, block)

    def scatter(
        self, output: Tensor, inputs: Tensors, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        address, size, dtype = self._block(output)
        return self.native.scatter(_blocks(inputs), address, size, dtype, root, timeout_s, block)

    def all_to_all(
        self, outputs: Tensors, inputs: Tensors, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += sum(tensor.nbytes for tensor in inputs)
        dtype = code(inputs[0].dtype)
        return self.native.all_to_all(_blocks(inputs), _blocks(outputs), dtype, timeout_s, block)

    def barrier(self, timeout_s: float, block: bool) -> Ticket | None:
        return self.native.barrier(timeout_s, block)

    def coalesced(
        self, operations: Operations, digest: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        collecting: Any = copy.copy(self)
        calls: Any = self.calls_type()
        collecting.native = calls
        for operation, arguments in operations:
            getattr(collecting, operation)(*arguments, timeout_s, False)
        self._payload_bytes = collecting._payload_bytes
        ticket: Ticket | None = calls.run_on(self.native, digest, timeout_s, block)
        return ticket

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> Transfer:
        address, size, dtype = self._block(tensor)
        return self.native.send(address, size, to, tag, dtype, timeout_s)

    def receive(self, tensor: Tensor, source: int, tag: int, timeout_s: float) -> Transfer:
        return self.native.receive(
            tensor.data_ptr(), tensor.nbytes, source, tag, code(tensor.dtype), timeout_s
        )

    def wait_transfer(self, transfer: Transfer, timeout_s: float) -> bool:
        return self.native.wait_transfer(transfer, timeout_s)


class ShmPlane(NativePlane):
    """The :class:`_plane.Plane` of a rank in a group whose ranks all run on this host.

    Creation is collective; see :func:`open_local`, also for its errors.

    Args:
        meeting: of the group's ranks.
    """

    name = "shm"
    native: _native.Communicator
    calls_type = _native.CoalescedCalls

    def __init__(self, meeting: Meeting, timeout_s: float, settings: Aggregation) -> None:
        self.native = open_local(meeting, timeout_s, settings)

    def stats(self) -> PlaneStats:
        native = self.native
        return PlaneStats(self.name, native.jobs, self._payload_bytes, native.waiting_ns * 1e-9)

    def close(self) -> None:
        self.native.close()


class HostsPlane(NativePlane):
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
        ConfigError: there is a key, which does not encrypt what goes through a switch; on every
            rank.
        MismatchError: the ranks have different keys, or settings for the switch; on every rank.
    """

    name = "hosts"
    native: _native.HostCommunicator
    calls_type = _native.CoalescedHostCalls

    def __init__(
        self, meeting: Meeting, store: Store, timeout_s: float, settings: Aggregation
    ) -> None:
        hosts = hosts_of([process.host for process in meeting.processes])
        sockets = config.load(config.TransportSettings)
        address = address_for_peers(
            lambda step, mine: meeting.gather(step, mine, timeout_s),
            f"sml, {meeting.name}",
            _torch.store_host(store),
            sockets.interface,
        )
        here = next(ranks for ranks in hosts if meeting.rank in ranks)
        self._ranks_here = len(here)
        self._shm = ShmPlane(meeting.among(here), timeout_s, settings)
        self._origin, self._closing = _native.Origin(), threading.Lock()
        self._switch: SwitchTransport | None = None
        self.native = open_between(
            meeting,
            hosts,
            self._shm.native,
            sockets,
            address,
            timeout_s,
            inline_bytes=_inline_bytes(meeting.size, bool(settings.switch)),
            on_failure=self._wake,
            agreed={"the use of a switch": terms(settings)},
        )
        try:
            if settings.switch and read_key(sockets) and not settings.unencrypted_switch:
                raise ConfigError(
                    f"{meeting.name}, sml: there is a key, but a switch adds integers that it must "
                    "read, so what goes through it is not encrypted; use none, or allow it with "
                    "TORCHRELAY_AGGREGATION_UNENCRYPTED_SWITCH=1"
                )
            if settings.switch:
                leaders = [ranks[0] for ranks in hosts]
                client = join(meeting, leaders, settings, timeout_s)
                check = functools.partial(self._shm.native.check, "waiting for other hosts")
                self._switch = SwitchTransport(
                    leaders, meeting.names, settings, client, self.native, check
                )
            self.barrier(timeout_s, True)
        except BaseException:
            self.close()
            raise
        if meeting.rank == 0:
            switch = self._switch
            _logger.info(
                "sml: %s ranks on %d hosts: shared memory within each; between them %s",
                " + ".join(str(len(ranks)) for ranks in hosts),
                len(hosts),
                f"{switch.reason}, TCP for the rest" if switch else "TCP (no switch is configured)",
            )

    def all_reduce(
        self, output: Tensor, source: Tensor, op: Op, timeout_s: float, block: bool
    ) -> Ticket | None:
        if self._switch is None or not self._switch.takes(output.dtype, op):
            return super().all_reduce(output, source, op, timeout_s, block)
        self._payload_bytes += output.nbytes
        return self.native.all_reduce_through(
            output.data_ptr(),
            output.numel(),
            NATIVE[output.dtype],
            op,
            self._switch.piece_bytes,
            *self._switch.calls(output.detach().view(-1), op, self._ranks_here),
            timeout_s,
            block,
            0 if source is output else source.data_ptr(),
        )

    # --- what a group says about itself, and its end

    def stats(self) -> PlaneStats:
        native, switch = self.native, self._switch
        shm_s = self._shm.native.waiting_ns * 1e-9
        reason = "no switch is configured" if switch is None else "what the switch does not sum"
        links = (
            LinkStats("shm", "ranks that share a host", native.shared_bytes, shm_s),
            *([] if switch is None else [switch.stats()]),
            LinkStats("tcp", reason, native.sent_bytes, native.waited_ns * 1e-9),
        )
        waiting_s = sum(link.busy_s for link in links)
        return PlaneStats(self.name, native.jobs, self._payload_bytes, waiting_s, links)

    def close(self) -> None:
        if self._origin.is_forked:
            return
        with self._closing:
            self.native.close()
            if self._switch is not None:
                self._switch.close()
            self._shm.close()

    def _wake(self) -> None:
        """Wake this rank where it waits for the switch."""
        if self._switch is not None:
            self._switch.close()


def _inline_bytes(ranks: int, has_switch: bool) -> int:
    """Return the size of the payload in each of so many ranks' records.

    Where hosts sum through a switch it is small, because payloads do not pass the switch.
    """
    if has_switch:
        return _LEAST_INLINE_BYTES
    share_bytes = _TABLE_BYTES // ranks // 8 * 8
    return min(max(share_bytes, _LEAST_INLINE_BYTES), _MOST_INLINE_BYTES)


def _blocks(tensors: Tensors) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
