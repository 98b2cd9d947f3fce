"""all_reduce_, the operator of ``torch.library``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from multi.aggregation.collectives import (
    DTYPES,
    GRID,
    SIZES,
    VIEWS,
    check,
    expected,
    groups,
    like_view,
    make,
)
from torchrelay.aggregation import all_reduce_
from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.world import World


@pytest.mark.processes(2, together=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(world: World, dtype: torch.dtype) -> None:
    with groups(world):
        for size in SIZES:
            inputs = [make(r, size, dtype) for r in range(world.size)]
            mine = inputs[world.rank].clone()
            assert all_reduce_(mine) is mine
            check(mine, expected(dist.ReduceOp.SUM, inputs), size)


@pytest.mark.processes(2, together=True)
def test_views_subgroups_and_modes(world: World) -> None:
    with groups(world):
        own = dist.new_subgroups(1)[0]
        for name, view in VIEWS.items():
            mine = like_view(GRID * (world.rank + 1), view)
            all_reduce_(mine, own)
            all_reduce_(mine, dist.group.WORLD)
            assert torch.equal(mine, like_view(GRID * 3, view)), name
        conjugate = torch.full((3,), 1 + 2j).conj()
        assert all_reduce_(conjugate).eq(2 - 4j).all()
        assert all_reduce_(conjugate.imag).eq(-8).all()  # whose negative is in memory
        assert conjugate.eq(2 - 8j).all()
        with torch.profiler.profile() as profile:
            assert all_reduce_(torch.ones(3)).eq(2).all()
        assert "torchrelay::all_reduce_" in {event.name for event in profile.events() or ()}
        with FakeTensorMode() as mode:
            fake = all_reduce_(torch.ones(3))
        assert fake.fake_mode is mode and fake.shape == (3,)  # type: ignore[attr-defined]


@pytest.mark.processes(2, together=True)
def test_compiled_code_keeps_it(world: World) -> None:
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(str(graph.graph))
        return graph

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        all_reduce_(y)
        z = all_reduce_(y + 1, dist.group.WORLD)
        all_reduce_(x)
        return z

    with groups(world):
        want = torch.arange(4.0) * 8 + 2
        for backend in (keep, "aot_eager"):
            torch.compiler.reset()
            x = torch.arange(4.0)
            got = torch.compile(step, backend=backend, fullgraph=True)(x)
            assert torch.equal(got, want) and torch.equal(x, torch.arange(4.0) * 2)
        assert graphs[0].count("torchrelay.all_reduce_") == 3
        torch.compiler.reset()


@pytest.mark.processes(2, together=True)
def test_wrong_arguments(world: World) -> None:
    with groups(world) as gloo:
        with pytest.raises(ArgumentError, match="it needs a group of sml"):
            all_reduce_(torch.ones(3), gloo)
        with pytest.raises(ArgumentError, match=r"under torch\.no_grad"):
            all_reduce_(torch.ones(3, requires_grad=True))
        with pytest.raises(ArgumentError, match="no group 'none' of sml"):
            torch.ops.torchrelay.all_reduce_(torch.ones(3), "none")
        with pytest.raises(MismatchError, match="different calls"):
            all_reduce_(torch.ones(3 + world.rank))
        assert all_reduce_(torch.ones(3)).eq(2).all()
