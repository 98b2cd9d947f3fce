"""Tensor subclasses that wrap deferred tensors: their parts are materialized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from torchrelay.deferred import deferred_init, is_deferred, materialize_module
from torchrelay.errors import UnsupportedError


class Scaled(torch.Tensor):
    """A quantized tensor: integers, and a scale for each row."""

    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=scale.dtype, device=values.device
        )
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.values, self.scale = values, scale  # type: ignore[method-assign, assignment]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Scaled:
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any
    ) -> Scaled:
        return cls(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        return func(*tree_map_only(Scaled, lambda t: t.values * t.scale, args), **(kwargs or {}))


def build() -> Any:
    module: Any = nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 3))
    module[0].weight = nn.Parameter(Scaled.of(module[0].weight.detach()), requires_grad=False)
    module.register_buffer("row", module[0].weight @ torch.ones(20))
    return module


def test_the_parts_of_a_wrapper_are_materialized() -> None:
    torch.manual_seed(5)
    eager = build()
    torch.manual_seed(5)
    module = deferred_init(build)
    weight = module[0].weight
    assert is_deferred(weight) and is_deferred(module)
    materialize_module(module, check_fn=lambda one: one is module[0])
    assert not is_deferred(weight) and module[0].weight is weight
    assert torch.equal(weight.values, eager[0].weight.values)
    assert torch.equal(weight.scale, eager[0].weight.scale)
    materialize_module(module)
    assert not is_deferred(module)
    assert torch.equal(module(torch.ones(2, 20)), eager(torch.ones(2, 20)))
    assert torch.equal(module.row, eager.row)


@pytest.mark.parametrize("how", [{"dtype": torch.float64}, {"shard": lambda name, tensor: None}])
def test_what_cannot_be_done_to_a_wrapper_is_refused(how: dict[str, Any]) -> None:
    module = deferred_init(build)
    with pytest.raises(UnsupportedError, match="Scaled"):
        materialize_module(module, **how)
    assert is_deferred(module[0].weight)


def test_torchao_quantization() -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def quantized() -> nn.Module:
        module = nn.Sequential(nn.Linear(64, 32))
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
        return module

    torch.manual_seed(5)
    eager = quantized()
    torch.manual_seed(5)
    module = deferred_init(quantized)
    materialize_module(module)
    assert not is_deferred(module)
    with torch.no_grad():
        assert torch.equal(module(torch.ones(2, 64)), eager(torch.ones(2, 64)))
