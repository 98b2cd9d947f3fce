"""The optimizer; see :mod:`torchrelay.training._slowmo`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim.optimizer import StateDict

from torchrelay.training import _slowmo

__all__ = ["SlowMomentumOptimizer"]


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
        self.averager: Any = PeriodicModelAverager(
            slowmo_freq, warmup_steps=0, process_group=process_group
        )

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
        """Continue from a saved state, also between two slow steps."""
        super().load_state_dict(state_dict)
        self.averager.step, self.averager.period = self._step_count_slow, self.slowmo_freq
