"""AdaPM's Python bindings over :mod:`torchrelay.parameters`.

``import torchrelay.compat.adapm as adapm``. Differences: errors are typed exceptions instead of the
end of the process, and ``scheduler`` is needed only with the original's ``DMLC_*`` variables, not
under torchrun. Arguments may have the original's or TorchRelay's names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchrelay import config
from torchrelay._waiting import duration
from torchrelay.errors import ArgumentError, ConfigError, PeerLostError, TorchRelayError
from torchrelay.parameters._server import Server as _Server
from torchrelay.parameters._topology import TECHNIQUES, Topology, topology_of
from torchrelay.parameters._worker import AccessHandle
from torchrelay.parameters._worker import Worker as _Worker
from torchrelay.world import Ranks, World

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Server", "Worker", "scheduler", "setup"]

_SHUT_DOWN = "torchrelay/parameters/shut_down"
_LOST = "torchrelay/parameters/lost"
_POLL_S = 0.05
_LEAVING_S = 10.0  # after the loss of a node, the others have this long to leave


class _Setup:
    """What ``setup`` has set for this process."""

    num_keys: int = 0
    topology: Topology | None = None


def setup(
    num_keys: int, num_threads: int, use_techniques: str = "", num_channels: int = -1
) -> None:
    """Join the job as a node with ``num_threads`` workers; call it before any ``Server``.

    Args:
        use_techniques: ``all`` (or empty), ``replication_only`` or ``relocation_only``.
        num_channels: threads that serve other nodes; -1: the setting ``parameters.num_channels``.

    Raises:
        ArgumentError: a number or name is invalid.
        ConfigError: the environment does not describe the job.
    """
    techniques = use_techniques or "all"
    if techniques not in TECHNIQUES:
        raise ArgumentError(
            f"use_techniques={techniques!r}: the choices are {', '.join(TECHNIQUES)}"
        )
    if num_keys < 1 or num_threads < 1 or num_channels == 0 or num_channels < -1:
        raise ArgumentError(
            f"setup({num_keys} keys, {num_threads} threads, {num_channels} channels): all must be "
            "positive"
        )
    if os.environ.get("DMLC_ROLE", "server") == "scheduler":
        raise ConfigError("DMLC_ROLE=scheduler: this process must call scheduler(), not setup()")
    settings = config.load(config.Parameters)
    if num_channels > 0:
        settings = dataclasses.replace(settings, num_channels=num_channels)
    _Setup.num_keys = num_keys
    _Setup.topology = _topology_of_servers(num_threads, techniques, settings)


def scheduler(num_keys: int, num_threads: int) -> None:
    """Serve the rendezvous at ``DMLC_PS_ROOT_URI``:``DMLC_PS_ROOT_PORT``.

    Blocks until all nodes have shut down all their servers.

    Raises:
        PeerLostError: a node was lost.
    """
    import torch.distributed as dist  # noqa: PLC0415

    num_nodes, address, port = _dmlc_variables()
    timeout = duration(config.load(config.Parameters).timeout_s)
    store = dist.TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False)
    give_up_s = math.inf
    while store.add(_SHUT_DOWN, 0) < num_nodes and time.monotonic() < give_up_s:
        if give_up_s == math.inf and store.check([_LOST]):
            give_up_s = time.monotonic() + _LEAVING_S
        time.sleep(_POLL_S)
    if store.check([_LOST]):
        raise PeerLostError(store.get(_LOST).decode())


def _topology_of_servers(
    num_threads: int, techniques: str, settings: config.Parameters
) -> Topology:
    """Return the topology of the original's variables (``DMLC_*``), else of a launcher.

    Each process is a node.

    Raises:
        ConfigError: a variable is missing or not a number.
    """
    import torch.distributed as dist  # noqa: PLC0415

    if "DMLC_NUM_SERVER" in os.environ:
        size, address, port = _dmlc_variables()
        timeout = duration(settings.timeout_s)
        store: Store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        rank = store.add("torchrelay/parameters/arrived", 1) - 1
        if rank >= size:
            raise ConfigError(f"DMLC_NUM_SERVER={size}, but this is server number {rank + 1}")
    else:
        world = World.from_environment()
        rank, size, address = world.rank, world.size, world.master_addr
        store = world.connect(settings.timeout_s)
    return topology_of(
        Ranks(store, rank, size),
        address,
        node_of_rank=lambda rank: rank,
        workers_per_process=num_threads,
        techniques=techniques,
        settings=settings,
    )


def _dmlc_variables() -> tuple[int, str, int]:
    """Return number of nodes, and address and port of the scheduler, from ``DMLC_*``."""
    values = []
    for name in ("DMLC_NUM_SERVER", "DMLC_PS_ROOT_PORT"):
        text = os.environ.get(name, "")
        if not text.isdigit():
            raise ConfigError(
                f"{name}={text!r}: it must be a whole number, the same for all processes"
            )
        values.append(int(text))
    return values[0], os.environ.get("DMLC_PS_ROOT_URI", "127.0.0.1"), values[1]


# AdaPM's names of arguments, and TorchRelay's. ``async`` is a reserved keyword: it is the last
# positional argument, ``asynchronous``, or in a dictionary.
_NAMES = {"lengths": "value_lengths", "vals": "values", "K": "n", "id": "sample_id"}
_NAMES |= {"key_id": "key"} | dict.fromkeys(("async", "async_", "asynchronous"), "async_op")


def _with_names(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method`` with arguments accepted under both names."""

    @functools.wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        ours = {_NAMES.get(name, name): value for name, value in given.items()}
        if len(ours) < len(given):
            raise TypeError(
                f"{method.__name__}() got one argument under two names: {', '.join(given)}"
            )
        return method(*args, **ours)

    return call


def _whole(lengths: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor:
    """Cast lengths given as floats, such as those of ``torch.ones(n) * 10``, to int64.

    Raises:
        ArgumentError: one is not finite or not at least 1.
    """
    if isinstance(lengths, np.ndarray):
        lengths = torch.from_numpy(lengths)
    if not lengths.is_floating_point():
        return lengths
    misfits = lengths[~(lengths.isfinite() & (lengths >= 1))]
    if len(misfits):
        raise ArgumentError(
            f"lengths must be at least 1 and finite, but one is {float(misfits[0])}"
        )
    return lengths.to(torch.int64)


class Server(_Server):
    """A node's part of the table of ``setup``'s keys.

    Args:
        value_lengths: the length of all values, or an array with one length per key; floats are
            cast.
    """

    def __init__(self, value_lengths: int | torch.Tensor | np.ndarray[Any, Any]) -> None:
        if _Setup.topology is None:
            raise ArgumentError("call setup() before making a Server")
        if isinstance(value_lengths, int | np.integer):
            super().__init__(_Setup.num_keys, length=int(value_lengths), topology=_Setup.topology)
        elif len(value_lengths) == _Setup.num_keys:
            super().__init__(_whole(value_lengths), topology=_Setup.topology)
        else:
            raise ArgumentError(
                f"{len(value_lengths)} lengths for the {_Setup.num_keys} keys given to setup()"
            )
        _open.add(self)

    __init__ = _with_names(__init__)

    def my_rank(self) -> int:
        """Return the index of this node."""
        return self.node

    def shutdown(self) -> None:
        """Wait for all nodes, then stop."""
        self.close()

    def close(self) -> None:
        """Wait for all nodes, then stop."""
        if not self._down:
            try:
                super().close()
            finally:
                self._report_end(None)

    def abort(self) -> None:
        """Leave at once; the other nodes raise PeerLostError."""
        if not self._down:
            super().abort()
            self._report_end(f"node {self.node} has left with an error; see its own output for why")

    def _report_end(self, problem: str | None) -> None:
        """Let the scheduler end: it waits for all nodes, and names one that is lost."""
        store = self.topology.ranks.store
        if self._origin.is_forked or "DMLC_NUM_SERVER" not in os.environ or store is None:
            return
        _open.discard(self)
        try:
            self.store.check_leader()
        except PeerLostError as lost:
            problem = str(lost)
        except TorchRelayError:
            pass  # it has been shut down
        with contextlib.suppress(RuntimeError):  # the scheduler has ended
            if problem is not None:
                store.set(_LOST, problem)
            if not any(other.topology is self.topology for other in _open):
                store.add(_SHUT_DOWN, 1)


_open: weakref.WeakSet[Server] = weakref.WeakSet()  # made, and not shut down


def _with_timestamp(method: Callable[..., Any]) -> Callable[..., int]:
    """Return ``method`` with AdaPM's result: a timestamp, -1 if it is done."""
    named = _with_names(method)

    @functools.wraps(method)
    def call(*args: Any, **given: Any) -> int:
        handle: AccessHandle | None = named(*args, **given)
        return -1 if handle is None else handle.timestamp

    return call


class Worker(_Worker):
    """One worker's access to the table."""

    pull = _with_timestamp(_Worker.pull)  # type: ignore[assignment]
    push = _with_timestamp(_Worker.push)  # type: ignore[assignment]
    set = _with_timestamp(_Worker.set)  # type: ignore[assignment]
    pull_if_local = _with_names(_Worker.pull_if_local)
    prepare_sample = _with_names(_Worker.prepare_sample)
    pull_sample = _with_timestamp(_Worker.pull_sample)  # type: ignore[assignment]
    finish_sample = _with_names(_Worker.finish_sample)
    get_key_size = _with_names(_Worker.get_key_size)
    wait = _Worker.wait_for
    is_finished = _Worker.has_finished
    waitall = _Worker.wait_all

    def intent(self, keys: Any, start: int, end: int = 0) -> int:  # type: ignore[override]
        """Announce accesses; return -1, for which :meth:`wait` does not block."""
        super().intent(keys, start, end)
        return -1

    def begin_setup(self) -> None:
        """Start to set initial values. All workers call it."""
        self.barrier()

    def end_setup(self) -> None:
        """End the setup: every worker sees what any has set. All workers call it."""
        self.wait_all()
        self.wait_sync()
        self.barrier()

    def finalize(self) -> None:
        """Complete unfinished operations and end the intents of this worker."""
        self.close()

    def wait_replica_sync(self) -> None:
        """Wait until every node sees this node's earlier pushes; the same as ``wait_sync``."""
        self.wait_sync()
