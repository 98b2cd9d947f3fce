"""``sml``: a torch.distributed backend that sums gradients in the network or in shared memory.

torch registers the backend when it is imported::

    dist.init_process_group(backend="sml")   # under torchrun; also new_group(backend="sml")

It follows "Scaling Distributed Machine Learning with In-Network Aggregation" (Sapio et al., NSDI
2021). Ranks of one host communicate through a shared segment; hosts over TCP and, if one is
configured, through an aggregation switch. It supports all collectives, dtypes and reductions of
c10d, with timeouts and errors that name the ranks concerned.

Public: :func:`all_reduce_`, :class:`Options`, :class:`CompressionState`,
:func:`compression_hook`, :func:`reconfigure`, :func:`get_reconfigure_handle`,
:class:`Configuration`, :func:`stats`, :class:`PlaneStats`, :class:`LinkStats`,
:class:`SmlGroup`, :func:`register`.
"""

from __future__ import annotations

import atexit

from torchrelay import _autoload, _telemetry
from torchrelay.aggregation import _creation  # noqa: F401 - later, descriptors may be scarce
from torchrelay.aggregation._compression import CompressionState, compression_hook
from torchrelay.aggregation._group import LIVING, SmlGroup
from torchrelay.aggregation._operator import all_reduce_
from torchrelay.aggregation._options import Options
from torchrelay.aggregation._plane import LinkStats, PlaneStats
from torchrelay.aggregation._reconfiguration import (
    Configuration,
    get_reconfigure_handle,
    reconfigure,
)
from torchrelay.aggregation._statistics import samples, stats

__all__ = [
    "CompressionState",
    "Configuration",
    "LinkStats",
    "Options",
    "PlaneStats",
    "SmlGroup",
    "all_reduce_",
    "compression_hook",
    "get_reconfigure_handle",
    "reconfigure",
    "register",
    "stats",
]


def register() -> None:
    """Register ``sml`` with torch.distributed. Importing this module does so, and so does torch by
    its entry point, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
    """
    _autoload.register_now()


def _close_all() -> None:
    """Shut all groups down: native threads must end before the interpreter."""
    for group in list(LIVING):
        group.shutdown()


register()
_telemetry.publish(samples)
atexit.register(_close_all)


def __dir__() -> list[str]:
    return [*__all__, "switch"]
