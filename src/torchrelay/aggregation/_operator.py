"""A sum without c10d's part of a call, as an operator of torch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torchrelay._torch import group_named, watched
from torchrelay.aggregation._group import core_of
from torchrelay.errors import ArgumentError

__all__ = ["all_reduce_"]

_is_compiling = torch.compiler.is_compiling


@torch.library.custom_op("torchrelay::all_reduce_", mutates_args=("tensor",))
def _all_reduce(tensor: torch.Tensor, name: str) -> None:
    group = group_named(name)
    if core_of(group) is None:
        raise ArgumentError(f"all_reduce_: this process has no group {name!r} of sml")
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    group.allreduce([tensor], opts).wait()


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
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "all_reduce_: autograd cannot record it, and the tensor requires a gradient; call it "
            "under torch.no_grad(), or on tensor.detach()"
        )
    if not _is_compiling():  # the compiler keeps the operator, and can look into no group
        core = core_of(found)
        if core is None:
            raise ArgumentError(f"all_reduce_: it needs a group of sml, not {found!r}")
        if not watched() and core.host is not None and core.host.sum_now(tensor, tensor):
            return tensor
        if tensor.is_conj() or tensor.is_neg():  # torch runs no operator in place on such a view
            return tensor.copy_(all_reduce_(tensor.resolve_conj().resolve_neg(), group))
    _all_reduce(tensor, found.group_name)  # type: ignore[union-attr]
    return tensor
