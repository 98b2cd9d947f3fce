"""torchdistX's SlowMo, on :mod:`torchrelay.training._slowmo`."""

from torchrelay.compat.torchdistx.slowmo import slowmo_comm, slowmo_optimizer

__all__ = ["slowmo_comm", "slowmo_optimizer"]
