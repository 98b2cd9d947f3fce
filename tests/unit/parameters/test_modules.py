"""Modules over a table as torch users expect them: signatures, copies, compilation, mistakes."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel
from torch.profiler import profile

from torchrelay.checkpoint import load, save
from torchrelay.errors import ArgumentError, UnavailableError, UnsupportedError
from torchrelay.parameters import Embedding, EmbeddingBag, KeyInit, Table, optim

ROWS, DIM = 10, 4


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Embedding, nn.Embedding), (EmbeddingBag, nn.EmbeddingBag)]
)
@pytest.mark.parametrize("function", ["__init__", "forward"])
def test_positional_arguments_are_torchs(ours: Any, theirs: Any, function: str) -> None:
    def positional(owner: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(getattr(owner, function)).parameters.values()
        return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert positional(ours) == positional(theirs)


def test_arguments_of_from_pretrained_are_torchs() -> None:
    rows = torch.randn(ROWS, DIM)
    embedding = Embedding.from_pretrained(rows, False, 3, 9.0, optimizer=optim.sgd(1.0))
    assert (embedding.padding_idx, embedding.max_norm) == (3, 9.0)
    assert embedding.weight.requires_grad and embedding.table.rule.kind == "sgd"
    bag = EmbeddingBag.from_pretrained(rows, True, 9.0, mode="sum")
    assert (bag.max_norm, bag.mode, bag.weight.requires_grad) == (9.0, "sum", False)
    for wrong in ({"freeze": True}, {"unknown": 1}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            Embedding.from_pretrained(rows, True, **wrong)


def test_what_makes_no_sense_is_refused() -> None:
    for device in ("cuda", "meta"):
        with pytest.raises(ArgumentError, match="host memory"):
            Embedding(ROWS, DIM, device=device)
    with pytest.raises(ArgumentError, match="given rows"):
        Embedding(ROWS, DIM, _weight=torch.zeros(ROWS, DIM + 1))
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        for option in (
            {"dtype": torch.float64},
            {"optimizer": optim.adam()},
            {"init": KeyInit()},
            {"name": "other"},
            {"apply_gradients": "step"},
        ):
            with pytest.raises(ArgumentError, match="only for a new table"):
                Embedding(ROWS, DIM, table=table, **option)
        Embedding(ROWS, DIM, table=table, device="cpu", dtype=torch.float32, sparse=True)
    unknown: tuple[dict[str, Any], ...] = ({"apply_gradients": "never"}, {"reduction": "max"})
    for option in unknown:
        with pytest.raises(ArgumentError, match="the choices are"):
            Table.create(ROWS, DIM, **option)


def test_pretrained_rows_and_torchs_state_dict() -> None:
    rows = torch.randn(ROWS, DIM)
    ours = Embedding.from_pretrained(rows, padding_idx=3, max_norm=9.0)
    keys = torch.tensor([[1, 3], [9, 0]])
    assert torch.equal(ours(input=keys), rows[keys]) and not ours(keys).requires_grad
    theirs = ours.to_torch()
    assert type(theirs) is nn.Embedding and (theirs.padding_idx, theirs.max_norm) == (3, 9.0)
    assert torch.equal(theirs.weight, rows) and not theirs.weight.requires_grad

    ours.reset_parameters()
    assert not ours(keys).any()  # a table with given rows is made of zeros
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(keys), rows[keys])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bias"):
        ours.load_state_dict(theirs.state_dict() | {"bias": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="10 vectors of 4"):
        ours.load_state_dict({"weight": rows[:3]})
    ours.close()

    bag = EmbeddingBag.from_pretrained(rows, mode="sum", freeze=False)
    assert torch.equal(bag(torch.tensor([[1, 2]])), rows[1:3].sum(0, keepdim=True))
    assert type(bag.to_torch()) is nn.EmbeddingBag and bag.to_torch().mode == "sum"
    bag.close()

    drawn = Embedding(1000, DIM, padding_idx=0, init=KeyInit("uniform", 1.0, 2.0))
    before = drawn(torch.arange(1000)).detach()
    drawn.reset_parameters()
    after = drawn(torch.arange(1000)).detach()
    assert not torch.equal(before, after) and not after[0].any()
    assert after[1:].min() >= 1 and after[1:].max() <= 2
    drawn.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_shards_are_staged_and_pickled(tmp_path: Any) -> None:
    with Table.create(ROWS, DIM, optimizer=optim.adam()) as table:
        table.set(torch.arange(ROWS), torch.randn(ROWS, DIM))
        rows = table.rows()
        torch.save(table.state_dict(), tmp_path / "table.pt")
        staged = StateDictStager().stage(table.state_dict())
        table.set(torch.arange(ROWS), torch.zeros(ROWS, DIM))
        for state in (staged, torch.load(tmp_path / "table.pt", weights_only=True)):
            assert torch.equal(state["rows"].rows, rows)
            table.load_state_dict(state)
            assert torch.equal(table.rows(), rows)


def test_distributed_checkpoints_own_functions_find_the_rows() -> None:
    model: Any = nn.Sequential(Embedding(ROWS, DIM, optimizer=optim.adam()), nn.Linear(DIM, 1))
    optimizer = model[0].table.optimizer()
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    rows = model[0].table.rows()
    state, _ = get_state_dict(model, [optimizer])
    assert torch.equal(state["0.rows"], rows) and rows.shape == (ROWS, 3 * DIM + 1)  # type: ignore[arg-type]
    model[0].reset_parameters()
    set_model_state_dict(model, state)
    assert torch.equal(model[0].table.rows(), rows)
    model[0].close()


def test_copies_and_pickles_say_what_to_do(tmp_path: Any) -> None:
    model: Any = nn.Sequential(Embedding(ROWS, DIM, optimizer=optim.sgd(1.0)), nn.Linear(DIM, 1))
    table = model[0].table
    for attempt in (
        lambda: copy.deepcopy(model),
        lambda: AveragedModel(model),
        lambda: torch.save(model, tmp_path / "model.pt"),
        lambda: pickle.dumps(model[0]),
        lambda: copy.copy(table),
    ):
        with pytest.raises(UnsupportedError, match=r"to_torch\(\)"):
            attempt()
    local = nn.Sequential(model[0].to_torch(), model[1])
    average = AveragedModel(local)
    average.update_parameters(local)
    keys = torch.arange(ROWS)
    assert torch.equal(average(keys), model(keys))
    assert torch.equal(pickle.loads(pickle.dumps(local))(keys), model(keys))
    model[0].close()


EXPORTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "export": lambda model, keys: torch.export.export(model, (keys,)),
    "strict export": lambda model, keys: torch.export.export(model, (keys,), strict=True),
    "trace": torch.jit.trace,
    "script": lambda model, keys: torch.jit.script(model),
    "fx": lambda model, keys: torch.fx.symbolic_trace(model),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("ours", [Embedding, EmbeddingBag])
def test_exports_say_what_to_do(ours: Any) -> None:
    keys = torch.tensor([[1, 2]])
    module = ours(ROWS, DIM, optimizer=optim.sgd(1.0))
    for model in (module, nn.Sequential(module, nn.Linear(DIM, 1))):
        for export in EXPORTS.values():
            with pytest.raises(Exception, match=r"to_torch\(\)") as raised:
                export(model, keys)
            assert "Unsupported" in type(raised.value).__name__  # Dynamo's has our message
    local = module.to_torch()
    assert torch.equal(torch.export.export(local, (keys,)).module()(keys), module(keys))
    module.close()


def test_a_closed_table_cannot_be_used() -> None:
    table = Table.create(ROWS, DIM, optimizer=optim.sgd(1.0))
    module, optimizer = Embedding(ROWS, DIM, table=table), table.optimizer()
    module(torch.tensor([1])).sum().backward()
    table.close()
    table.close()
    keys, values = torch.tensor([1]), torch.ones(1, DIM)
    for use in (
        lambda: table.pull(keys),
        lambda: table.push(keys, values),
        lambda: table.set(keys, values),
        lambda: table.is_local(keys),
        lambda: table.intent(keys, 1),
        table.advance_clock,
        lambda: table.clock,
        table.sync,
        table.metrics,
        table.rows,
        table.state_dict,
        lambda: table.load_state_dict({"weight": torch.zeros(ROWS, DIM)}),
        lambda: table.set_learning_rate(1.0),
        lambda: table.sample(1),
        lambda: module(keys),
        module.state_dict,
        optimizer.step,
    ):
        with pytest.raises(UnavailableError, match="has been closed"):
            use()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_cannot_use_a_table() -> None:
    with Table.create(ROWS, DIM) as table:
        child = os.fork()
        if child == 0:
            try:
                table.pull(torch.tensor([1]))
            except UnavailableError as error:
                table.close()  # leaves the table of the parent alone
                os._exit(42 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        assert not table.pull(torch.tensor([1])).any()


def test_names_tell_tables_apart() -> None:
    with Table.create(ROWS, DIM, name="users"):
        with pytest.raises(ArgumentError, match="'users' already"):
            Table.create(ROWS, DIM, name="users")
        with Table.create(ROWS, DIM) as one, Table.create(ROWS, DIM) as other:
            one.push(torch.tensor([1]), torch.ones(1, DIM))
            assert not other.pull(torch.tensor([1])).any()
    Table.create(ROWS, DIM, name="users").close()


@pytest.mark.parametrize("apply_gradients", ["step", "backward"])
def test_compiled_models_have_one_graph(apply_gradients: Any) -> None:
    with Table.create(
        ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients=apply_gradients
    ) as table:
        model: Any = nn.Sequential(
            Embedding(ROWS, DIM, padding_idx=2, table=table), nn.Linear(DIM, 1)
        )
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for keys in (torch.tensor([[1, 2, 1]]), torch.tensor([[3, 4, 2, 3]])):
            before = table.pull(keys)
            assert torch.equal(compiled(keys), model(keys))
            compiled(keys).sum().backward()
            if apply_gradients == "step":
                table.optimizer().step()
                table.weight.grad = None
            counts = (keys.unsqueeze(-1) == keys.unsqueeze(-2)).sum(-1, keepdim=True) * (
                keys != 2
            ).unsqueeze(-1)
            torch.testing.assert_close(table.pull(keys), before - counts * model[1].weight)
        bags = EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=2, table=table)
        keys = torch.tensor([[1, 2, 1]])
        assert torch.equal(
            torch.compile(bags, fullgraph=True, backend="aot_eager")(keys), bags(keys)
        )


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_lookups_of_equal_keys_have_a_gradient_each(backend: str) -> None:
    """The compiler may look equal keys up once, but not drop a gradient that equals another."""
    torch._dynamo.reset()
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients="backward") as table:
        table.set(torch.arange(ROWS), torch.ones(ROWS, DIM))
        module, keys = Embedding(ROWS, DIM, max_norm=1.0, table=table), torch.tensor([1, 2])

        def twice(keys: Tensor) -> Tensor:
            return module(keys).sum() + module(keys).sum()

        result = torch.compile(twice, fullgraph=True, backend=backend)(keys)
        before = table.pull(keys)
        torch.testing.assert_close(result, twice(keys))
        result.backward()
        torch.testing.assert_close(table.pull(keys), before - 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", [optim.sgd(0.5), optim.adagrad(0.5), optim.adam(0.5)])
def test_half_precision_rows_are_trained_saved_and_loaded(rule: Any, dtype: torch.dtype) -> None:
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = Embedding(ROWS, DIM, _weight=weight, dtype=dtype, optimizer=rule)
    exact = Embedding(ROWS, DIM, _weight=weight.float(), optimizer=rule)
    keys = torch.tensor([1, 2, 1])
    assert ours(keys).dtype is dtype
    for module in (ours, exact):
        optimizer = module.table.optimizer()
        module(keys).square().sum().backward()
        optimizer.step()
    expected = exact(keys)
    torch.testing.assert_close(ours(keys).float(), expected, rtol=2e-2, atol=2e-2)
    state = ours.state_dict()
    other = Embedding(ROWS, DIM, dtype=dtype, optimizer=rule)
    other.load_state_dict(state)
    assert torch.equal(other.table.rows().view(torch.int16), state["rows"].view(torch.int16))
    for module in (ours, exact, other):
        module.close()


def test_rows_are_on_the_host_whatever_the_default_device_is(tmp_path: Any) -> None:
    host = torch.device("cpu")
    with torch.device("meta"):
        embedding = Embedding(3000, DIM, padding_idx=0, optimizer=optim.sgd(1.0))
        embedding.reset_parameters()
        table, optimizer = embedding.table, embedding.table.optimizer()
        for count in (3, 2000):  # few keys, and enough to mark them
            keys = torch.arange(1, 1 + count, device=host)
            before = table.pull(keys)
            embedding(keys).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(table.pull(keys), before - 1.0)
        table.push(keys, torch.ones(count, DIM, device=host))
        table.set(keys, before)
        assert table.is_local(keys)
        save(embedding, tmp_path)
        table.set(keys, -before)
        load(embedding, tmp_path)
        assert torch.equal(embedding.to_torch().weight[1 : 1 + count].detach(), before)
        assert not table.pull(keys - keys).any()
        embedding.close()


def test_a_replaced_weight_is_refused() -> None:
    keys = torch.tensor([1, 2, 1])
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        module = Embedding(ROWS, DIM, table=table)
        assert torch.func.functional_call(module, {"weight": module.weight}, keys).sum() == 0
        with pytest.raises(UnsupportedError, match="has replaced the weight of a table"):
            torch.func.functional_call(module, {"weight": torch.randn(ROWS, DIM)}, keys)


INITIALIZERS: dict[str, Callable[[Tensor], object]] = {
    "constant_": lambda w: nn.init.constant_(w, 1.0),
    "eye_": nn.init.eye_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "normal_": nn.init.normal_,
    "ones_": nn.init.ones_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.5),
    "trunc_normal_": nn.init.trunc_normal_,
    "uniform_": nn.init.uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "zeros_": nn.init.zeros_,
}


def _assign_data(weight: Tensor) -> None:
    weight.data = torch.ones(ROWS, DIM)


FILLS: dict[str, Callable[[Tensor], object]] = {
    "assignment to data": _assign_data,
    "copy_": lambda w: w.data.copy_(torch.ones(ROWS, DIM)),
    "fill_": lambda w: w.detach().fill_(1.0),
    "normal_": lambda w: w.data.normal_(),
    "__setitem__": lambda w: w.data.__setitem__(0, 0.0),
}


@pytest.mark.parametrize(
    ("name", "fill"), [*INITIALIZERS.items(), *FILLS.items()], ids=[*INITIALIZERS, *FILLS]
)
def test_initializers_are_refused_and_named(name: str, fill: Callable[[Tensor], object]) -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        module = Embedding(ROWS, DIM, table=table)
        with pytest.raises(UnsupportedError, match=rf"^{name}: .* table\.load_state_dict"):
            fill(module.weight)
        rows = nn.init.xavier_uniform_(torch.empty(ROWS, DIM))  # what the message advises
        table.load_state_dict({"weight": rows})
        assert torch.equal(module(torch.arange(ROWS)), rows)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("linalg_vector_norm", lambda w: torch.linalg.vector_norm(x=w)),
        ("add", lambda w: torch.add(input=torch.ones(1), other=w)),
        ("norm", lambda w: w.data.norm()),
        ("double", lambda w: w.double().norm()),
        ("T", lambda w: torch.ones(2, DIM) @ w.T),
        ("numpy", lambda w: w.detach().numpy()),
        ("clone", lambda w: w.detach().clone()),
    ],
)
def test_computing_with_the_weight_is_refused(name: str, use: Callable[[Tensor], object]) -> None:
    with (
        Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table,
        pytest.raises(UnsupportedError, match=rf"^{name}: .* Look rows up"),
    ):
        use(table.weight)


def test_bags_scale_gradients_by_frequency() -> None:
    """Against a sum of nn.Embedding's: torch's own bags take counts of other keys on the CPU."""
    weight = torch.randn(ROWS, DIM)
    theirs = nn.Embedding(ROWS, DIM, scale_grad_by_freq=True, _weight=weight.clone())
    ours = EmbeddingBag(
        ROWS, DIM, scale_grad_by_freq=True, mode="sum", _weight=weight, optimizer=optim.sgd(1.0)
    )
    optimizer = ours.table.optimizer()
    keys = torch.tensor([[1, 1, 2], [1, 3, 3]], dtype=torch.int32)
    theirs(keys).sum(1).square().sum().backward()
    ours(keys.flatten(), torch.tensor([0, 3], dtype=torch.int32)).square().sum().backward()
    optimizer.step()
    assert theirs.weight.grad is not None
    torch.testing.assert_close(ours.table.pull(torch.arange(ROWS)), weight - theirs.weight.grad)
    ours.close()


def test_casts_profiles_and_transforms() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        optimizer = table.optimizer()
        model = nn.Sequential(Embedding(ROWS, DIM, table=table), nn.Linear(DIM, 1))
        weight = model[0].weight
        model.to("cpu").double().float()
        assert model[0].weight is weight and "10 rows of 4" in repr(weight)
        with profile() as profiler, torch.autocast("cpu", torch.bfloat16):
            model(torch.tensor([1])).sum().backward()
        assert any(event.name == "torchrelay::table_rows" for event in profiler.events())
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            torch.func.grad(lambda x: (model[0](torch.tensor([1])) * x).sum())(torch.ones(1))
        with torch.inference_mode():
            assert not model(torch.tensor([1])).requires_grad
        with pytest.raises(ArgumentError, match="comes from backward"):
            weight.grad = torch.zeros(1, DIM)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_inductor_trains_the_rows_that_eager_mode_trains() -> None:
    torch._dynamo.reset()
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        model = nn.Sequential(Embedding(ROWS, DIM, table=table), nn.Tanh())
        optimizer = table.optimizer()
        keys = torch.tensor([[1, 2, 1]])
        before = table.pull(keys)
        result = torch.compile(model, fullgraph=True)(keys)
        torch.testing.assert_close(result, before.tanh())
        result.sum().backward()
        optimizer.step()
        counts = torch.tensor([[2.0, 1.0, 2.0]]).unsqueeze(-1)
        torch.testing.assert_close(table.pull(keys), before - counts * (1 - before.tanh() ** 2))
