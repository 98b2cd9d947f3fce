"""The state of optimizers that have not stepped yet."""

from __future__ import annotations

import torch

from torchrelay.deferred import is_deferred

__all__ = ["start_state"]


def start_state(optimizer: torch.optim.Optimizer) -> bool:
    """Create the state tensors of an optimizer that has none, so that they can be loaded.

    Takes one step with gradients and learning rates of zero, as
    ``torch.distributed.checkpoint.state_dict`` does: parameters, gradients and learning rates are
    as before.

    Returns whether it has a state now. It has none if a parameter is deferred, or if the optimizer
    cannot take such a step (``LBFGS`` needs a closure, ``SparseAdam`` sparse gradients).
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if any(is_deferred(parameter) for parameter in parameters):
        return False
    gradients = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in groups]
    try:
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for group in groups:
            if "lr" in group:
                group["lr"] = group["lr"] * 0
        optimizer.step()
    except Exception:  # of any optimizer; the caller's error names what to do instead
        optimizer.state.clear()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
    return bool(optimizer.state)
