"""The device backends of a group: ours in the form that PyTorch expects, and those of other
devices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchrelay._torch import BackendsAsked
from torchrelay.errors import UnsupportedError

__all__ = ["SmlBackend", "add_missing"]

_TYPES = dist.ProcessGroup.BackendType


class SmlBackend:
    """The backend that ``group._get_backend(device)`` returns for a device of ``sml``.

    Collectives are the group's own. This class reports what the backend supports.
    """

    supports_coalescing = False
    supports_shrinking = False
    supports_splitting = False
    supports_time_estimate = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __repr__(self) -> str:
        return f"<sml backend of {self._group.group_name or 'a group'}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def name(self) -> str:
        return "sml"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: ranks are connected once the group exists."""


def add_missing(asked: BackendsAsked, given: Any, options: Any) -> None:
    """Create the backends that c10d would have created after ``sml``.

    c10d stops at the first backend that is a ProcessGroup. Ours is one, because Python cannot make
    a Backend before torch 2.14.

    Raises:
        UnsupportedError: a backend other than Gloo and NCCL comes after ``sml``.
    """
    for device, name in asked.missing.items():
        store = dist.PrefixStore(f"{device}/", asked.store)
        if name == "gloo":
            backend: Any = dist.ProcessGroupGloo(
                store, given.group_rank, given.group_size, given.timeout
            )
        elif name == "nccl" and dist.is_nccl_available():
            chosen = options if options is not None else dist.ProcessGroupNCCL.Options()
            chosen._timeout = given.timeout
            chosen.global_ranks_in_group = list(given.global_ranks_in_group)
            chosen.group_name = given.group_id
            backend = dist.ProcessGroupNCCL(store, given.group_rank, given.group_size, chosen)
        else:
            raise UnsupportedError(
                f"sml: {device}:{name} after sml in {asked.text!r} is not supported here; name sml "
                f"last, or make a group of its own for {device} tensors with "
                f"new_group(backend={name!r})"
            )
        asked.group._register_backend(torch.device(device), getattr(_TYPES, name.upper()), backend)
