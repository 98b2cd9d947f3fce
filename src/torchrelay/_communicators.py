"""How a group is opened: shared memory within a host, TCP between hosts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from torchrelay import _native, transport
from torchrelay._addresses import listen_at
from torchrelay._group import Group
from torchrelay.config import Aggregation, TransportSettings
from torchrelay.world import Ranks

__all__ = ["hosts_of", "open_between", "open_group", "open_local"]

_LINE_BYTES = 64  # two ranks do not write to one cache line
_SLOT_BYTES = 512 * 1024  # of each rank's staging buffer; larger messages go in pieces
_ONE_SHOT_BYTES = 64 * 1024  # which a rank reads of the others at most where a sum takes one step
# Of a message between hosts: while one piece is sent, the next is summed in shared memory.
_CHUNK_BYTES = 1 << 20
_INLINE_BYTES = 256
_MAILBOX_BYTES = 128 * 1024  # between each pair of ranks, for messages
_YIELD_S = 200e-6  # how long a rank polls and yields after it has spun, if ranks outnumber cores


def hosts_of(identities: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in order; the hosts in the order of their lowest ranks.

    Args:
        identities: of each rank's host.
    """
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return tuple(map(tuple, hosts.values()))


def open_local(ranks: Ranks, timeout_s: float, settings: Aggregation) -> _native.Group:
    """Return the native group of ranks that all run on this host. Collective.

    The first rank creates the segment, the others attach it by its address in the store, and all
    wait for each other.

    Raises:
        OperationTimeoutError: a rank did not join within ``timeout_s``.
        PeerLostError: a rank died before it joined.
        SegmentError: the segment cannot be created or attached.
    """
    if ranks.rank == 0:
        memory = _native.Group.create_segment(
            ranks.size, _SLOT_BYTES, _ONE_SHOT_BYTES, _MAILBOX_BYTES
        )
        ranks.announce("segment", memory.address)
    else:
        (address,) = ranks.wait("segment", timeout_s, [0])
        memory = _native.SharedMemory.attach(address, False)
    group = _native.Group(
        memory,
        ranks.rank,
        ranks.names,
        spin_s=settings.spin_us * 1e-6,
        yield_s=_YIELD_S,
    )
    try:
        ranks.announce("joined")
        ranks.wait("joined", timeout_s)  # from here on the native core detects deaths
        group.join(timeout_s)
    except BaseException:
        group.close()
        raise
    return group


def open_between(
    ranks: Ranks,
    hosts: Sequence[Sequence[int]],
    group: _native.Group,
    sockets: TransportSettings,
    address: str,
    timeout_s: float,
    *,
    inline_bytes: int = _INLINE_BYTES,
    on_failure: Callable[[], None] = lambda: None,
    agreed: Mapping[str, str] | None = None,
) -> None:
    """Connect ``group``, of the ranks of this host, to those of the others. Collective.

    Args:
        address: at which the other hosts reach this one.
        inline_bytes: of the payload in each rank's record; see ``host_collectives.h``.
        on_failure: called once if the group breaks, in any thread.
        agreed: what else must be equal on all ranks, described for messages.

    Raises:
        MismatchError: the ranks have different keys, or did not agree; on every rank.
        OperationTimeoutError: a rank did not join within ``timeout_s``.
        UnavailableError: there is a key, but no libssl.
    """
    key = transport.read_key(sockets)
    encryption = transport.encryption(key)
    share_bytes = min(_CHUNK_BYTES, _SLOT_BYTES // max(map(len, hosts)))
    mine = {f"the key ({transport.KEY_VARIABLES})": transport.key_name(key), **(agreed or {})}
    ranks.agree("settings", mine, timeout_s, "groups")
    with listen_at(address) as listener:
        token = "" if ranks.secret else secrets.token_hex(transport.TOKEN_BYTES)
        about = {"address": listener.getsockname()[:2], "token": token}
        abouts = ranks.gather("hosts", about, timeout_s)

        group.connect(
            ranks.rank,
            ranks.names,
            [(each["address"][0], each["address"][1]) for each in abouts],
            hosts,
            listener.detach(),
            ranks.secret[: transport.TOKEN_BYTES] or bytes.fromhex(abouts[0]["token"]),
            encryption,
            max(share_bytes // _LINE_BYTES * _LINE_BYTES, _LINE_BYTES),
            _CHUNK_BYTES,
            inline_bytes,
            lambda _: on_failure(),
        )
    ranks.announce("opened")  # one that lacks descriptors or threads says so here
    ranks.wait("opened", timeout_s)


def open_group(
    ranks: Ranks,
    identities: Sequence[str],
    sockets: TransportSettings,
    address: str,
    timeout_s: float,
    settings: Aggregation,
) -> Group:
    """Return the group of ``ranks``, whose hosts have these ``identities``. Collective.

    Arguments and errors as for :func:`open_local` and :func:`open_between`.
    """
    hosts = hosts_of(identities)
    here = next(each for each in hosts if ranks.rank in each)
    with ranks.joining():
        group = open_local(ranks.among(here), timeout_s, settings)
        try:
            if len(hosts) > 1:
                open_between(ranks, hosts, group, sockets, address, timeout_s)
        except BaseException:
            group.close()
            raise
    return Group(group)
