"""AdamW with state of any floating-point dtype, and Kahan summation for low-precision parameters.

AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019). Compensated sum:
Kahan, "Further remarks on reducing truncation errors" (CACM 1965), applied to weights as in Zamirai
et al., "Revisiting BFloat16 training" (2020).

Arithmetic is done in float32 or wider, and each state tensor and parameter is rounded once per
step. If all dtypes are the parameter's float32 or float64, without compensation, results equal
``torch.optim.AdamW(foreach=False)`` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from torchrelay._names import names_options
from torchrelay.errors import ArgumentError
from torchrelay.training._comm_hooks import check_setting

__all__ = ["AnyPrecisionAdamW"]

# Where the type of each state tensor stands in a parameter group.
_STATE_DTYPES = {
    "exp_avg": "momentum_dtype",
    "exp_avg_sq": "variance_dtype",
    "compensation": "compensation_buffer_dtype",
}


class AnyPrecisionAdamW(Optimizer):
    """AdamW with selectable dtypes for momentum, variance and rounding compensation.

    With ``use_kahan_summation``, the rounding error of each update is added to the next, so a
    bfloat16 parameter accumulates updates far below its resolution. Settings may differ between
    parameter groups.

    The default dtypes are torchdistX's. They save memory and lose precision, as described for each
    argument. Complex parameters are updated as pairs of real numbers, and the state is real.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of momentum and variance.
        eps: added to the denominator.
        weight_decay: decoupled, as in AdamW.
        use_kahan_summation: keep the rounding error of each update for the next.
        momentum_dtype: of ``exp_avg``.
        variance_dtype: of ``exp_avg_sq``. bfloat16 cannot follow ``betas[1] = 0.999``: a change of
            0.1 % is less than half a unit in its last place. Steps become up to twice too large if
            gradients stay as they are, and too small if they shrink. Use float32, or a ``betas[1]``
            of at most 0.99.
        compensation_buffer_dtype: of ``compensation``. bfloat16 keeps 8 bits beyond those of a
            bfloat16 parameter: updates below about 2^-17 of the parameter's value are lost. float32
            keeps them.

    Raises:
        ArgumentError: a rate, decay or dtype is out of range, or a gradient is sparse.
    """

    @names_options()
    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_kahan_summation: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.bfloat16,
        compensation_buffer_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "use_kahan_summation": use_kahan_summation,
            "momentum_dtype": momentum_dtype,
            "variance_dtype": variance_dtype,
            "compensation_buffer_dtype": compensation_buffer_dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the constructor's arguments as defaults."""
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = [
            (param, group)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if any(param.grad.is_sparse for param, _ in updated):
            raise ArgumentError(
                "AnyPrecisionAdamW: a gradient is sparse, and no parameter was updated; use dense "
                "gradients, or torch.optim.SparseAdam"
            )
        for param, group in updated:
            value, state = _real(param), self.state[param]
            _complete(state, value, group)
            _update(value, _real(param.grad), state, group)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Complete groups of another optimizer, such as AdamW, with the constructor's arguments."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                if name != "differentiable":  # torch adds it to the defaults
                    group.setdefault(name, value)

    def _check_group(self, group: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_setting(self, name, group[name], group[name] >= 0, "not be negative")
        are_decays = all(0 <= beta < 1 for beta in group["betas"])
        check_setting(self, "betas", group["betas"], are_decays, "be two numbers in [0, 1)")
        for name in _STATE_DTYPES.values():
            dtype = group[name]
            is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            check_setting(
                self, name, repr(dtype), is_floating, "be a floating-point type, e.g. torch.float32"
            )

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict. State keeps the dtypes of its groups, not the parameters'."""
        super().load_state_dict(state_dict)
        saved_groups = cast(list[dict[str, Any]], state_dict["param_groups"])
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            for param, index in zip(group["params"], saved_group["params"], strict=True):
                for name, value in state_dict["state"].get(index, {}).items():
                    if name == "step":
                        self.state[param][name] = value.clone()
                    elif name in _STATE_DTYPES:
                        dtype = group[_STATE_DTYPES[name]]
                        self.state[param][name] = _real(value).to(
                            device=param.device, dtype=dtype, copy=True
                        )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of real numbers, and any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _complete(state: dict[str, torch.Tensor], param: torch.Tensor, group: dict[str, Any]) -> None:
    """Add the state that ``param`` lacks: all, or the compensation that was just enabled."""
    if "step" not in state:
        # In bfloat16, as by default, the count would stop at 256.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        state["step"] = torch.zeros((), dtype=dtype, device="cpu")
    for name in ["exp_avg", "exp_avg_sq"] + ["compensation"] * group["use_kahan_summation"]:
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=group[_STATE_DTYPES[name]])


def _update(
    param: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    group: dict[str, Any],
) -> None:
    """Update one parameter, in the order of torch's single-tensor AdamW, to equal its results."""
    state["step"] += 1
    step, lr, (beta1, beta2) = state["step"].item(), group["lr"], group["betas"]
    dtype = torch.promote_types(param.dtype, torch.float32)
    for name in state.keys() & _STATE_DTYPES.keys():
        dtype = torch.promote_types(dtype, state[name].dtype)
    grad, value = gradient.to(dtype), param.to(dtype)
    momentum, variance = state["exp_avg"].to(dtype), state["exp_avg_sq"].to(dtype)

    momentum.lerp_(grad, 1 - beta1)
    variance.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    step_size = lr / (1 - beta1**step)
    denominator = (variance.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    if group["use_kahan_summation"]:
        update = value * (-lr * group["weight_decay"])
        update.addcdiv_(momentum, denominator, value=-step_size)
        _add_compensated(param, value, update, state["compensation"])
    else:
        if group["weight_decay"]:
            value.mul_(1 - lr * group["weight_decay"])
        value.addcdiv_(momentum, denominator, value=-step_size)
        _store(param, value)
    _store(state["exp_avg"], momentum)
    _store(state["exp_avg_sq"], variance)


def _add_compensated(
    param: torch.Tensor, value: torch.Tensor, update: torch.Tensor, compensation: torch.Tensor
) -> None:
    """Execute ``param += update + compensation``; leave the rounding error in ``compensation``.

    ``value`` is ``param`` in the type of ``update``, and may be the same tensor.
    """
    wanted = update.add_(compensation)
    rounded = (value + wanted).to(param.dtype)
    compensation.copy_(wanted.sub_(rounded.to(value.dtype) - value))
    param.copy_(rounded)


def _store(target: torch.Tensor, value: torch.Tensor) -> None:
    if target is not value:
        target.copy_(value)
