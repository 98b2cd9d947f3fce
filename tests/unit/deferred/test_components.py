"""Deferred modules with each of the other components; ``checkpoint`` and ``switching`` are in their
own tests, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay import mpi, training
from torchrelay.checkpoint import load, save
from torchrelay.deferred import (
    deferred_init,
    fake,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchrelay.errors import ArgumentError, DeferredError
from torchrelay.parameters import Embedding, EmbeddingBag
from torchrelay.switching.models._factory import Factory


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), Embedding(4, 3, padding_idx=1), nn.Linear(3, 2))


def _bags() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), EmbeddingBag(4, 3), nn.Linear(3, 2))


def _assert_alike(module: nn.Module, eager: nn.Module) -> None:
    mine, theirs = dict(module.named_parameters()), dict(eager.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if not name.startswith("1."):
            assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("build", [_model, _bags])
def test_a_table_is_real_at_once(build: Callable[[], nn.Sequential]) -> None:
    torch.manual_seed(6)
    eager = build()
    torch.manual_seed(6)
    module = deferred_init(build)
    assert is_deferred(module)
    assert not fake.is_fake(module[1].weight)  # type: ignore[arg-type]
    keys = torch.arange(4).view(2, 2)
    assert torch.equal(module[1](keys), eager[1](keys))
    materialize_module(module)
    _assert_alike(module, eager)
    optimizer = module[1].table.optimizer()  # type: ignore[operator, union-attr]
    before = module[1](keys).detach().clone()
    module[1](keys).sum().backward()
    optimizer.step()
    assert not torch.equal(module[1](keys), before)
    for one in (module, eager):
        one[1].close()  # type: ignore[operator]


def test_a_checkpoint_of_a_model_with_a_table_is_loaded_into_a_deferred_one(tmp_path: Path) -> None:
    eager = _model()
    save(eager, tmp_path / "ckpt")
    module = deferred_init(_model)
    assert load(module, tmp_path / "ckpt") == ([], [])
    _assert_alike(module, eager)
    keys = torch.arange(4)
    assert torch.equal(module[1](keys), eager[1](keys))
    for one in (module, eager):
        one[1].close()  # type: ignore[operator]


@pytest.mark.parametrize("materializes_first", [True, False])
def test_optimizers_of_training_take_deferred_parameters(materializes_first: bool) -> None:
    def trained(build: Callable[[], Any], materialize: Callable[[nn.Module], None]) -> nn.Module:
        torch.manual_seed(6)
        module: nn.Module = build()
        inner = training.AnyPrecisionAdamW(module.parameters(), lr=0.1)
        if materializes_first:
            materialize(module)
        for _ in range(3):
            inner.zero_grad()
            module(torch.ones(2, 3)).square().sum().backward()
            inner.step()
        materialize(module)
        return module

    eager = trained(lambda: nn.Linear(3, 3), lambda module: None)
    module = trained(lambda: deferred_init(nn.Linear, 3, 3), materialize_module)
    _assert_alike(module, eager)


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
@pytest.mark.parametrize(
    "use",
    [
        lambda kind: kind(4, 3).reset_parameters(),
        lambda kind: kind(4, 3).to_torch().weight,
        lambda kind: kind.from_pretrained(torch.randn(4, 3)).to_torch().weight,
        lambda kind: kind(4, 3).load_state_dict({"weight": torch.randn(4, 3)}),
        lambda kind: kind(4, 3).load_state_dict(nn.Embedding(4, 3).state_dict()),
        lambda kind: kind(4, 3).state_dict()["rows"],
        lambda kind: kind(4, 3).table.rows(),
        lambda kind: kind(4, 3).table.pull(torch.arange(3)),
        lambda kind: kind(4, 3).table.push([1], torch.randn(1, 3)),
        lambda kind: kind(4, 3).table.set(torch.arange(2), torch.randn(2, 3)),
    ],
)
def test_what_a_table_offers_works_inside_deferred_init(
    kind: Any, use: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in eager mode: the rows are real, and the arguments may be deferred."""
    made: list[Any] = []

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2))
        with monkeypatch.context() as patch:
            start = kind.__init__

            def started(self: Any, *args: Any, **options: Any) -> None:
                start(self, *args, **options)
                made.append(self)

            patch.setattr(kind, "__init__", started)
            found = use(kind)
        assert not isinstance(found, torch.Tensor) or not fake.is_fake(found)
        module.append(nn.Linear(2, 2))
        return module

    torch.manual_seed(6)
    eager = build()
    torch.manual_seed(6)
    module = deferred_init(build)
    materialize_module(module)
    _assert_alike(module, eager)
    one, other = made
    assert torch.equal(one.table.rows(), other.table.rows())
    for table in made:
        table.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda comm, t: comm.Bcast_(t, 0),
        lambda comm, t: comm.Allreduce(t, mpi.MPI_SUM),
        lambda comm, t: comm.Allgather(t, 0),
        lambda comm, t: comm.Reduce_(t, mpi.MPI_SUM, 0),
        lambda comm, t: comm.Scatter(t, 0, 2, 0),
        lambda comm, t: comm.Alltoall(t, 0, 0, 2),
        lambda comm, t: comm.Isend(t, 0),
        lambda comm, t: comm.Irecv(t, 0),
        lambda comm, t: comm.Recv(t, 0),
        lambda comm, t: comm.Sendrecv(t, 0, 0),
    ],
)
def test_mpi_refuses_to_send_what_has_no_values(call: Callable[[Any, torch.Tensor], Any]) -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        call(mpi.COMM_WORLD, module.weight)
        return module

    torch.manual_seed(6)
    state = torch.get_rng_state()
    with pytest.raises(ArgumentError, match=r"no values yet; communicate after materialize_module"):
        deferred_init(build)
    assert torch.equal(torch.get_rng_state(), state)
    module = deferred_init(nn.Linear, 2, 2)
    with pytest.raises(ArgumentError, match=r"is deferred and has no values yet"):
        call(mpi.COMM_WORLD, module.weight)
    materialize_module(module)
    mpi.COMM_WORLD.Allreduce(module.weight.detach(), mpi.MPI_SUM)
    with fake.fake_mode(), pytest.raises(ArgumentError, match=r"fake and has no values; communi"):
        call(mpi.COMM_WORLD, torch.ones(2, 2))


def test_a_skeleton_of_switching_is_deferred() -> None:
    factory = Factory.of("torch.nn:Linear", {"in_features": 3, "out_features": 2}, seed=6)
    module = factory.build_skeleton()
    assert is_deferred(module)
    materialize_module(module)
    _assert_alike(module, factory.build_module())


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 3)


def _in_fake_mode() -> nn.Module:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return nn.Linear(2, 3)


@pytest.mark.parametrize("build", [_on_meta, _in_fake_mode])
def test_what_others_left_without_values_is_refused(
    build: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    module = build()
    with pytest.raises(DeferredError, match=r"weight, bias: on the meta device.*deferred_init"):
        materialize_module(module)
    with pytest.raises(DeferredError, match="meta device"):
        materialize_tensor(next(module.parameters()))
    both = nn.Sequential(module, deferred_init(nn.Linear, 2, 2))
    materialize_module(both)
    assert not is_deferred(both)
    assert "0.weight, 0.bias; they stay as they are" in caplog.text


def test_values_are_read_outside_too() -> None:
    torch.manual_seed(6)
    eager = torch.rand(3)
    torch.manual_seed(6)
    deferred = deferred_init(torch.rand, 3)
    assert deferred.tolist() == eager.tolist()
    assert f"{deferred[1]:.3f} {deferred[1]} {deferred.sum()}" == (
        f"{eager[1]:.3f} {eager[1]} {eager.sum()}"
    )
    assert float(deferred[2]) == float(eager[2])
    with pytest.raises(DeferredError, match=r"numpy\(\).*Materialize it first"):
        deferred.numpy()
    assert fake.is_fake(deferred)
