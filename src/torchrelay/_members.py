"""Groups whose members change: each process is a member, and reconfigures into the next group.

No member is special, and none serves a store: what they tell each other while a group forms goes
over a :class:`Mesh`, of which :class:`MemberRanks` makes the store of the group's ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torchrelay import config, transport
from torchrelay._addresses import address_for_anyone
from torchrelay._communicators import open_group
from torchrelay._group import Collective, Group, Kind
from torchrelay._mesh import Handle, Listener, Mesh
from torchrelay._processes import remedy_of
from torchrelay._ranks import POLL_S
from torchrelay._resource import Resource
from torchrelay._waiting import listed
from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    UnavailableError,
)
from torchrelay.world import Ranks

__all__ = ["Configuration", "Member", "MemberRanks"]

_MAX_MEMBERS = 1024


@dataclass(frozen=True)
class Configuration:
    """A group that has formed.

    Args:
        handles: of the members, by rank.
        former: by rank, the uuid of the configuration from which a member came; None: from none.
        completed: by rank, how many collectives of that one had ended there without an error.
    """

    uuid: int
    rank: int
    handles: tuple[str, ...]
    former: tuple[int | None, ...]
    completed: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.handles)

    @property
    def completed_on_all(self) -> int:
        """How many collectives of the former configuration, in their order, completed on all of
        its members that are in this one. What later ones left in their tensors is undefined.
        """
        mine = self.former[self.rank]
        pairs = zip(self.former, self.completed, strict=True)
        return min(count for uuid, count in pairs if uuid == mine) if mine is not None else 0


class _Board:
    """The values of a mesh below a prefix, with the methods of a store that :class:`Ranks` uses."""

    def __init__(self, mesh: Mesh, prefix: str = "") -> None:
        self.mesh, self._prefix = mesh, prefix

    def under(self, prefix: str) -> _Board:
        return _Board(self.mesh, f"{self._prefix}{prefix}/")

    def set(self, key: str, text: str) -> None:
        self.mesh.announce(self._prefix + key, text)

    def get(self, key: str) -> bytes:
        return self.mesh.values[self._prefix + key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._prefix + key in self.mesh.values for key in keys)

    def has_extended_api(self) -> bool:
        return False


class MemberRanks(Ranks):
    """The ranks of a group that forms of members.

    Args:
        members: by rank.
        uuid: of the reconfiguration.
        timeout_s: of the whole of it, whatever its steps are given.
        check: called often while waiting; raises to stop.
    """

    news_s = 0.2

    def __init__(
        self,
        mesh: Mesh,
        members: Sequence[Handle],
        uuid: int,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        super().__init__(None, mesh.rank, len(members))
        self.store = self._whole = _Board(mesh)
        self.hosts = [member.host for member in members]
        self.secret = mesh.secret
        self.attempt = mesh.secret[-8:].hex()
        self.started_s, self.timeout_s = time.monotonic(), timeout_s
        self._mesh, self._uuid, self._check = mesh, uuid, check

    @property
    def left_s(self) -> float:
        return max(self.started_s + self.timeout_s - time.monotonic(), 0.0)

    def wait(self, step: str, timeout_s: float, *arguments: Any, **waiting: Any) -> list[str]:
        texts = super().wait(step, min(timeout_s, self.left_s), *arguments, **waiting)
        while not self._mesh.is_flushed and self.left_s:
            self._pause(POLL_S)
            self._check_processes(list)
        return texts

    def leave(self, step: str) -> None:
        """Do nothing: no rank serves what the others need."""

    def refuse(self, error: Exception) -> None:
        self._mesh.fail(error)

    def _under(self, prefix: str) -> Any:
        return self.store.under(prefix)

    def _pause(self, longest_s: float) -> None:
        self._mesh.pump(longest_s)

    def _check_processes(self, missing: Callable[[], Sequence[int]]) -> None:
        self._check()
        self._check_trouble()
        if self._mesh.unreachable is not None:
            raise self._mesh.unreachable
        lost = [self.names[i] for i in missing() if self._mesh.is_lost(self.names[i])]
        if lost:
            raise PeerLostError(
                f"{self._about(lost)} has ended or left; look at its own output", lost
            )

    def _check_trouble(self) -> None:
        if self._mesh.failure is None:
            return
        rank, error = self._mesh.failure
        text = f"{self.name}, reconfiguration {self._uuid}: rank {rank} gave up: {error}"
        if isinstance(error, MismatchError):
            raise MismatchError(text)
        is_late = isinstance(error, OperationTimeoutError)
        kind = OperationTimeoutError if is_late else PeerLostError
        raise kind(text, getattr(error, "ranks", ()) or (rank,))

    def _late(self, names: Sequence[int], elapsed_s: float, call: str = "", hint: str = "") -> str:
        return f"{self._about(names)} did not come within {elapsed_s:.1f} s"

    def _about(self, names: Sequence[int]) -> str:
        places = "; ".join(self._mesh.describe(name) for name in names)
        ranks = listed("rank", names)
        return f"{self.name}, reconfiguration {self._uuid}: {ranks} ({places})"


def _open(ranks: MemberRanks, address: str, timeout_s: float) -> Group:
    settings, sockets = config.load(config.Aggregation), config.load(config.TransportSettings)
    return open_group(ranks, ranks.hosts, sockets, address, timeout_s, settings)


class Member(Resource):
    """This process as a member of groups whose members change; of one group at a time.

    It listens at one address for as long as it lives. Thread-safe; calls of :meth:`reconfigure`
    take turns.

    Args:
        address: of this host, at which other hosts reach it. Default: that of
            ``TORCHRELAY_TRANSPORT_INTERFACE`` or ``GLOO_SOCKET_IFNAME``, else of the default
            route, else loopback.
        open_ranks: makes the group of ranks on their hosts, given an address of this one and a
            timeout.

    Attributes:
        handle: text that others need to form a group with this member. It has a secret: pass it to
            members of the job only.
        group: of the current configuration. None, as ``configuration``, before the first one, if
            the last reconfiguration failed, and after :meth:`abort`.

    Raises:
        UnavailableError: the address is not one of this host.
        ConfigError: the key is invalid.
    """

    def __init__(
        self,
        address: str = "",
        open_ranks: Callable[[MemberRanks, str, float], Group] = _open,
    ) -> None:
        sockets = config.load(config.TransportSettings)
        key = transport.read_key(sockets)
        self._address = address or address_for_anyone(sockets.interface)
        try:
            self._listener = Listener(self._address, key, transport.key_name(key))
        except OSError as error:
            raise UnavailableError(
                f"listening at {self._address}: {error}; {remedy_of(error)}"
            ) from error
        self._open = open_ranks
        self.handle = self._listener.handle.text
        self.group: Group | None = None
        self.configuration: Configuration | None = None
        self._turn, self._state = threading.Lock(), threading.Lock()
        self._aborts, self._is_closed = 0, False
        self._uuid: int | None = None  # of the current group, once it has formed
        self._former: tuple[int | None, int] = (None, 0)  # of the last that had: uuid, completed

    def adopt(self, group: Group, uuid: int) -> None:
        """Take a group that was made otherwise as the current one, under a name that its members
        agree on.
        """
        self.group, self._uuid = group, uuid

    def reconfigure(
        self, uuid: int, handles: Sequence[str] | Set[str], timeout_s: float
    ) -> Configuration:
        """Leave the current group, and form a new one of the members with these ``handles``, which
        include this one. Collective over them; blocks. Alone, it waits for nobody.

        Args:
            uuid: of 64 bits; equal on all, and used by none of them before, also not in an attempt
                that failed.
            handles: a list orders the ranks. Of a set, the ranks of a host follow each other, in
                the same order on all.

        Raises:
            ArgumentError: the uuid was used here before, or the handles are not as said above;
                nothing was changed.
            MismatchError: members have different handles for this uuid, or another key.
            OperationTimeoutError: members did not come within ``timeout_s``; ``ranks`` names them.
            PeerLostError: members ended or gave up; ``ranks`` names them. If one ends at the very
                end, it may be that others succeed; their first collective then raises.
            UnavailableError: this process lacks what it needs, or :meth:`abort` was called.
        """
        with self._turn:
            members = self._ordered(uuid, handles)
            self._listener.used.add(uuid)
            with self._state:
                self._drop()
                aborts = self._aborts
                if self._is_closed:
                    raise UnavailableError(f"reconfiguration {uuid}: this member was closed")

            def check() -> None:
                if self._aborts != aborts:
                    raise UnavailableError(f"reconfiguration {uuid} was aborted in this process")

            with contextlib.closing(self._mesh(members, uuid)) as mesh:
                ranks = MemberRanks(mesh, members, uuid, timeout_s, check)
                try:
                    with ranks.joining():
                        records = ranks.gather("former", self._former, timeout_s)
                        group = self._open(ranks, self._address, timeout_s)
                        with self._state:
                            self.group = group
                        check()
                        group.run([Collective(Kind.barrier)], ranks.left_s, True)
                except BaseException as error:
                    mesh.fail(error)
                    with self._state:
                        self._drop()
                    raise
            group.start_counting()
            former, completed = zip(*records, strict=True)
            texts = tuple(member.text for member in members)
            with self._state:
                check()
                self._uuid = uuid
                self.configuration = Configuration(uuid, mesh.rank, texts, former, completed)
                return self.configuration

    def abort(self) -> None:
        """Leave the current group: its collectives in progress fail. Any thread may call it; a
        :meth:`reconfigure` in progress raises, a later one recovers.
        """
        with self._state:
            self._aborts += 1
            self._drop()

    def close(self) -> None:
        """Leave the current group, and listen no more. Idempotent."""
        self._is_closed = True
        self.abort()
        with self._turn:
            self._listener.close()

    def _mesh(self, members: Sequence[Handle], uuid: int) -> Mesh:
        try:
            return Mesh(self._listener, members, uuid)
        except OSError as error:
            text = f"reconfiguration {uuid}: {error}; {remedy_of(error)}"
            raise UnavailableError(text) from error

    def _drop(self) -> None:
        group, self.group, self.configuration = self.group, None, None
        if group is not None:
            if self._uuid is not None:
                self._former = self._uuid, group.completed
            group.close()
        self._uuid = None

    def _ordered(self, uuid: int, handles: Sequence[str] | Set[str]) -> list[Handle]:
        """Return the members by rank."""
        if type(uuid) is not int or not -(1 << 63) <= uuid < 1 << 63:
            raise ArgumentError(f"reconfigure: the uuid {uuid!r} is no integer of 64 bits")
        if uuid in self._listener.used:
            raise ArgumentError(
                f"reconfigure: uuid {uuid} was already used by this member; pass a fresh one"
            )
        if isinstance(handles, str) or not 0 < len(handles) <= _MAX_MEMBERS:
            raise ArgumentError(
                f"reconfigure: handles must be a list or set of 1 to {_MAX_MEMBERS} handles"
            )
        members = [Handle.parse(text) for text in handles]
        if isinstance(handles, Set):
            members.sort(key=lambda member: (member.host, member.member))
        if len({member.member for member in members}) < len(members):
            raise ArgumentError("reconfigure: a handle is given twice")
        if self._listener.handle not in members:
            raise ArgumentError("reconfigure: this member's own handle is not among the handles")
        return members
