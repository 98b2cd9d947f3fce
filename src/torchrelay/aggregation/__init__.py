"""``sml``: a torch.distributed backend that sums gradients in the network or in shared memory.

Importing this module registers the backend::

    import torchrelay.aggregation
    dist.init_process_group(backend="sml")   # under torchrun; also new_group(backend="sml")

It follows "Scaling Distributed Machine Learning with In-Network Aggregation" (Sapio et al., NSDI 2021). Ranks of
one host meet in a shared segment; all collectives, dtypes and reductions of c10d are there, with timeouts and
errors that name the rank they are about.
"""

from __future__ import annotations

import atexit
from typing import Any

import torch.distributed as dist

from torchrelay import config
from torchrelay.aggregation._group import LIVING, SmlGroup
from torchrelay.aggregation._shm import ShmPlane

__all__ = ["SmlGroup", "register"]


def _create_group(backend_options: Any, options: Any = None) -> SmlGroup:
    """What c10d calls to make a group."""
    rank, size = backend_options.group_rank, backend_options.group_size
    timeout_s = backend_options.timeout.total_seconds()
    names = list(backend_options.global_ranks_in_group) or list(range(size))
    settings = config.load(config.Aggregation)
    plane = ShmPlane(backend_options.store, rank, names, timeout_s, settings)
    return SmlGroup(plane, backend_options.store, rank, size, timeout_s)


def register() -> None:
    """Makes ``sml`` known to torch.distributed; importing this module does it."""
    if not hasattr(dist.Backend, "SML"):
        dist.Backend.register_backend("sml", _create_group, extended_api=True, devices=["cpu", "cuda"])


def _close_all() -> None:
    """Ends the native threads while Python still works."""
    for group in list(LIVING):
        group.shutdown()


register()
atexit.register(_close_all)
