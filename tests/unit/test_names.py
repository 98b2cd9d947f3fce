"""Names that do not exist: each error says which there are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchrelay import aggregation, checkpoint, mpi, parameters, switching, training
from torchrelay.errors import ArgumentError
from unit.test_public_api import PUBLIC

_SUBMODULES = {"": {*(name for name in PUBLIC if "." not in name)}, "aggregation": {"switch"}}
_SUBMODULES |= {"deferred": {"fake"}}


@pytest.mark.parametrize("component", ["", *sorted(PUBLIC)])
def test_dir_shows_what_is_public_and_nothing_else(component: str) -> None:
    module = importlib.import_module(f"torchrelay.{component}".rstrip("."))
    assert set(dir(module)) == {*module.__all__, *_SUBMODULES.get(component, ())}
    for name in dir(module):
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing_like_it'"):
        _ = module.nothing_like_it


def parameter() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(1))]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(parameter(), lr=0.1)


@pytest.mark.parametrize(
    ("call", "known"),
    [
        (aggregation.Options, "packet_timeout_s"),
        (lambda **wrong: parameters.Embedding(4, 2, **wrong), "optimizer"),
        (lambda **wrong: parameters.EmbeddingBag(4, 2, **wrong), "apply_gradients"),
        (lambda **wrong: parameters.Table.create(4, 2, **wrong), "init"),
        (parameters.optim.adam, "betas"),
        (lambda **wrong: training.AnyPrecisionAdamW(parameter(), **wrong), "momentum_dtype"),
        (lambda **wrong: training.SlowMomentumOptimizer(sgd(), **wrong), "slowmo_freq"),
        (lambda **wrong: training.SlowMoState(None, **wrong), "sync_grads"),
        (training.GossipGraDState, "topology"),
        (lambda **wrong: training.DiLoCo([], sgd(), sgd(), 1, **wrong), "fragment_sync_delay"),
        (
            lambda **wrong: training.LocalSGD(torch.nn.Identity(), sgd(), 1, **wrong),
            "process_group",
        ),
        (lambda **wrong: checkpoint.save({}, "nowhere", **wrong), "keep"),
        (lambda **wrong: checkpoint.async_save({}, "nowhere", **wrong), "keep"),
        (lambda **wrong: checkpoint.load({}, "nowhere", **wrong), "strict"),
        (lambda **wrong: checkpoint.Writer("nowhere", **wrong), "fsync"),
        (lambda **wrong: checkpoint.Reader("nowhere", **wrong), "verify"),
        (lambda **wrong: switching.Switcher(switching.ModelStore(), **wrong), "arena_bytes"),
    ],
)
def test_an_unknown_option_lists_the_known_ones(call: Callable[..., Any], known: str) -> None:
    with pytest.raises(TypeError, match=rf"\w\(\) has no option 'qqq'; there are .*\b{known}\b"):
        call(qqq=1)
    with pytest.raises(TypeError, match=rf"did you mean '{known}'\?"):
        call(**{f"{known}_": 1})


@pytest.mark.parametrize(
    ("wrong", "right"), [("Get_rank", "rank"), ("Get_size", "size"), ("allreduce", "Allreduce")]
)
def test_names_of_other_mpi_bindings_are_suggested(wrong: str, right: str) -> None:
    with pytest.raises(AttributeError, match=f"did you mean '{right}'"):
        getattr(mpi.COMM_WORLD, wrong)
    with pytest.raises(AttributeError, match="did you mean 'MPI_SUM'"):
        _ = mpi.SUM  # type: ignore[attr-defined, unused-ignore]


def test_a_number_is_no_tensor() -> None:
    with pytest.raises(ArgumentError, match=r"not float; pass torch\.tensor\(1\.0\)"):
        mpi.COMM_WORLD.Allreduce(1.0, mpi.MPI_SUM)  # type: ignore[arg-type]


def test_a_topology_is_one_of_the_enum() -> None:
    with pytest.raises(ArgumentError, match=r"GossipTopology\.CUBE, GossipTopology\.DISSEM"):
        training.GossipGraDState(topology="cube")  # type: ignore[arg-type]


def test_update_rules_are_listed() -> None:
    with pytest.raises(AttributeError, match=r"mean 'adam'\? There are adagrad, adam, add"):
        _ = parameters.optim.adamw


def test_an_embedding_is_a_context_manager() -> None:
    with parameters.Embedding(4, 2) as embedding:
        table = embedding.table
    with pytest.raises(Exception, match="closed"):
        table.pull(torch.arange(2))
    with parameters.Table.create(4, 2, optimizer=parameters.optim.sgd(1.0)) as table:
        with parameters.Embedding(4, 2, table=table):
            pass
        assert table.pull(torch.arange(2)).shape == (2, 2)  # not the embedding's
