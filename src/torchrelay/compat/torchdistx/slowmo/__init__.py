"""torchdistX's SlowMo, on :mod:`torchrelay.training.slowmo`."""

from torchrelay.compat.torchdistx.slowmo import slowmo_comm, slowmo_optimizer

__all__ = ["slowmo_comm", "slowmo_optimizer"]
