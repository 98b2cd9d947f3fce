"""The part of each tensor that this process materialises: a slice or a DTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchrelay import _torch
from torchrelay._boxes import Box
from torchrelay.deferred._graph import Region
from torchrelay.deferred._tensor import FakeTensor
from torchrelay.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Shard", "check_shard", "distributed", "local_box", "sliced"]

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
    placements, is_for_all = shard[1], not callable(shard[1])
    if not is_for_all:
        placements = placements(name, fake)
    if placements is None:
        return None
    return [_placed(placement, fake, is_for_all) for placement in placements]


def _placed(placement: Placement, fake: torch.Tensor, is_for_all: bool) -> Placement:
    """Return ``placement`` with its dimension counted from zero; Replicate instead of one for all
    tensors, if this one has no such dimension.
    """
    # Not at the top: importing torch.distributed.tensor takes as long as torch itself.
    from torch.distributed.tensor import Replicate  # noqa: PLC0415
    from torch.distributed.tensor import Shard as ShardPlacement  # noqa: PLC0415

    dim = getattr(placement, "dim", None)
    if type(placement) is ShardPlacement and -fake.dim() <= placement.dim < 0:
        return ShardPlacement(placement.dim + fake.dim())
    if is_for_all and dim is not None and not 0 <= dim < fake.dim():
        return Replicate()
    return placement


def local_box(shard: Any, name: str, fake: torch.Tensor) -> Box | None:
    """Return the part of this process; None: the whole tensor.

    Raises:
        ArgumentError: the slices do not fit, or a placement is neither Shard nor Replicate.
    """
    if shard is None:
        return None
    if isinstance(shard, tuple):
        placements = placements_for(shard, name, fake)
        return None if placements is None else _mesh_box(shard[0], placements, name, fake)
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
    return Box.of(slices, fake.shape)


def _mesh_box(mesh: DeviceMesh, placements: Placements, name: str, fake: torch.Tensor) -> Box:
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - as above
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
    return _torch.local_box(fake.shape, mesh, placements)


def sliced(fake: FakeTensor, box: Box) -> Region:
    """Return the region of ``fake`` that ``box`` selects."""
    region = fake._region
    steps = zip(box.offsets, region.stride, strict=True)
    offset = region.offset + sum(start * stride for start, stride in steps)
    return region._replace(size=box.sizes, offset=offset)


def distributed(shard: Any, name: str, fake: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local``, as a DTensor if ``shard`` gives placements for this tensor."""
    placements = placements_for(shard, name, fake)
    if placements is None:
        return local
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    stride = torch.empty(fake.shape, device="meta").stride()
    return DTensor.from_local(
        local, shard[0], placements, run_check=False, shape=fake.shape, stride=stride
    )
