"""The class that groups have with this torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrelay._torch import compared_backend, has_python_backends
from torchrelay.aggregation._core import LIVING, Core

if TYPE_CHECKING or has_python_backends():
    from torchrelay.aggregation._backend import SmlBackend, SmlGroup
else:
    from torchrelay.aggregation._old_group import SmlGroup
    from torchrelay.aggregation._old_group import SmlGroup as SmlBackend

__all__ = ["LIVING", "SmlBackend", "SmlGroup", "core_of", "group_of"]


def group_of(core: SmlBackend, given: Any) -> SmlGroup:
    """Return the group of which ``core`` is this rank's part, for c10d, which has ``given`` what it
    knows of the group.
    """
    return SmlGroup(core, compared_backend(core, given)) if has_python_backends() else core


def core_of(group: Any) -> Core | None:
    """Return this rank's part in a group of ``sml``; None for other groups."""
    if isinstance(group, SmlGroup):
        return group.core
    for device in getattr(group, "_device_types", ()):  # a group that c10d made by shrink_group
        backend = group._get_backend(device)
        if isinstance(backend, Core):
            return backend
    return None
