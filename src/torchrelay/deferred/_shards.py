"""The part of each tensor that this process materialises: a slice or a DTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchrelay import _torch
from torchrelay.deferred._graph import Region
from torchrelay.deferred._tensor import FakeTensor
from torchrelay.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Slices", "check_shard", "distributed", "local_slices", "sliced"]

Slices = tuple[slice, ...]
Placements = Sequence["Placement"]
Shard = (
    Callable[[str, torch.Tensor], "Slices | None"]
    | tuple["DeviceMesh", "Placements | Callable[[str, torch.Tensor], Placements | None]"]
)


def check_shard(shard: Any) -> None:
    """Raise :class:`ArgumentError` if ``shard`` has none of the allowed types."""
    if shard is None or callable(shard) or (isinstance(shard, tuple) and len(shard) == 2):
        return
    raise ArgumentError(
        "shard must be a function (name, tensor) -> tuple of slices or None, or a pair "
        f"(device_mesh, placements); got {type(shard).__name__}."
    )


def placements_for(shard: Any, name: str, fake: torch.Tensor) -> Placements | None:
    """Return the placements of one tensor; None if ``shard`` gives slices or leaves it whole."""
    if not isinstance(shard, tuple):
        return None
    placements = shard[1]
    if callable(placements):
        found: Placements | None = placements(name, fake)
        return None if found is None else _counted_from_zero(found, fake)
    return [_possible(placement, fake) for placement in _counted_from_zero(placements, fake)]


def _counted_from_zero(placements: Placements, fake: torch.Tensor) -> Placements:
    from torch.distributed.tensor import Shard as ShardPlacement  # noqa: PLC0415

    return [
        ShardPlacement(one.dim + fake.dim())
        if type(one) is ShardPlacement and -fake.dim() <= one.dim < 0
        else one
        for one in placements
    ]


def _possible(placement: Placement, fake: torch.Tensor) -> Placement:
    """Return ``placement``, or Replicate if a tensor has no such dimension."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415

    dim = getattr(placement, "dim", None)
    return placement if dim is None or 0 <= dim < fake.dim() else Replicate()


def local_slices(shard: Any, name: str, fake: torch.Tensor) -> Slices | None:
    """Return the slices of this process; None: the whole tensor.

    Raises:
        ArgumentError: the slices do not fit, or a placement is neither Shard nor Replicate.
    """
    if shard is None:
        return None
    if isinstance(shard, tuple):
        placements = placements_for(shard, name, fake)
        return None if placements is None else _mesh_slices(shard[0], placements, name, fake)
    slices = shard(name, fake)
    if slices is None:
        return None
    if not isinstance(slices, tuple) or not all(isinstance(item, slice) for item in slices):
        raise ArgumentError(
            f"{name}: shard must give a tuple of slices or None, and gave {slices!r}."
        )
    if len(slices) > fake.dim() or any(item.step not in (None, 1) for item in slices):
        raise ArgumentError(
            f"{name}: the slices {slices!r} do not fit a tensor of shape {tuple(fake.shape)}: at "
            "most one for each dimension, with step 1."
        )
    return slices


def _mesh_slices(mesh: DeviceMesh, placements: Placements, name: str, fake: torch.Tensor) -> Slices:
    # Not at the top: importing torch.distributed.tensor takes as long as torch itself.
    from torch.distributed.tensor import Replicate  # noqa: PLC0415
    from torch.distributed.tensor import Shard as ShardPlacement  # noqa: PLC0415

    for placement in placements:
        if type(placement) not in (Replicate, ShardPlacement):
            raise ArgumentError(
                f"{name}: a tensor can be materialized under Shard or Replicate, not {placement}."
            )
        if isinstance(placement, ShardPlacement) and not 0 <= placement.dim < fake.dim():
            raise ArgumentError(
                f"{name}: {placement} does not fit a tensor of shape {tuple(fake.shape)}. Give "
                "Replicate() for it."
            )
    size, offset = _torch.local_shape_and_offset(fake.shape, mesh, placements)
    return tuple(slice(start, start + extent) for start, extent in zip(offset, size, strict=True))


def sliced(fake: FakeTensor, slices: Slices) -> Region:
    """Return the region of ``fake`` that ``slices`` select."""
    region = fake._region
    size, offset = list(region.size), region.offset
    for dim, item in enumerate(slices):
        start, stop, _ = item.indices(size[dim])
        offset += start * region.stride[dim]
        size[dim] = max(0, stop - start)
    return region._replace(size=tuple(size), offset=offset)


def distributed(shard: Any, name: str, fake: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local``, as a DTensor if ``shard`` gives placements for this tensor."""
    placements = placements_for(shard, name, fake)
    if placements is None:
        return local
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return DTensor.from_local(
        local,
        shard[0],
        placements,
        run_check=False,
        shape=fake.shape,
        stride=_contiguous(fake.shape),
    )


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
