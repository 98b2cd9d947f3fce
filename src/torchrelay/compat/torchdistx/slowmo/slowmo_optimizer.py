"""The optimizer; see :mod:`torchrelay.training._slowmo`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.optim.optimizer import StateDict

from torchrelay.training import _slowmo

__all__ = ["SlowMomentumOptimizer"]


class _Averager(ModelAverager):
    """Averages at each step for which ``step % period`` is 0, and counts them, as PyTorch's
    ``PeriodicModelAverager``.

    Equal to it but for float16 and bfloat16, which it adds as they are.
    """

    def __init__(self, period: int, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        self.warmup_steps = 0
        self.period = period

    def average_parameters(self, params: Iterable[Any]) -> None:
        """Average parameters, given as such or as an optimizer's groups, if a step is due."""
        if self.step % self.period == 0:
            _slowmo.average_parameters(_parameters(params), self.process_group)
        self.step += 1


def _parameters(params: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in params:
        found += one["params"] if isinstance(one, dict) else [one]
    return found


class SlowMomentumOptimizer(_slowmo.SlowMomentumOptimizer):
    """The slow step comes where torchdistX has it: at steps f + 1, 2 f + 1 ... for ``slowmo_freq``
    f.

    ``averager`` averages the parameters there and, without a slow step, after the first step; a
    script may put another of PyTorch's model averagers in its place.
    """

    def __init__(
        self,
        base_optim: torch.optim.Optimizer,
        slowmo_freq: int = 48,
        slowmo_factor: float = 0.5,
        slowmo_lr: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(base_optim, slowmo_freq, slowmo_factor, slowmo_lr, process_group)
        self.averager: Any = _Averager(slowmo_freq, process_group)

    def __repr__(self) -> str:
        return repr(self._base_optim)

    def __deepcopy__(self, memo: dict[int, Any]) -> _slowmo.SlowMomentumOptimizer:
        memo[id(self.averager.process_group)] = self.averager.process_group
        return super().__deepcopy__(memo)

    def _after_step(self) -> None:
        self.averager.average_parameters(self.param_groups)
        self._step_count_slow = self.averager.step
        if self._step_count_slow > 1 and (self._step_count_slow - 1) % self.slowmo_freq == 0:
            self._slow_step()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state, also torchdistX's own.

        That has the momentum in each parameter's state, and no averaged parameters: those are then
        the parameters that the model has now.
        """
        if "slow_anchor" not in state_dict:
            states = {index: dict(state) for index, state in state_dict["state"].items()}
            momentum = {
                index: state.pop("slow_momentum")
                for index, state in states.items()
                if "slow_momentum" in state
            }
            anchors = {index: param for index, (param, _) in enumerate(self._parameters())}
            state_dict = {
                **state_dict,
                "state": states,
                "slow_momentum": momentum,
                "slow_anchor": anchors,
            }
        super().load_state_dict(state_dict)
        self.averager.step, self.averager.period = self._step_count_slow, self.slowmo_freq
