"""Functions of torch that read ``is_meta`` before they compute, send or create initial values.

A fake tensor inspects its caller, because neither answer would do: ``trunc_normal_`` draws until
nothing is rejected, which needs values, and is recorded as one operation; the scatter and broadcast
inside ``distribute_tensor`` become copies, because every rank has the whole record; FSDP1, which
asks before it calls ``param_init_fn``, gets True.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred._composites import trunc_normal
from torchrelay.deferred._operators import describe
from torchrelay.deferred._recording import record
from torchrelay.deferred._tensor import FakeTensor

__all__ = ["is_meta"]


def is_meta(fake: FakeTensor, frame: FrameType) -> bool:
    """Return ``fake.is_meta`` for the function that ``frame`` executes."""
    caller = _torch.caller_of(frame)
    if caller == "trunc_normal":
        return _trunc_normal(fake, frame.f_locals)
    if caller == "mesh_scatter":
        return _scatter(fake, frame.f_locals)
    if (
        frame.f_code.co_name == "<genexpr>"
        and frame.f_back is not None
        and frame.f_back.f_back is not None
    ):
        return (
            _torch.caller_of(frame.f_back) == "fsdp1_needs_values"
            and frame.f_back.f_back.f_locals.get("param_init_fn") is not None
        )
    return caller == "mesh_broadcast"


def _trunc_normal(fake: FakeTensor, called: dict[str, Any]) -> bool:
    if fake._region.storage.deferred:
        args = (fake, *(float(called[name]) for name in ("mean", "std", "a", "b")))
        kwargs = {"generator": called.get("generator")}
        record(trunc_normal, describe(trunc_normal), args, kwargs, writes=(fake._region,))
    return True


def _scatter(fake: FakeTensor, called: dict[str, Any]) -> bool:
    mesh, dim = called["mesh"], called["mesh_dim"]
    with torch.no_grad():
        fake.copy_(called["scatter_list"][mesh.get_local_rank(dim)])
    return True
