"""The optimizer; see :mod:`torchrelay.deferred.training.slowmo`."""

from torchrelay.deferred.training import slowmo

__all__ = ["SlowMomentumOptimizer"]


class SlowMomentumOptimizer(slowmo.SlowMomentumOptimizer):
    """The slow step comes where torchdistX has it: at steps f + 1, 2 f + 1 ... for ``slowmo_freq`` f.

    Parameters are averaged there and, without a slow step, after the first step.
    """

    def _after_step(self) -> None:
        if (self._step_count_slow - 1) % self.slowmo_freq == 0:
            self._average()
            if self._step_count_slow > 1:
                self._slow_step()
