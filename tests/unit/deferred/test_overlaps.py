"""Views of one storage: operations that read what they write, and the strides of results.

Random programs with such views are among those of ``deferred_programs.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchrelay.deferred import deferred_init, materialize_module

Make = Callable[[], torch.Tensor]
_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "an element of the target, expanded": lambda x: x[:3].add_(x[1].expand(3)),
    "an element beside it, expanded": lambda x: x[:3].add_(x[5].expand(3)),
    "columns beside each other": lambda x: x.view(4, 5)[:, ::2].mul_(x.view(4, 5)[:, 1:4]),
    "every second one of the target": lambda x: x[:8].add_(x[:16:2]),
    "the target itself": lambda x: x.mul_(x.view_as(x)),
    "windows": lambda x: x.as_strided((5, 4), (2, 1)).mul_(0.5),
    "two targets": lambda x: torch._foreach_add_([x[:4], x[1:5]], [x[3].expand(4), x[:4].clone()]),
    "out": lambda x: torch.add(x[::2], x[3].expand(10), out=x[1::2]),
}


class _Holder(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.register_buffer("x", make())


@pytest.mark.parametrize("name", _WRITES)
def test_an_element_may_be_read_after_it_was_written(name: str) -> None:
    def make() -> torch.Tensor:
        x = torch.rand(20)
        _WRITES[name](x)
        return x * 1.0 if name == "out" else x

    torch.manual_seed(3)
    eager = make()
    for part in (slice(None), slice(0, 2), slice(2, 9), slice(15, 20)):
        torch.manual_seed(3)
        module = deferred_init(_Holder, make)
        materialize_module(module, shard=lambda name, tensor, part=part: (part,))
        assert torch.equal(module.x, eager[part]), (name, part)  # type: ignore[arg-type]
    torch.manual_seed(3)
    module = deferred_init(_Holder, make)
    materialize_module(module)
    assert torch.equal(module.x, eager)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[:3].add_(x[1:4]),
        lambda x: x[0].expand(3).mul_(2),
        lambda x: x[0].expand(3).addcmul_(x[:3], x[4:7]),
        lambda x: x.index_add_(0, torch.tensor([0] * 20), x),
    ],
)
def test_what_eager_execution_refuses_is_refused_where_it_is_written(
    write: Callable[[torch.Tensor], object],
) -> None:
    with pytest.raises(RuntimeError) as eager:
        write(torch.rand(20))
    with pytest.raises(RuntimeError) as deferred:
        deferred_init(lambda: write(torch.rand(20)))
    assert str(deferred.value) == str(eager.value)


_RESULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tril": torch.tril,
    "triu": torch.triu,
    "masked_fill": lambda t: t.masked_fill(t > 0.5, 1),
    "gelu": nn.functional.gelu,
    "diag_embed": torch.diag_embed,
    "add": lambda t: t + 1,
    "softmax": lambda t: t.softmax(0),
}
_SHAPES = [(1, 4), (4, 1), (1, 1), (3, 1, 4), (3, 4, 1), (1, 4, 1)]


@pytest.mark.parametrize("name", _RESULTS)
def test_dimensions_of_size_1_have_the_strides_of_eager_execution(name: str) -> None:
    for shape in _SHAPES:
        for strides in ((1, 4, 12), (12, 4, 1), (4, 1, 5), (1, 1, 1), (0, 1, 20)):

            def make(size: tuple[int, ...] = shape, by: tuple[int, ...] = strides) -> torch.Tensor:
                base = torch.rand(200).as_strided(size, by[: len(size)])
                return _RESULTS[name](base)

            deferred = deferred_init(make)
            assert deferred.stride() == make().stride(), (name, shape, strides)


def test_a_view_has_the_storage_of_its_base() -> None:
    base = deferred_init(torch.rand, 4, 5)
    assert base[1].untyped_storage().nbytes() == base.untyped_storage().nbytes() == 80
