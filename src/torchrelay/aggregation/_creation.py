"""How a group of ``sml`` is made, for torch, which finds this module by ``_autoload``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchrelay import _telemetry, config
from torchrelay._addresses import address_for_anyone, address_for_peers
from torchrelay._communicators import hosts_of
from torchrelay._group import Group
from torchrelay._members import Member
from torchrelay._torch import backends_asked, store_host
from torchrelay.aggregation._dummy import DummyPlane
from torchrelay.aggregation._group import LIVING, SmlBackend, SmlGroup, group_of
from torchrelay.aggregation._native_planes import HostsPlane, ShmPlane
from torchrelay.aggregation._options import Options, resolve
from torchrelay.aggregation._plane import NoPlane, Plane
from torchrelay.config import Aggregation
from torchrelay.errors import ConfigError, UnavailableError, UnsupportedError
from torchrelay.world import Meeting, Process, Ranks, World

__all__ = ["create_group", "meet"]


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return store, rank and size of a group that was made without the variables of torchrun.

    Raises:
        ConfigError: only some of the variables are set; as :class:`World` does.
    """
    world = World.from_environment()
    if world.launcher == "none" and "MASTER_ADDR" in os.environ:
        raise ConfigError(
            "sml: MASTER_ADDR is set, but RANK and WORLD_SIZE are not: start the ranks with "
            "torchrun, or unset MASTER_ADDR for a group of one process"
        )
    return world.connect(timeout.total_seconds()), world.rank, world.size


def create_group(given: Any, options: Options | None = None) -> SmlGroup:
    """Create a group; called by c10d."""
    rank, size = given.group_rank, given.group_size
    timeout_s = given.timeout.total_seconds()
    names = list(given.global_ranks_in_group) or list(range(size))
    devices, others = backends_asked() or (dict.fromkeys(("cpu", "cuda"), "sml"), None)
    in_order = sorted(devices.items(), key=lambda device: device[1] == "sml")
    if in_order != list(devices.items()):  # c10d stops at the first that is a ProcessGroup
        text = ",".join(":".join(device) for device in in_order)
        raise UnsupportedError(f"sml: in a group with other backends, name sml last: {text!r}")
    own = [device for device, backend in in_order if backend == "sml"]
    if len(own) < len(devices) and not isinstance(options, Options):
        options = None  # c10d gives all backends the same
    is_empty = getattr(given, "enable_reconfigure", False)  # since torch 2.15
    settings = resolve(options)
    return group_of(
        _new_core(given.store, rank, size, timeout_s, names, own, others, settings, is_empty), given
    )


def _new_core(
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    names: Sequence[int],
    devices: Sequence[str],
    others: dist.ProcessGroup | None,
    settings: Aggregation,
    is_empty: bool = False,
) -> SmlBackend:
    """Return this rank's part in a group, which has no members yet if ``is_empty``. Collective."""
    plane: Plane
    processes: dict[int, Process] = {}
    interface, host = config.load(config.TransportSettings).interface, store_host(store)

    def new_member() -> Member:
        """Return what this rank is in groups that it forms by ``reconfigure``."""
        if settings.plane == "dummy":
            raise UnsupportedError("sml: a group whose plane is dummy cannot be reconfigured")
        member = Member(
            address_for_anyone(interface, host),
            lambda ranks, address, timeout_s: _plane_of(
                ranks, ranks.hosts, lambda: address, timeout_s, settings
            ),
        )
        if isinstance(plane, Group):
            member.adopt(plane, int(meeting.attempt, 16))
        return member

    def split_off(
        core: SmlBackend, ranks: Sequence[int], store: dist.Store, timeout_s: float
    ) -> SmlBackend:
        # The members of a group that was formed again have no other names than their ranks.
        chosen = [names[rank] for rank in ranks] if core.processes else list(ranks)
        place = ranks.index(core.rank())
        return _new_core(store, place, len(ranks), timeout_s, chosen, devices, None, settings)

    if is_empty:
        plane = NoPlane("was made to be reconfigured, which has not been done")
    elif settings.plane == "dummy":
        plane = DummyPlane(rank, size, settings)
    else:
        # c10d may give one store to groups that different ranks make at the same time:
        # new_subgroups(group=...).
        digest = hashlib.blake2b(str(names).encode(), digest_size=8).hexdigest()
        known = {name: found for group in list(LIVING) for name, found in group.processes.items()}
        with _telemetry.event("aggregation", "create_group", f"{size} ranks"):
            meeting = Meeting(
                dist.PrefixStore(f"ranks/{digest}", store), rank, size, timeout_s, names, known
            )
            with meeting.joining():
                plane = _plane_of(
                    meeting,
                    [process.host for process in meeting.processes],
                    lambda: address_for_peers(
                        lambda step, mine: meeting.gather(step, mine, timeout_s),
                        f"sml, {meeting.name}",
                        host,
                        interface,
                    ),
                    timeout_s,
                    settings,
                )
        processes = dict(zip(names, meeting.processes, strict=True))
    return SmlBackend(
        plane, store, rank, size, timeout_s, processes, devices, others, new_member, split_off
    )


def _plane_of(
    ranks: Ranks,
    identities: Sequence[str],
    address: Callable[[], str],
    timeout_s: float,
    settings: Aggregation,
) -> ShmPlane | HostsPlane:
    """Return the data plane: shared memory on one host; with TCP and a switch on several.

    Args:
        identities: of each rank's host.
        address: finds where other hosts reach this one; collective.
    """
    hosts = hosts_of(identities)
    if len(hosts) == 1:
        return ShmPlane(ranks, timeout_s, settings)
    if settings.plane == "shm":
        raise UnavailableError(
            "sml: plane = shm, but the ranks of this group are not all on one host, in one process "
            "namespace and of one user; leave the plane at auto"
        )
    return HostsPlane(ranks, hosts, address(), timeout_s, settings)
