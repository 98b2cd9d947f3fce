"""SlowMo: reduce gradients among few ranks often, and parameters among all ranks rarely.

Wang, Tantia, Ballas and Rabbat, "SlowMo: improving communication-efficient distributed SGD with
slow momentum" (ICLR 2020), algorithm 1. :func:`slowmo_hook` with a :class:`SlowMoState` replaces
the gradient reduction of DDP, or of FSDP without sharding, by one within a subgroup, or by none.
:class:`SlowMomentumOptimizer` wraps the optimizer; every ``slowmo_freq`` steps it averages the
parameters over all ranks and applies the slow momentum.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from torchrelay._names import names_options
from torchrelay.errors import ArgumentError
from torchrelay.training import _comm_hooks as hooks

__all__ = ["SlowMoState", "SlowMomentumOptimizer", "slowmo_hook"]


class SlowMoState:
    """State of :func:`slowmo_hook`.

    Args:
        subgroup: the ranks that average gradients at each step; default: those that share a host,
            which makes creation collective.
        sync_grads: if False, gradients are not averaged.

    Raises:
        ArgumentError: ``subgroup`` is not a process group.
    """

    @names_options()
    def __init__(self, subgroup: dist.ProcessGroup | None = None, sync_grads: bool = True) -> None:
        is_group = subgroup is None or isinstance(subgroup, dist.ProcessGroup)
        condition = "be a process group, such as torch.distributed.new_group(ranks)"
        hooks.check_setting(self, "subgroup", subgroup, is_group, condition)
        self.sync_grads = sync_grads
        self.subgroup = subgroup
        if sync_grads and subgroup is None:
            self.subgroup = hooks.subgroup_of(hooks.ranks_by_host())


# DDP looks for the name bucket, and takes no annotation of it or of the result but its own.
def slowmo_hook(state: SlowMoState, bucket, output=None):  # type: ignore[no-untyped-def]
    """Average gradients over ``state.subgroup``, or leave them local. A communication hook.

    Register it with ``register_comm_hook`` of DDP or of FSDP with ``NO_SHARD``.

    Returns a future of the averaged flat gradient under DDP, and None under FSDP.

    Args:
        state: of this rank.
        bucket (GradBucket or torch.Tensor): DDP's bucket, or FSDP's flat gradient, which is
            averaged in place.
        output (None): FSDP passes it when it shards gradients, which is refused.

    Raises:
        UnsupportedError: FSDP shards its gradients.
    """
    hooks.refuse_sharded("slowmo_hook", output)
    if isinstance(bucket, GradBucket):
        if state.sync_grads:
            return allreduce_hook(state.subgroup, bucket)  # type: ignore[arg-type]
        return noop_hook(None, bucket)
    if state.sync_grads:
        bucket.div_(dist.get_world_size(state.subgroup))  # before the sum: float16 may overflow
        dist.all_reduce(bucket, group=state.subgroup)
    return None


class SlowMomentumOptimizer(Optimizer):
    """Average parameters and apply a slow momentum every ``slowmo_freq`` steps of ``base_optim``.

    Let x be the parameters after the last slow step, y their current average over ranks, and lr the
    base learning rate: ``u = slowmo_factor * u + (x - y) / lr`` and ``x = x - slowmo_lr * lr * u``.
    With ``slowmo_factor=0`` and ``slowmo_lr=1`` this is local SGD. It needs two additional tensors
    per parameter. A slow step with a base learning rate of 0, or one so small that 1 / lr is
    infinite, averages and leaves the momentum out.

    Args:
        process_group: the ranks that average; default: all. If FSDP shards parameters inside
            subgroups, the ranks that hold the same shard. All ranks must start with equal
            parameters, as under DDP.

    Raises:
        ArgumentError: a setting is out of range, or ``base_optim`` has a group without ``lr``.
    """

    @names_options()
    def __init__(
        self,
        base_optim: Optimizer,
        slowmo_freq: int = 48,
        slowmo_factor: float = 0.5,
        slowmo_lr: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(base_optim, Optimizer):
            raise ArgumentError(
                f"SlowMomentumOptimizer: base_optim is a {type(base_optim).__name__}, no optimizer"
            )
        self._base_optim = base_optim
        self._process_group = process_group
        self._momentum: dict[torch.Tensor, torch.Tensor] = {}
        self._anchor: dict[torch.Tensor, torch.Tensor] = {}
        self._step_count_slow = 0
        self._configure(slowmo_freq, slowmo_factor, slowmo_lr)
        super().__init__(base_optim.param_groups, base_optim.defaults)
        self._share_with_base()
        self._set_anchors()

    def __getstate__(self) -> dict[str, Any]:
        """Return all but hooks and a scheduler's ``step``, which is bound to this object."""
        return {
            name: value
            for name, value in vars(self).items()
            if name != "step" and not name.startswith("_optimizer_")
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> SlowMomentumOptimizer:
        """Copy with the base optimizer and the parameters; the process group is shared."""
        copied = object.__new__(type(self))
        memo[id(self)], memo[id(self._process_group)] = copied, self._process_group
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def _configure(self, slowmo_freq: int, slowmo_factor: float, slowmo_lr: float) -> None:
        hooks.check_setting(self, "slowmo_freq", slowmo_freq, slowmo_freq >= 1, "be at least 1")
        for name, value in (("slowmo_factor", slowmo_factor), ("slowmo_lr", slowmo_lr)):
            hooks.check_setting(self, name, value, value >= 0, "not be negative")
        self.slowmo_freq, self.slowmo_factor, self.slowmo_lr = slowmo_freq, slowmo_factor, slowmo_lr

    def _share_with_base(self) -> None:
        """Use the groups and state of the base optimizer: a change of either is one of both."""
        self.state = self._base_optim.state
        self.param_groups = self._base_optim.param_groups
        if not all("lr" in group for group in self.param_groups):
            raise ArgumentError(
                "SlowMomentumOptimizer: a parameter group of base_optim has no learning rate 'lr'"
            )

    def _parameters(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        return ((param, group) for group in self.param_groups for param in group["params"])

    def _set_anchors(self) -> None:
        for param, _ in self._parameters():
            if param not in self._anchor:
                self._anchor[param] = param.detach().clone()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also to the base optimizer."""
        if self._anchor:
            self._base_optim.add_param_group(param_group)
            self._share_with_base()
            self._set_anchors()
        else:  # the base class's constructor adds the groups that base_optim has already
            super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the base optimizer's."""
        self._base_optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the base optimizer's and, if due, the slow step. Collective if it is due."""
        loss = self._base_optim.step(closure) if closure is not None else self._base_optim.step()
        self._step_count_slow += 1
        self._after_step()
        return loss

    def _after_step(self) -> None:
        if self._step_count_slow % self.slowmo_freq == 0:
            self._average()
            self._slow_step()

    def _average(self) -> None:
        average_parameters((param for param, _ in self._parameters()), self._process_group)

    @torch.no_grad()
    def _slow_step(self) -> None:
        for param, group in self._parameters():
            lr, anchor = float(group["lr"]), self._anchor[param]
            wide = torch.promote_types(param.dtype, torch.float32)
            if lr * torch.finfo(wide).max > 1:
                if param not in self._momentum:
                    self._momentum[param] = torch.zeros_like(param)
                momentum = self._momentum[param].mul_(self.slowmo_factor)
                momentum.add_(anchor - param, alpha=1 / lr)
                param.copy_(anchor.sub_(momentum, alpha=self.slowmo_lr * lr))
            else:
                anchor.copy_(param)

    def state_dict(self) -> StateDict:
        """Return the base optimizer's state, with settings, counter and tensors of SlowMo."""
        indexed = list(enumerate(param for param, _ in self._parameters()))
        return {
            **self._base_optim.state_dict(),
            "slowmo_freq": self.slowmo_freq,
            "slowmo_factor": self.slowmo_factor,
            "slowmo_lr": self.slowmo_lr,
            "step": self._step_count_slow,
            "slow_momentum": {
                index: self._momentum[param] for index, param in indexed if param in self._momentum
            },
            "slow_anchor": {index: self._anchor[param] for index, param in indexed},
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state, also between two slow steps.

        Raises:
            ArgumentError: ``state_dict`` is not from a ``SlowMomentumOptimizer``, has invalid
                settings, or is of other parameters. Nothing was loaded then.
        """
        own = ("slowmo_freq", "slowmo_factor", "slowmo_lr", "step", "slow_momentum", "slow_anchor")
        missing = [key for key in own if key not in state_dict]
        if missing:
            raise ArgumentError(
                f"SlowMomentumOptimizer.load_state_dict: the state has no {', '.join(missing)}"
            )
        params = [param for param, _ in self._parameters()]
        momentum = _like(params, state_dict["slow_momentum"])
        anchor = _like(params, state_dict["slow_anchor"])
        self._configure(*(state_dict[name] for name in own[:3]))
        self._base_optim.load_state_dict(
            {key: state_dict[key] for key in state_dict if key not in own}
        )
        self._share_with_base()
        self._step_count_slow = state_dict["step"]
        self._momentum, self._anchor = momentum, anchor
        self._set_anchors()


def _like(
    params: list[torch.Tensor], saved: dict[int, torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Return copies of the saved tensors with their parameters' dtype and device.

    Raises:
        ArgumentError: there is no such parameter, or it has another shape.
    """
    for i, tensor in saved.items():
        if not 0 <= i < len(params) or params[i].shape != tensor.shape:
            found = f"shape {tuple(params[i].shape)}" if 0 <= i < len(params) else "none"
            raise ArgumentError(
                "SlowMomentumOptimizer.load_state_dict: the state is of other parameters: it has "
                f"parameter {i} with shape {tuple(tensor.shape)}, and this optimizer has {found}"
            )
    return {
        params[i]: torch.empty_like(params[i]).copy_(tensor).detach() for i, tensor in saved.items()
    }


@torch.no_grad()
def average_parameters(
    params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Replace each tensor by its mean over the ranks of ``group``, with equal bits on all ranks.

    Collective. All ranks pass tensors of the same shapes and dtypes in the same order. Local
    tensors of a DTensor are averaged with the same shard of other ranks. After an error, each
    element has either its old value or the mean.
    """
    size = dist.get_world_size(group)
    running: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()
    running_bytes = 0
    for tensor in (
        piece for param in params for piece in _pieces(hooks.local_tensor(param.detach()))
    ):
        wide = torch.promote_types(tensor.dtype, torch.float32)
        mean = tensor.to(wide).contiguous().div(size)
        running.append((tensor, mean, dist.all_reduce(mean, group=group, async_op=True)))
        running_bytes += mean.nbytes
        while running_bytes > _COPIED_BYTES:
            running_bytes -= _finish(*running.popleft())
    for one in running:
        _finish(*one)


# How many bytes are averaged at a time, in copies.
_COPIED_BYTES = 64 << 20


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return views of ``tensor``'s rows whose copies stay small; of an empty one none."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return (tensor,)[: tensor.numel()]
    row_bytes = 8 * tensor[0].numel()
    return torch.split(tensor, max(1, _COPIED_BYTES // row_bytes))


def _finish(tensor: torch.Tensor, mean: torch.Tensor, work: Any) -> int:
    """Replace ``tensor`` by ``mean`` once ``work`` is done; return the bytes of ``mean``."""
    work.wait()
    tensor.copy_(mean)
    return mean.nbytes
