"""What a load does with keys that only the state or only the checkpoint has, and with states of any
shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from torchrelay.checkpoint import async_save, load, save
from torchrelay.checkpoint._tools import read_state
from torchrelay.deferred import deferred_init, is_deferred, materialize_module
from torchrelay.errors import ArgumentError, MismatchError


def _net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def test_a_wrong_prefix_is_an_error(tmp_path: Path) -> None:
    source = _net()
    save({"model": source, "step": 3}, tmp_path / "c")
    for target in (_net(), deferred_init(_net)):
        with pytest.raises(MismatchError, match=r"lacks 'modle\.0\.weight'.* and 4 more"):
            load(target, tmp_path / "c", prefix="modle.")
        found = load(target, tmp_path / "c", prefix="modle.", strict=False)
        assert len(found.missing_keys) == 7 and not found.unexpected_keys
    assert is_deferred(target)
    assert load(target, tmp_path / "c", prefix="model.") == ([], [])
    assert torch.equal(target[0].weight, source[0].weight)


def test_a_missing_key_names_the_prefix_or_the_nearest_keys(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    save({"model": linear, "ema": linear, "step": 3}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"has; prefix='model\.' or prefix='ema\.' finds them"):
        load(torch.nn.Linear(2, 2), tmp_path / "c")
    save(torch.nn.ModuleDict({"module": linear}), tmp_path / "parallel")
    with pytest.raises(MismatchError, match=r"lacks 'model\.weight'.*it has 'module\.weight', st"):
        load({"model.weight": torch.ones(2, 2)}, tmp_path / "parallel")
    # A prefix that would lose what has been found is not offered.
    save({"model": {"module": linear}, "step": 3}, tmp_path / "nested")
    with pytest.raises(MismatchError, match=r"has; it has 'model\.module\.weight', strict=False"):
        load({"weight": torch.ones(2, 2), "step": 0}, tmp_path / "nested")
    save({"weight": torch.ones(2, 2), "step": 3}, tmp_path / "plain")
    with pytest.raises(MismatchError, match=r"has; it has 'weight', strict=False"):
        load({"module.weight": torch.ones(2, 2), "step": 0}, tmp_path / "plain")
    with pytest.raises(MismatchError, match=r"has; strict=False"):
        load({"unlike_any": torch.ones(2, 2)}, tmp_path / "plain")


@pytest.mark.parametrize(
    ("launcher", "environ"),
    [
        ("torchrun", {"RANK": "0", "WORLD_SIZE": "2"}),
        ("Open MPI", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}),
        ("MPICH", {"PMI_RANK": "1", "PMI_SIZE": "2"}),
        ("Slurm", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}),
    ],
)
@pytest.mark.parametrize("save_it", [save, async_save])
def test_several_processes_without_a_group_cannot_save_to_one_path(
    save_it: Any,
    launcher: str,
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=rf"{launcher} has started 2 processes, .*no_dist=True"):
        save_it({"step": 3}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    handle = save_it({"step": 3}, tmp_path / "c", no_dist=True)
    if handle is not None:
        handle.result()
    state = {"step": 0}
    load(state, tmp_path / "c")
    assert state == {"step": 3}


def test_what_is_missing_and_unexpected_is_returned(tmp_path: Path) -> None:
    source = _net()
    saved = {key: value for key, value in source.state_dict().items() if key != "0.bias"}
    save({"model": {**saved, "extra": torch.ones(1)}, "step": 3}, tmp_path / "c")

    with pytest.raises(MismatchError, match=r"lacks 'model.0.bias', which the state has"):
        load({"model": _net()}, tmp_path / "c", initialize_missing=True)  # it is not deferred
    target = deferred_init(_net)
    with pytest.raises(MismatchError, match=r"has 'model.extra', which this Sequential lacks"):
        load({"model": target}, tmp_path / "c", initialize_missing=True)
    found = load({"model": target}, tmp_path / "c", strict=False)
    assert found == (["model.0.bias"], ["model.extra", "step"])
    assert torch.equal(target[0].weight, source[0].weight)
    assert is_deferred(target[0].bias) and not is_deferred(target[1])

    torch.manual_seed(5)
    eager = _net()
    torch.manual_seed(5)
    target = deferred_init(_net)
    load({"model": target}, tmp_path / "c", strict=False)
    materialize_module(target)
    assert torch.equal(target[0].bias, eager[0].bias)  # as it would have been
    assert torch.equal(target[0].weight, source[0].weight)


def _tied() -> Any:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("kept", ["0.weight", "1.weight"])
def test_one_name_of_a_tied_tensor_is_enough(kept: str, tmp_path: Path) -> None:
    source = _tied()
    save({kept: source[0].weight}, tmp_path / "c")
    for make in (_tied, lambda: deferred_init(_tied)):
        for of in (lambda model: model, lambda model: model.state_dict()):
            model = make()
            if is_deferred(model) and of(model) is not model:
                continue
            assert load(of(model), tmp_path / "c") == ([], [])
            assert torch.equal(model[1].weight, source[0].weight)
            assert model[1].weight is model[0].weight
    apart = _tied()
    apart[1].weight = torch.nn.Parameter(torch.zeros(9, 4))
    with pytest.raises(MismatchError, match="lacks"):
        load(apart, tmp_path / "c")


def test_the_second_name_of_a_tensor_that_a_hook_may_rename_is_not_missing(tmp_path: Path) -> None:
    source = _tied()
    save({"0.weight": source[0].weight}, tmp_path / "c")
    for model in (_tied(), deferred_init(_tied)):
        model[0].register_load_state_dict_pre_hook(lambda *_: None)
        assert load(model, tmp_path / "c") == ([], [])
        assert torch.equal(model[1].weight, source[0].weight)
        assert model[1].weight is model[0].weight


def test_a_snapshot_of_a_tied_transformer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    source = transformers.GPT2LMHeadModel(config).eval()
    source.save_pretrained(tmp_path / "snapshot")
    with torch.no_grad():
        expected = source(torch.arange(8)[None]).logits
    for made in (
        transformers.GPT2LMHeadModel(config),
        deferred_init(transformers.GPT2LMHeadModel, config),
    ):
        assert load(made, tmp_path / "snapshot") == ([], [])
        assert made.lm_head.weight is made.transformer.wte.weight
        with torch.no_grad():
            assert torch.equal(made.eval()(torch.arange(8)[None]).logits, expected)


class _Pair(NamedTuple):
    first: torch.Tensor
    second: Any


def _state(value: float) -> dict[Any, Any]:
    torch.manual_seed(int(value))
    return {
        "deep": {"er": {"model": torch.nn.Linear(2, 2)}, "list": [torch.nn.Linear(1, 1), value]},
        "pair": (torch.full((2,), value), value, [torch.full((1,), value)]),
        "named": _Pair(torch.full((2,), value), {"value": value}),
        7: {8: value, "text": str(value)},
        "scheduler": {"inner": torch.optim.lr_scheduler.StepLR(_sgd(value), int(value) + 1)},
    }


def _sgd(value: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=0.1 + value)


def test_states_of_any_shape(tmp_path: Path) -> None:
    saved, found = _state(1.0), _state(2.0)
    save(saved, tmp_path / "c")
    pair, named = found["pair"], found["named"]
    assert load(found, tmp_path / "c") == ([], [])
    for one, other in (
        (found["deep"]["er"]["model"], saved["deep"]["er"]["model"]),
        (found["deep"]["list"][0], saved["deep"]["list"][0]),
    ):
        assert torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)
    assert found["deep"]["list"][1] == 1.0 and found[7] == {8: 1.0, "text": "1.0"}
    assert type(found["pair"]) is tuple and found["pair"][1] == 1.0
    assert found["pair"][0] is pair[0] and pair[0].tolist() == [1.0, 1.0]  # filled in place
    assert pair[2][0].tolist() == [1.0]
    assert type(found["named"]) is _Pair and found["named"].second == {"value": 1.0}
    assert named.first.tolist() == [1.0, 1.0]
    assert found["scheduler"]["inner"].step_size == 2


def test_a_state_that_cannot_be_changed_is_refused(tmp_path: Path) -> None:
    import types

    save({"a": torch.ones(2), "b": {"c": 1}}, tmp_path / "c")
    state = {"a": torch.zeros(2), "b": types.MappingProxyType({"c": 0})}
    with pytest.raises(ArgumentError, match=r"b\.c: .* in a mappingproxy"):
        load(state, tmp_path / "c")
    assert not state["a"].any()  # type: ignore[attr-defined]


def test_states_with_the_same_keys_are_not_taken_for_one_another(tmp_path: Path) -> None:
    """A save uses what it knows of the state that was saved last, if the layout is the same."""
    tensor, other = torch.arange(6.0), torch.zeros(6)
    states: list[dict[str, Any]] = [
        {"x": {0: tensor, 1: other}},
        {"x": [tensor, other]},
        {"x": [tensor, tensor]},
        {"x": [tensor.reshape(2, 3), other]},
        {"x": [tensor.to(torch.int32), other]},
        {"x": [torch.zeros(0), other]},
        {"x": [tensor, 7]},
    ]
    for index, state in enumerate(states):
        save(state, tmp_path / f"x{index}", fsync=False)
        assert repr(read_state(str(tmp_path / f"x{index}"))) == repr(state)
