"""``sml``: a torch.distributed backend that sums gradients in the network or in shared memory.

torch registers the backend when it is imported::

    dist.init_process_group(backend="sml")   # under torchrun; also new_group(backend="sml")

It follows "Scaling Distributed Machine Learning with In-Network Aggregation" (Sapio et al., NSDI
2021). Ranks of one host communicate through a shared segment; hosts over TCP and, if one is
configured, through an aggregation switch. It supports all collectives, dtypes and reductions of
c10d, with timeouts and errors that name the ranks concerned.

Public: :func:`all_reduce_`, :class:`Options`, :func:`stats`, :class:`PlaneStats`,
:class:`LinkStats`, :class:`SmlGroup`, :func:`register`.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchrelay import _autoload, _telemetry
from torchrelay._torch import backends_asked, route_group_operators, watched
from torchrelay.aggregation._dummy import DummyPlane
from torchrelay.aggregation._group import LIVING, SmlGroup
from torchrelay.aggregation._native_planes import HostsPlane, ShmPlane
from torchrelay.aggregation._options import Options, resolve
from torchrelay.aggregation._plane import LinkStats, Plane, PlaneStats
from torchrelay.config import Aggregation
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    UnavailableError,
    UnsupportedError,
)
from torchrelay.world import Meeting, Process, World

__all__ = ["LinkStats", "Options", "PlaneStats", "SmlGroup", "all_reduce_", "register", "stats"]

_is_compiling = torch.compiler.is_compiling


def register() -> None:
    """Register ``sml`` with torch.distributed. Importing this module does so, and so does torch by
    its entry point, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
    """
    _autoload.register_now()


@torch.library.custom_op("torchrelay::all_reduce_", mutates_args=("tensor",))
def _all_reduce(tensor: torch.Tensor, name: str) -> None:
    groups = [group for group in list(LIVING) if group.group_name == name and not group.is_closed]
    if not groups:
        raise ArgumentError(f"all_reduce_: this process has no group {name!r} of sml")
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    groups[0].allreduce([tensor], opts).wait()


@_all_reduce.register_fake
def _(tensor: torch.Tensor, name: str) -> None:
    pass


def all_reduce_(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Replace ``tensor`` by its sum over the ranks of ``group``; blocks. Returns ``tensor``.

    The same sum as ``dist.all_reduce``, with less time per call: it bypasses c10d. Under
    ``torch.compile`` it is one operator of the graph.

    Args:
        tensor: of the same shape and dtype on all ranks; autograd does not record the sum.
        group: of ``sml``; default: the default group.

    Raises:
        ArgumentError: ``tensor`` requires a gradient that is being recorded, or ``group`` is not
            one of ``sml``; on this rank.
        MismatchError: the ranks' calls differ.
        OperationTimeoutError, PeerLostError: as of every collective.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, SmlGroup):
        raise ArgumentError(f"all_reduce_: it needs a group of sml, not {found!r}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "all_reduce_: autograd cannot record it, and the tensor requires a gradient; call it "
            "under torch.no_grad(), or on tensor.detach()"
        )
    if (
        _is_compiling()
        or watched()
        or found.host is None
        or found.host.sum_now(tensor, tensor) is None
    ):
        _all_reduce(tensor, found.group_name)
    return tensor


def stats() -> dict[str, PlaneStats]:
    """Return the statistics of this process's existing groups, added up for each data plane."""
    totals: dict[str, PlaneStats] = {}
    for group in list(LIVING):
        mine = group.stats()
        totals[mine.plane] = totals.get(mine.plane, PlaneStats(mine.plane, 0, 0, 0.0)) + mine
    return totals


def _samples() -> Iterator[_telemetry.MetricSample]:
    def sample(name: str, meaning: str, value: float, **labels: str) -> _telemetry.MetricSample:
        return _telemetry.MetricSample(f"aggregation_{name}", meaning, "counter", value, labels)

    for name, of in stats().items():
        yield sample("collectives", "Collectives that were run", of.jobs, plane=name)
        yield sample("payload_bytes", "Bytes of their tensors", of.payload_bytes, plane=name)
        waiting = "Time in which they waited for others"
        yield sample("waiting_seconds", waiting, of.waiting_s, plane=name)
        for link in of.links:
            where = {"plane": name, "transport": link.transport}
            yield sample("sent_bytes", "Bytes that this rank sent", link.sent_bytes, **where)
            busy = "Time of collectives in a transport"
            yield sample("busy_seconds", busy, link.busy_s, **where)


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
    settings = resolve(options)
    plane: Plane
    processes: dict[int, Process] = {}
    if settings.plane == "dummy":
        plane = DummyPlane(rank, size, settings)
    else:
        # c10d may give one store to groups that different ranks make at the same time:
        # new_subgroups(group=...).
        digest = hashlib.blake2b(str(names).encode(), digest_size=8).hexdigest()
        store = dist.PrefixStore(f"ranks/{digest}", given.store)
        known = {name: found for group in list(LIVING) for name, found in group.processes.items()}
        with _telemetry.event("aggregation", "create_group", f"{size} ranks"):
            meeting = Meeting(store, rank, size, timeout_s, names, known)
            with meeting.joining():
                route_group_operators(SmlGroup)  # which imports, and needs a descriptor for it
                plane = _plane_of(meeting, given.store, timeout_s, settings)
        processes = dict(zip(names, meeting.processes, strict=True))
    return SmlGroup(plane, given.store, rank, size, timeout_s, processes, own, others)


def _plane_of(meeting: Meeting, store: Any, timeout_s: float, settings: Aggregation) -> Plane:
    """Return the data plane: shared memory on one host; with TCP and a switch on several."""
    if len({process.host for process in meeting.processes}) == 1:
        return ShmPlane(meeting, timeout_s, settings)
    if settings.plane == "shm":
        raise UnavailableError(
            "sml: plane = shm, but the ranks of this group are not all on one host, in one process "
            "namespace and of one user; leave the plane at auto"
        )
    return HostsPlane(meeting, store, timeout_s, settings)


def _close_all() -> None:
    """Shut all groups down: native threads must end before the interpreter."""
    for group in list(LIVING):
        group.shutdown()


register()
_telemetry.publish(_samples)
atexit.register(_close_all)


def __dir__() -> list[str]:
    return [*__all__, "switch"]
