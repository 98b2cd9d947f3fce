"""Groups whose members change, on every torch; torch 2.15 has the same as private functions."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch.distributed as dist

from torchrelay._members import Configuration
from torchrelay.aggregation._core import Core
from torchrelay.aggregation._group import core_of
from torchrelay.errors import ArgumentError

__all__ = ["Configuration", "get_reconfigure_handle", "reconfigure"]


def get_reconfigure_handle(group: dist.ProcessGroup | None = None) -> str:
    """Return the text that others need to form a group with this rank of ``group``: where it
    listens, and a secret. It stays the same until the group is destroyed.

    Args:
        group: of ``sml``; default: the default group.

    Raises:
        ArgumentError: ``group`` is not one of ``sml``.
        UnavailableError: this rank cannot listen at its address.
        UnsupportedError: ``group`` has other backends too.
    """
    return _core_of(group).get_reconfigure_handle()


def reconfigure(
    group: dist.ProcessGroup | None,
    uuid: int,
    handles: Sequence[str] | Set[str],
    timeout_s: float | None = None,
) -> Configuration:
    """Give ``group`` new members: those with these ``handles``, this rank among them. Collective
    over them; blocks. ``group.rank()`` and ``group.size()`` change.

    The former members need not take part, nor live. Operations of the former group that are in
    progress fail, here and on its other members. If it fails, the group has no members until it
    succeeds with another uuid.

    Args:
        group: of ``sml``; None: the default group.
        uuid: of 64 bits; equal on all members, and used by none of them before.
        handles: a list orders the ranks. Of a set, the ranks of a host follow each other, in the
            same order on all members.
        timeout_s: default: the group's timeout.

    Raises:
        ArgumentError: the uuid was used here before, or a handle is missing, wrong or given twice;
            nothing was changed.
        MismatchError: members have different handles for this uuid, or different keys.
        OperationTimeoutError: members did not come within ``timeout_s``; ``ranks`` names them.
        PeerLostError: members ended or gave up; ``ranks`` names them.
        UnavailableError: this process lacks what it needs, or the group was aborted meanwhile.
    """
    found = _core_of(group)
    return found.form(uuid, handles, found.timeout_s if timeout_s is None else timeout_s)


def _core_of(group: dist.ProcessGroup | None) -> Core:
    found = dist.group.WORLD if group is None else group
    core = core_of(found)
    if core is None:
        raise ArgumentError(f"only groups of sml can be reconfigured, not {found!r}")
    return core
