from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchrelay.errors import ArgumentError
from torchrelay.training._any_precision import AnyPrecisionAdamW

FULL: dict[str, Any] = {"momentum_dtype": torch.float32, "variance_dtype": torch.float32}


@pytest.fixture(autouse=True)
def same_values_from_run_to_run() -> None:
    torch.manual_seed(0)


def _gradients(steps: int, size: int = 1000) -> list[torch.Tensor]:
    """Gradients of very different sizes, equal from run to run."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.logspace(-6, 2, size)
    return [torch.randn(size, generator=generator) * scale for _ in range(steps)]


def _reference(
    value: torch.Tensor,
    gradients: list[torch.Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.Tensor:
    """AdamW in float64 by its definition, written without torch."""
    out = value.double().numpy().copy()
    m, v = np.zeros_like(out), np.zeros_like(out)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double().numpy()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        adam = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        out = out - lr * weight_decay * out - lr * adam
    return torch.from_numpy(out)


def _run(
    value: torch.Tensor,
    gradients: list[torch.Tensor],
    kind: Any = AnyPrecisionAdamW,
    **options: Any,
) -> torch.Tensor:
    param = nn.Parameter(value.clone())
    optimizer = kind([param], **options)
    for gradient in gradients:
        param.grad = gradient.to(param.dtype)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_full_precision_equals_torch_adamw_bit_for_bit(
    dtype: torch.dtype, weight_decay: float
) -> None:
    value, gradients = torch.randn(1000).to(dtype), _gradients(30)
    ours = _run(
        value, gradients, weight_decay=weight_decay, momentum_dtype=dtype, variance_dtype=dtype
    )
    options = {"weight_decay": weight_decay, "foreach": False}
    assert torch.equal(ours, _run(value, gradients, torch.optim.AdamW, **options))


def test_steps_are_counted_whatever_the_default_dtype_is() -> None:
    """bfloat16 has no integers between 256 and 258."""
    value, gradients = torch.rand(3), [torch.rand(3) for _ in range(260)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        mine = _run(value, gradients, **FULL)
        theirs = _run(value, gradients, torch.optim.AdamW, foreach=False, weight_decay=0.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(mine, theirs)


def test_full_precision_is_adamw_by_its_definition() -> None:
    value, gradients = torch.randn(1000), _gradients(50)
    ours = _run(
        value.double(),
        gradients,
        weight_decay=0.1,
        momentum_dtype=torch.float64,
        variance_dtype=torch.float64,
    )
    torch.testing.assert_close(
        ours, _reference(value, gradients, weight_decay=0.1), rtol=1e-12, atol=1e-14
    )


def test_default_types_stay_close_to_adamw() -> None:
    """A variance rounded to 8 bits changes each step by at most its relative error, 2^-8 / 2 in the
    square root.
    """
    value, gradients = torch.randn(1000), _gradients(10)
    ours = _run(value, gradients) - value
    theirs = _run(value, gradients, torch.optim.AdamW, weight_decay=0.0) - value
    error = (ours - theirs).norm() / theirs.norm()
    assert 0 < error < 10 * 2**-9


def test_kahan_summation_keeps_what_rounding_takes() -> None:
    """Updates of 1e-5 to a bfloat16 parameter near 1 vanish, one by one, unless they are summed
    up.
    """
    value, gradients = torch.ones(64, dtype=torch.bfloat16), [torch.ones(64)] * 1000
    options = {"lr": 1e-5, **FULL}
    reference = _reference(value, gradients, lr=1e-5)
    assert torch.equal(_run(value, gradients, **options), value)
    ours = _run(
        value,
        gradients,
        use_kahan_summation=True,
        compensation_buffer_dtype=torch.float32,
        **options,
    )
    assert torch.equal(ours, reference.to(torch.bfloat16))
    ours = _run(value, gradients, use_kahan_summation=True, **options)
    torch.testing.assert_close(ours.double(), reference, rtol=2**-8, atol=0)


def test_kahan_summation_applies_to_weight_decay_too() -> None:
    value, gradients = torch.ones(64, dtype=torch.bfloat16), [torch.zeros(64)] * 1000
    ours = _run(value, gradients, lr=1e-3, weight_decay=0.1, use_kahan_summation=True, **FULL)
    torch.testing.assert_close(
        ours.double(), _reference(value, gradients, weight_decay=0.1), rtol=2**-8, atol=0
    )


def test_bfloat16_with_kahan_summation_is_nearer_to_float64_than_adamw() -> None:
    value, gradients = torch.randn(1000).bfloat16(), [g.bfloat16().float() for g in _gradients(300)]
    reference = _reference(value, gradients)
    ours = _run(value, gradients, use_kahan_summation=True, **FULL).double()
    theirs = _run(value, gradients, torch.optim.AdamW, weight_decay=0.0).double()
    unavoidable = (reference.bfloat16().double() - reference).norm()
    assert (ours - reference).norm() < 1.05 * unavoidable
    assert (theirs - reference).norm() > 5 * unavoidable


def test_state_has_the_chosen_types() -> None:
    param = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = AnyPrecisionAdamW(
        [param], use_kahan_summation=True, compensation_buffer_dtype=torch.float16
    )
    optimizer.step()
    state = optimizer.state[param]
    assert {name: t.dtype for name, t in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.bfloat16,
        "compensation": torch.float16,
    }


def test_a_checkpoint_goes_on_where_it_stopped() -> None:
    """Also where the state is more precise than the parameter: torch's own loading would round
    it.
    """
    gradients = _gradients(20, 64)
    options: dict[str, Any] = {
        "use_kahan_summation": True,
        "compensation_buffer_dtype": torch.float32,
        **FULL,
    }
    whole = _run(torch.ones(64, dtype=torch.bfloat16), gradients, **options)

    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = AnyPrecisionAdamW([param], **options)
    for gradient in gradients[:10]:
        param.grad = gradient.bfloat16()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    param = nn.Parameter(param.detach().clone())
    optimizer = AnyPrecisionAdamW([param], lr=123.0)
    optimizer.load_state_dict(saved)
    for gradient in gradients[10:]:
        param.grad = gradient.bfloat16()
        optimizer.step()
    assert torch.equal(param, whole)
    saved["state"][0]["exp_avg"].zero_()
    assert optimizer.state[param]["exp_avg"].any()


def test_groups_have_their_own_types() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": [second], "momentum_dtype": torch.bfloat16},
    ]
    optimizer = AnyPrecisionAdamW(groups)
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert optimizer.state[first]["exp_avg"].dtype == torch.float32
    assert optimizer.state[second]["exp_avg"].dtype == torch.bfloat16


def test_a_scheduler_and_a_closure_work() -> None:
    param = nn.Parameter(torch.tensor([5.0]))
    optimizer = AnyPrecisionAdamW([param], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(60):
        loss = optimizer.step(closure)
        assert loss is not None
        losses.append(loss.item())
        scheduler.step()
    assert losses[0] == 25.0
    assert losses[-1] < 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"eps": -1e-8},
        {"betas": (0.9, 1.0)},
        {"weight_decay": -0.1},
        {"momentum_dtype": torch.int32},
        {"variance_dtype": "float32"},
    ],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        AnyPrecisionAdamW([nn.Parameter(torch.ones(1))], **options)


def test_a_sparse_gradient_is_refused_before_any_update() -> None:
    embedding, first = nn.Embedding(10, 2, sparse=True), nn.Parameter(torch.ones(2))
    (embedding(torch.tensor([1])) * first).sum().backward()
    with pytest.raises(ArgumentError, match="sparse"):
        AnyPrecisionAdamW([first, *embedding.parameters()]).step()
    assert first.tolist() == [1.0, 1.0]


def test_complex_parameters_equal_torch_adamw_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    value = torch.randn(100, dtype=torch.complex64, generator=generator)
    gradients = [torch.randn(100, dtype=torch.complex64, generator=generator) for _ in range(30)]
    ours = _run(value, gradients, weight_decay=0.1, **FULL)
    theirs = _run(value, gradients, torch.optim.AdamW, weight_decay=0.1, foreach=False)
    assert torch.equal(ours, theirs)


def test_state_of_torch_adamw_can_be_loaded() -> None:
    for dtype in (torch.float32, torch.complex64):
        gradients = [torch.ones(4, dtype=dtype)] * 6
        param = nn.Parameter(torch.ones(4, dtype=dtype))
        theirs = torch.optim.AdamW([param], lr=0.1, foreach=False)
        ours_param = nn.Parameter(torch.ones(4, dtype=dtype))
        ours = AnyPrecisionAdamW([ours_param], **FULL)
        for step, gradient in enumerate(gradients):
            if step == 3:
                ours_param.data.copy_(param)
                ours.load_state_dict(theirs.state_dict())
            param.grad, ours_param.grad = gradient, gradient.clone()
            theirs.step()
            ours.step()
        assert torch.equal(ours_param, param)


def test_kahan_summation_can_be_enabled_later() -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AnyPrecisionAdamW([param], lr=1e-4, compensation_buffer_dtype=torch.float32)
    for step in range(100):
        optimizer.param_groups[0]["use_kahan_summation"] = step >= 1
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert param.tolist() == [torch.tensor(1 - 99e-4).bfloat16().item()] * 4


def test_limits_of_the_default_types_are_where_the_docs_say() -> None:
    """Updates below 2^-17 of a bfloat16 parameter need a float32 compensation; a bfloat16 variance
    makes steps up to twice too large.
    """
    value, gradients = torch.ones(4, dtype=torch.bfloat16), [torch.ones(4)] * 4000
    for lr, moves in ((2.0**-16, True), (2.0**-20, False)):
        options = {"lr": lr, "use_kahan_summation": True, "variance_dtype": torch.float32}
        assert (_run(value, gradients, **options) < 1).all() == moves, lr
        assert (
            _run(value, gradients * 2, compensation_buffer_dtype=torch.float32, **options) < 1
        ).all(), lr
    moved = [
        1 - _run(torch.ones(4), gradients[:1000], lr=1e-4, variance_dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert (moved[1] > 1.2 * moved[0]).all() and (moved[1] < 2 * moved[0]).all()
