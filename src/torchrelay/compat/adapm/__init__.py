"""AdaPM's Python bindings on :mod:`torchrelay.parameters`: ``import torchrelay.compat.adapm as adapm``.

Its names and their meaning, with these differences: what is wrong raises a typed error instead of ending the
process; ``scheduler`` is needed only with the original's ``DMLC_*`` variables, not under torchrun.
"""

from __future__ import annotations

import dataclasses
import os
import time
from datetime import timedelta
from typing import Any

import torch

from torchrelay import config
from torchrelay.errors import ArgumentError, ConfigError
from torchrelay.parameters import Server as _Server
from torchrelay.parameters import Worker
from torchrelay.parameters.topology import TECHNIQUES, Topology, dmlc_variables, of_servers

__all__ = ["Server", "Worker", "scheduler", "setup"]

_SHUT_DOWN = "torchrelay/parameters/shut_down"
_POLL_S = 0.05


class _Setup:
    """What ``setup`` has set for this process."""

    num_keys: int = 0
    topology: Topology | None = None


def setup(num_keys: int, num_threads: int, use_techniques: str = "", num_channels: int = -1) -> None:
    """Joins this process as a node with ``num_threads`` workers; before any ``Server``.

    Args:
        use_techniques: ``all`` (or empty), ``replication_only`` or ``relocation_only``.
        num_channels: threads that serve other nodes; -1: the setting ``parameters.num_channels``.

    Raises:
        ArgumentError: a number or name is wrong.
        ConfigError: the environment does not say who is who.
    """
    techniques = use_techniques or "all"
    if techniques not in TECHNIQUES:
        raise ArgumentError(f"use_techniques={techniques!r}: the choices are {', '.join(TECHNIQUES)}")
    if num_keys < 1 or num_threads < 1 or num_channels == 0 or num_channels < -1:
        raise ArgumentError(
            f"setup({num_keys} keys, {num_threads} threads, {num_channels} channels): all must be positive"
        )
    if os.environ.get("DMLC_ROLE", "server") == "scheduler":
        raise ConfigError("DMLC_ROLE=scheduler: this process must call scheduler(), not setup()")
    settings = config.load(config.Parameters)
    if num_channels > 0:
        settings = dataclasses.replace(settings, num_channels=num_channels)  # type: ignore[type-var]
    _Setup.num_keys = num_keys
    _Setup.topology = of_servers(num_threads, techniques, settings)


def scheduler(num_keys: int, num_threads: int) -> None:
    """Serves the address where nodes meet, ``DMLC_PS_ROOT_URI``:``DMLC_PS_ROOT_PORT``, until all have shut down."""
    import torch.distributed as dist  # noqa: PLC0415

    num_nodes, address, port = dmlc_variables()
    timeout = timedelta(seconds=config.load(config.Parameters).timeout_s)
    store = dist.TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    while store.add(_SHUT_DOWN, 0) < num_nodes:
        time.sleep(_POLL_S)


class Server(_Server):
    """A node's part of the table of ``setup``'s keys.

    Args:
        lengths: the length of all values, or a tensor with one length per key.
    """

    def __init__(self, lengths: int | torch.Tensor) -> None:
        if _Setup.topology is None:
            raise ArgumentError("call setup() before making a Server")
        if isinstance(lengths, int):
            super().__init__(_Setup.num_keys, length=lengths, topology=_Setup.topology)
        elif len(lengths) == _Setup.num_keys:
            super().__init__(lengths, topology=_Setup.topology)
        else:
            raise ArgumentError(
                f"{len(lengths)} lengths for the {_Setup.num_keys} keys that setup() was told of"
            )

    def shutdown(self) -> None:
        """Waits for all nodes, then stops."""
        if self._down:
            return
        super().shutdown()
        store: Any = self.topology.store
        if "DMLC_NUM_SERVER" in os.environ and store is not None:
            store.add(_SHUT_DOWN, 1)
