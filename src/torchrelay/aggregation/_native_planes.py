"""The native core as data planes: of ranks on one host, over a shared segment; of ranks on
several hosts, with shared memory within each, TCP and a switch between them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence

from torch import Tensor

from torchrelay import _native, config
from torchrelay._communicators import open_between, open_local
from torchrelay._group import Collective, Compression, Group, Kind, Op
from torchrelay.aggregation._plane import LinkStats, PlaneStats
from torchrelay.aggregation._switch_transport import SwitchTransport, join, terms
from torchrelay.config import Aggregation
from torchrelay.errors import ConfigError
from torchrelay.transport import read_key
from torchrelay.world import Ranks

__all__ = ["HostsPlane", "ShmPlane"]

_logger = logging.getLogger("torchrelay.aggregation")
# The payload in each rank's record: of all ranks' together, at least and at most.
_TABLE_BYTES = 16384
_LEAST_INLINE_BYTES, _MOST_INLINE_BYTES = 256, 2048
_COMPRESSION_AND_SWITCH = (
    "sml: a switch adds integers of its own, which it has quantized already, so its sums are not "
    "compressed; use the switch or compression, but not both"
)


class ShmPlane(Group):
    """The :class:`_plane.Plane` of a rank in a group whose ranks all run on this host.

    Creation is collective; see :func:`open_local`, also for its errors.

    Args:
        ranks: of the group.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, settings: Aggregation) -> None:
        super().__init__(open_local(ranks, timeout_s, settings))

    def stats(self) -> PlaneStats:
        native = self.native
        return PlaneStats("shm", native.calls, native.payload_bytes, native.shared_ns * 1e-9)


class HostsPlane(Group):
    """One rank's part in a group whose ranks run on several hosts; see :class:`_plane.Plane`.

    Making one is collective over ``ranks``.

    Args:
        hosts: the ranks of each host.
        address: of this host, at which the others reach it.

    Raises:
        OperationTimeoutError: a rank did not join within ``timeout_s``, or cannot be reached.
        PeerLostError: a rank died meanwhile.
        UnavailableError: a rank cannot be reached from other hosts, or the switch does not answer;
            on every rank.
        ConfigError: there is a key, which does not encrypt what goes through a switch, or a switch
            and compression; on every rank.
        MismatchError: the ranks have different keys, or settings for the switch or compression; on
            every rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        hosts: Sequence[Sequence[int]],
        address: str,
        timeout_s: float,
        settings: Aggregation,
    ) -> None:
        sockets = config.load(config.TransportSettings)
        here = next(each for each in hosts if ranks.rank in each)
        self._ranks_here = len(here)
        super().__init__(open_local(ranks.among(here), timeout_s, settings))
        self._origin, self._closing = _native.Origin(), threading.Lock()
        self._switch: SwitchTransport | None = None
        self._compression = Compression[settings.compression]
        try:
            open_between(
                ranks,
                hosts,
                self.native,
                sockets,
                address,
                timeout_s,
                inline_bytes=_inline_bytes(ranks.size, bool(settings.switch)),
                on_failure=self._wake,
                agreed={
                    "the use of a switch": terms(settings),
                    "compression": settings.compression,
                },
            )
            if settings.switch and read_key(sockets) and not settings.unencrypted_switch:
                raise ConfigError(
                    f"{ranks.name}, sml: there is a key, but a switch adds integers that it must "
                    "read, so what goes through it is not encrypted; use none, or allow it with "
                    "TORCHRELAY_AGGREGATION_UNENCRYPTED_SWITCH=1"
                )
            if settings.switch and self._compression is not Compression.none:
                raise ConfigError(f"{ranks.name}, {_COMPRESSION_AND_SWITCH}")
            if settings.switch:
                leaders = [each[0] for each in hosts]
                client = join(ranks, leaders, settings, timeout_s)
                check = functools.partial(self.native.check, "waiting for other hosts")
                self._switch = SwitchTransport(
                    leaders, ranks.names, settings, client, self.native, check
                )
            self.run([Collective(Kind.barrier)], timeout_s, True)
            self.start_counting()
        except BaseException:
            self.close()
            raise
        if ranks.rank == 0:
            switch = self._switch
            _logger.info(
                "sml: %s ranks on %d hosts: shared memory within each; between them %s",
                " + ".join(str(len(each)) for each in hosts),
                len(hosts),
                f"{switch.reason}, TCP for the rest" if switch else "TCP (no switch is configured)",
            )

    def all_reduce(self, output: Tensor, source: Tensor, op: Op, timeout_s: float) -> None:
        if self._switch is None and self._compression is Compression.none:
            return super().all_reduce(output, source, op, timeout_s)
        self.run([Collective(Kind.all_reduce, (source,), (output,), op)], timeout_s, True)
        return None

    def _encoded(self, call: Collective) -> _native.Collective:
        switch = self._switch
        if call.compression is None:
            call = call._replace(compression=self._compression)
        elif switch is not None:
            raise ConfigError(_COMPRESSION_AND_SWITCH)
        encoded = super()._encoded(call)
        if call.kind is Kind.all_reduce and switch is not None:
            (output,) = call.outputs
            if switch.takes(output.dtype, call.op):
                flat = output.detach().view(-1)
                functions = switch.calls(flat, call.op, self._ranks_here)
                encoded.go_through(switch.piece_bytes, *functions)
        return encoded

    # --- what a group says about itself, and its end

    def stats(self) -> PlaneStats:
        native, switch = self.native, self._switch
        shm_s = native.shared_ns * 1e-9
        reason = "no switch is configured" if switch is None else "what the switch does not sum"
        links = (
            LinkStats("shm", "ranks that share a host", native.shared_bytes, shm_s),
            *([] if switch is None else [switch.stats()]),
            LinkStats("tcp", reason, native.sent_bytes, native.waited_ns * 1e-9),
        )
        waiting_s = sum(link.busy_s for link in links)
        return PlaneStats("hosts", native.calls, native.payload_bytes, waiting_s, links)

    def close(self) -> None:
        if self._origin.is_forked:
            return
        with self._closing:
            self.native.close()
            if self._switch is not None:
                self._switch.close()

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
