"""A stored model is the eager one bit for bit, also when another module is bound to its bytes."""

from __future__ import annotations

import gc
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_model

import switching_models as models
from torchrelay import checkpoint
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    CorruptionError,
    MismatchError,
    ModelError,
    NotFoundError,
    StorageError,
    TorchRelayError,
    UnsupportedError,
)
from torchrelay.switching import InputSpec, ModelStore, Switcher
from torchrelay.switching.daemon._served import merged_copies
from torchrelay.switching.device._host import HostMemory
from torchrelay.switching.models._code import capture, use
from torchrelay.switching.models._factory import Factory
from torchrelay.switching.models._layout import Grouped, layout_of
from torchrelay.switching.models._store import StoredModel
from torchrelay.switching.worker._binding import Binding
from torchrelay.switching.worker._runner import _named

TOKENS = torch.arange(24).reshape(2, 12)


def bound(model: StoredModel) -> Any:
    """A skeleton over the model's bytes, as a worker makes it."""
    grouped = Grouped.one_group(pickle.loads(pickle.dumps(model.layout)))
    memory = HostMemory.allocate(model.size_bytes)
    for copy in merged_copies(model, grouped, 0):
        memory.tensor()[copy.offset_bytes :][: copy.source.numel()] = copy.source
    binding = Binding(model.factory.build_skeleton(), grouped, memory)
    binding.bind([0])
    return binding.module


def test_a_bound_skeleton_computes_what_the_eager_model_does() -> None:
    with ModelStore() as store:
        model = store.add("mixed", models.mixed, inputs={"tokens": TOKENS}, seed=3)
        torch.manual_seed(3)
        eager = models.mixed().eval()
        with torch.inference_mode():
            expected, got = eager(TOKENS), bound(model)(TOKENS)
        assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize(
    "name", ["in_a_global", "in_a_cache", "in_a_class", "in_a_deque", "in_slots"]
)
def test_a_model_that_keeps_a_table_elsewhere_is_built_with_memory(name: str) -> None:
    x = torch.ones(1, 4)
    with ModelStore() as store:
        model = store.add(name, getattr(models, name), inputs={"x": x}, seed=3)
        models.forget_tables()
        torch.manual_seed(3)
        eager = getattr(models, name)().eval()
        with torch.inference_mode():
            expected = eager(x)
            models.forget_tables()
            for _ in range(2):  # with the tables of the first, too
                assert torch.equal(bound(model)(x), expected)


def test_ties_and_dtypes_are_kept_and_each_storage_is_kept_once() -> None:
    with ModelStore() as store:
        model = store.add("mixed", models.mixed, inputs={"tokens": TOKENS})
        module = bound(model)
        assert module.head.weight is module.embed.weight
        assert module.narrow.weight.dtype is torch.bfloat16 and module.mask.dtype is torch.bool
        assert [spec.paths for spec in model.layout.tensors if len(spec.paths) > 1] == [
            ("embed.weight", "head.weight")
        ]
        assert all(offset % 512 == 0 for offset in model.offsets)
        plain = sum(
            t.untyped_storage().nbytes()
            for t in {p.data_ptr(): p for p in module.parameters()}.values()
        )
        assert model.size_bytes < 40 * 512 + plain


def test_views_of_one_storage_stay_views() -> None:
    module: Any = torch.nn.Module()
    whole = torch.arange(12.0).reshape(3, 4)
    module.register_buffer("whole", whole)
    module.register_buffer("column", whole[:, 1])
    layout, storages = layout_of(module)
    assert layout.storages == (48,) and len(layout.tensors) == 2
    data = torch.zeros(512 + 48, dtype=torch.uint8)[512:]
    data.copy_(storages[0].bytes())
    storages[0].rebind(data)
    module.whole[2, 1] = 100.0
    assert module.column.tolist() == [1.0, 5.0, 100.0] and module.column.stride() == (4,)


def drawn_by_numpy() -> str:
    return repr(np.random.get_state())


def test_tensors_outside_of_modules_and_numpy_draws_are_those_of_the_store() -> None:
    x = torch.randn(2, 8)
    with ModelStore() as store:
        np.random.seed(1)
        drawn = drawn_by_numpy()
        model = store.add("helped", models.helped, inputs={"x": x}, seed=5)
        assert drawn_by_numpy() == drawn
        torch.manual_seed(5)
        np.random.seed(5)
        expected = models.helped()
        with torch.inference_mode():
            assert torch.equal(bound(model)(x), expected(x))


def test_a_factory_gets_the_arguments_of_the_store_however_often_it_is_called() -> None:
    config = {"width": 4}
    with ModelStore() as store:
        x = torch.ones(1, 4)
        model = store.add("popping", models.popping, kwargs={"config": config}, inputs={"input": x})
        assert config == {"width": 4}
        config["width"] = 5
        for _ in range(2):
            assert bound(model)(x).shape == (1, 8)


def test_a_factory_is_what_its_name_leads_to() -> None:
    x = torch.ones(1, 4)
    with ModelStore() as store:
        model = store.add("once", models.NamedOnce.build, inputs={"x": x})
        assert isinstance(bound(model), models.NamedOnce)
        with pytest.raises(ArgumentError, match="in_a_class, which is another one"):
            store.add("alias", models.alias, inputs={"x": x})


def test_imports_within_a_forward_pass_are_those_of_its_own_model(tmp_path: Path) -> None:
    code = "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
    code += "        from beside_of_net import K\n        return K\n"
    factories = []
    for k, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        (folder / "net.py").write_text(code)
        (folder / "beside_of_net.py").write_text(f"K = {k}\n")
        factories.append(Factory.of(f"{folder}/net.py:Net", {"in_features": 1, "out_features": 1}))
    nets = [one.build() for one in factories]
    for k in (0, 1, 0):
        use(factories[k].code)
        assert nets[k](torch.ones(1)) == k


def test_models_that_threads_build_have_their_own_modules_and_random_numbers(
    tmp_path: Path,
) -> None:
    code = "import time, torch\ntime.sleep(0.01)\nfrom size_of_net import K\ndef net():\n"
    code += "    first = torch.nn.Linear(1, K)\n    time.sleep(0.01)\n"
    code += "    return torch.nn.Sequential(first, torch.nn.Linear(K, 1))\n"
    references = []
    for k in range(1, 5):
        folder = tmp_path / str(k)
        folder.mkdir()
        (folder / "net.py").write_text(code)
        (folder / "size_of_net.py").write_text(f"K = {k}\n")
        references.append(f"{folder}/net.py:net")
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda one: Factory.of(one).build(), references))
    for net, reference in zip(built, references, strict=True):
        again = Factory.of(reference).build()
        assert all(map(torch.equal, net.parameters(), again.parameters()))


def test_each_file_of_models_is_a_module_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import torch\ndef net():\n    return torch.nn.Linear(1, {})\n"
    folders = [tmp_path / name for name in ("v1.2", "v1_2")]
    x = torch.ones(1, 1)
    with ModelStore() as store:
        added = []
        for width, folder in enumerate(folders, 1):
            folder.mkdir()
            (folder / "net.py").write_text(code.format(width))
            monkeypatch.chdir(folder)
            for reference in (f"{folder}/net.py:net", "net.py:net"):
                added.append(
                    (width, store.add("net", reference, inputs={"input": x}, replace=True))
                )
        monkeypatch.chdir(tmp_path)  # where a worker may be
        assert all(bound(model)(x).shape == (1, width) for width, model in added)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_modules_that_cannot_be_served_right_are_refused(tmp_path: Path) -> None:
    x = torch.ones(1, 8)
    with ModelStore() as store:
        with pytest.raises(UnsupportedError, match=r"module of torch\.jit at 0"):
            store.add("scripted", models.scripted, inputs={"x": x})
        with pytest.raises(UnsupportedError, match="call the lazy module once"):
            store.add("lazy", models.lazy, inputs={"x": x})
        file = tmp_path / "weights.safetensors"
        save_model(models.helped(), str(file))
        store.add("helped", models.helped, inputs={"x": x}, weights=file)
        for kept in ("view", "list", "partial", "closure", "default", "keyword"):
            with pytest.raises(UnsupportedError, match=r"keeps a weight or a view.*shape \(8, 8\)"):
                store.add(
                    "kept", models.helped, kwargs={"keeps": kept}, inputs={"x": x}, weights=file
                )


def test_outputs_are_named_or_refused() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor
        loss: float | None = None

    assert list(_named(Output(torch.ones(1)))) == ["logits"]
    assert list(_named({"a": torch.ones(1), 2: torch.ones(1)})) == ["a", "2"]
    with pytest.raises(ModelError, match="keys of the same text"):
        _named({1: torch.ones(1), "1": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"'output' is a Tensor of layout torch\.sparse_coo"):
        _named(torch.eye(2).to_sparse())


def test_weights_come_from_a_safetensors_file(tmp_path: Path) -> None:
    torch.manual_seed(9)
    other = models.mixed().eval()
    save_model(other, str(tmp_path / "other.safetensors"))
    with ModelStore() as store:
        path = tmp_path / "other.safetensors"
        model = store.add("mixed", models.mixed, inputs={"tokens": TOKENS}, weights=path, seed=9)
        with torch.inference_mode():
            assert torch.equal(other(TOKENS)["logits"], bound(model)(TOKENS)["logits"])
        (tmp_path / "damaged.safetensors").write_bytes(path.read_bytes()[:100])
        with pytest.raises(CorruptionError, match="damaged"):
            store.add(
                "m", models.mixed, inputs={"x": TOKENS}, weights=tmp_path / "damaged.safetensors"
            )
        with pytest.raises(MismatchError, match=r"lacks .layers\.0\.weight"):
            store.add("m", models.chain, inputs={"x": TOKENS}, weights=path)
        with pytest.raises(StorageError, match="none"):
            store.add(
                "m", models.chain, inputs={"x": TOKENS}, weights=tmp_path / "none.safetensors"
            )
        assert store.names() == ("mixed",)


def test_weights_come_from_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(9)
    other = models.mixed().eval()
    checkpoint.save({"model": other}, tmp_path / "saved")
    with ModelStore() as store:
        add: dict[str, Any] = {
            "inputs": {"tokens": TOKENS},
            "weights": tmp_path / "saved",
            "seed": 9,
        }
        model = store.add("mixed", models.mixed, weights_prefix="model.", **add)
        with torch.inference_mode():
            assert torch.equal(other(TOKENS)["logits"], bound(model)(TOKENS)["logits"])
        with pytest.raises(MismatchError):
            store.add("chain", models.chain, weights_prefix="model.", **add)


@pytest.mark.parametrize("kind", ["keywords", "positions", "mixed", "program", "part"])
def test_exported_modules_take_their_inputs_by_name(kind: str) -> None:
    inputs = {"x": torch.ones(1, 8), "y": torch.ones(1, 8)}
    with ModelStore() as store:
        model = store.add(kind, models.exported, kwargs={"kind": kind}, inputs=inputs)
        torch.manual_seed(0)
        expected = models.Adder()(**inputs)
        assert torch.equal(bound(model)(**inputs), expected)


@pytest.mark.parametrize(
    "code", ["import os; os.environ['MISSING_X']", "raise SystemExit(3)", "1/0"]
)
def test_a_file_that_fails_when_it_is_imported_is_an_error_of_the_model(
    tmp_path: Path, code: str
) -> None:
    file = tmp_path / "failing.py"
    file.write_text(code + "\ndef net(): ...\n")
    with (
        ModelStore() as store,
        pytest.raises(ModelError, match=r"failing\.py cannot be imported: "),
    ):
        store.add("m", f"{file}:net", inputs={"x": TOKENS})


def test_threads_read_code_at_the_same_time(tmp_path: Path) -> None:
    file = tmp_path / "nested.py"
    file.write_text("x = ((((1 + 2) * 3) + 4) * 5)\n" * 200)

    def yield_now(*_: object) -> None:  # lets another thread run while a parser makes its tree
        time.sleep(0)

    known = gc.get_threshold()
    gc.callbacks.append(yield_now)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = [*pool.map(capture, [str(file)] * 4)]
    finally:
        gc.set_threshold(*known)
        gc.callbacks.remove(yield_now)
    assert len({*found}) == 1


@pytest.mark.parametrize("named_by", ["file", "module", "package"])
def test_a_version_is_its_code_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    """What was built before goes on as it was, whatever the files are now."""
    monkeypatch.syspath_prepend(tmp_path)
    code = "import torch\nfrom {module} import K\ndef net():\n    return torch.nn.Linear(1, K)\n"
    modules = {"file": "net", "module": "net_alone", "package": "own_nets.deep.net"}
    main = tmp_path.joinpath(*modules[named_by].split(".")).with_suffix(".py")
    main.parent.mkdir(parents=True, exist_ok=True)
    part = tmp_path / f"parts_of_{named_by}" / "width.py"
    part.parent.mkdir()
    (part.parent / "__init__.py").write_text("from .width import K\n")
    main.write_text(code.format(module=part.parent.name))
    x = torch.ones(1, 1)
    added: list[tuple[int, StoredModel]] = []
    with ModelStore() as store:

        def add(width: int, seed: int = 0) -> int:
            reference = main if named_by == "file" else modules[named_by]
            model = store.add("m", f"{reference}:net", inputs={"input": x}, seed=seed, replace=True)
            added.append((width, model))
            assert all(bound(one)(x).shape == (1, width) for width, one in added)
            return model.version

        part.write_text("K = 1\n")
        assert (add(1), add(1)) == (1, 1)
        part.write_text("K = 2\n")
        assert (add(2), add(2), add(2, seed=1)) == (2, 2, 3)
        main.write_text(code.format(module=f"{part.parent.name}.width"))
        assert add(2, seed=1) == 4
        part.write_text("K = 1\n")
        assert add(1) == 5
        store.remove("m")
        assert add(1) == 5
        code_of = [model.factory.code for _, model in added]
        assert code_of[0] == code_of[1] != code_of[2] == code_of[4] != code_of[5]


def test_wrong_models_are_refused_in_a_sentence() -> None:
    with ModelStore() as store:
        cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            (lambda: torch.nn.Linear(1, 1), {}, ArgumentError, "top level"),
            (models.not_a_module, {}, ArgumentError, "must return a torch.nn.Module, not int"),
            (models.failing, {}, ModelError, "ValueError: cannot be built"),
            ("torch.nn:NoSuchLayer", {}, ArgumentError, "cannot load"),
            ("nowhere", {}, ArgumentError, "names no function"),
            (models.chain, {"kwargs": {"width": object()}}, ArgumentError, "JSON"),
        ]
        for factory, kwargs, error, message in cases:
            with pytest.raises(error, match=message):
                store.add("m", factory, inputs={"x": TOKENS}, **kwargs)
        for name in ("", "../m", ".", "..", "...", "a/b", "a\n", "a b", "%2e"):
            with pytest.raises(ArgumentError, match="not a valid name of a model"):
                store.add(name, models.chain, inputs={"x": TOKENS})
        with pytest.raises(NotFoundError, match="no model 'm'"):
            store.get("m")
        with pytest.raises(NotFoundError):
            store.remove("m")


def test_options_of_the_wrong_type_are_named() -> None:
    wrong: Any
    for wrong in (
        {"arena_bytes": "64MB"},
        {"workers": 1.5},
        {"repository_control": 1},
        {"device": 0},
    ):
        with ModelStore() as store, pytest.raises(ConfigError, match=r"must be (of type|one of)"):
            Switcher(store, **wrong)


def test_a_tensor_that_is_not_plain_is_refused() -> None:
    module = torch.nn.Module()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedError, match="sparse is a Tensor of layout"):
        layout_of(module)


@pytest.mark.parametrize("view", ["conjugated", "negated", "adjoint"])
def test_a_view_that_torch_conjugates_or_negates_when_read_is_refused(view: str) -> None:
    values = torch.complex(torch.ones(2, 2), torch.arange(4.0).reshape(2, 2))
    views = {
        "conjugated": values.conj(),
        "negated": values.conj().imag,
        "adjoint": torch.nn.Parameter(values.mH),
    }
    module = torch.nn.Module()
    setattr(module, view, views[view])
    with pytest.raises(UnsupportedError, match=rf"{view} is a .*keep its \.resolve_conj\(\)"):
        layout_of(module)
    delattr(module, view)
    setattr(module, view, views[view].resolve_conj().resolve_neg())
    layout_of(module)


def test_a_second_add_replaces_the_model_if_asked_and_counts_the_version() -> None:
    with ModelStore() as store:
        chain: dict[str, Any] = {"factory": models.chain, "inputs": {"x": torch.zeros(1, 64)}}
        first = store.add("c", **chain)
        with pytest.raises(ArgumentError, match="there is a model 'c' already; pass replace=True"):
            store.add("c", **chain)
        second = store.add("c", **chain, seed=1, replace=True)
        assert (first.version, second.version) == (1, 2) and store.get("c") is second
        assert first.fingerprint() == second.fingerprint()
        store.remove("c")
        assert store.names() == ()


def test_inputs_are_checked_against_their_specification() -> None:
    with ModelStore() as store:
        model = store.add("c", models.chain, inputs={"x": (torch.float32, (-1, 64))})
        (spec,) = model.inputs
        assert spec.example_tensor().shape == (1, 64) and spec.is_guessed
        spec.check(torch.zeros(7, 64))
        for wrong in (torch.zeros(7, 63), torch.zeros(64), torch.zeros(7, 64, dtype=torch.float64)):
            with pytest.raises(ArgumentError, match="the model takes"):
                spec.check(wrong)


def test_a_tensor_fixes_the_size_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Which is said where it is passed, and in the error of another size."""
    with ModelStore() as store, caplog.at_level("INFO", "torchrelay.switching"):
        fixed = store.add("fixed", models.chain, inputs={"x": torch.zeros(1, 64)})
        assert "always has the shape (1, 64)" in caplog.text and "(-1, 64)" in caplog.text
        message = r"model 'fixed' takes torch.float32 \(1, 64\); its sizes, that of the batch inc"
        with pytest.raises(ArgumentError, match=message):
            fixed.check_inputs({"x": torch.zeros(2, 64)})
        caplog.clear()
        free = store.add("free", models.chain, inputs={"x": (torch.float32, (-1, 64))})
        assert not caplog.text
        with pytest.raises(ArgumentError, match=r"model 'free' takes torch.float32 \(-1, 64\)$"):
            free.check_inputs({"x": torch.zeros(2, 63)})


def test_errors_of_weights_and_factories_name_the_model_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.safetensors").write_bytes(b"nothing")
    inputs = {"x": (torch.float32, (-1, 64))}
    with ModelStore() as store:
        for weights in (".", "broken.safetensors", "missing.safetensors"):
            with pytest.raises(TorchRelayError) as caught:
                store.add("m", models.chain, inputs=inputs, weights=weights)
            where = str(tmp_path / weights).removesuffix("/.")
            assert f"model 'm', weights {where}: " in str(caught.value)
        with pytest.raises(ModelError, match=r"model 'm': .*failed: ValueError"):
            store.add("m", models.failing, inputs=inputs)


def test_inputs_of_another_form_are_refused_with_what_to_pass() -> None:
    with ModelStore() as store:
        unnamed: Any
        for unnamed in (torch.zeros(1, 64), [("x", torch.zeros(1, 64))], {}):
            with pytest.raises(ArgumentError, match="needs its inputs, as a dict"):
                store.add("c", models.chain, inputs=unnamed)
        form: Any
        for form in (np.zeros((3, 64)), torch.float32, (torch.float32,), ((1, 64), torch.float32)):
            with pytest.raises(
                ArgumentError, match=r"input 'x' of .*pass a tensor, \(dtype, shape"
            ):
                store.add("c", models.chain, inputs={"x": form})
        for form in ([torch.float32, [-1, 64]], InputSpec("x", torch.float32, (-1, 64))):
            model = store.add("c", models.chain, inputs={"x": form}, replace=True)
            assert model.inputs[0].shape == (-1, 64)


def test_an_example_fits_its_shape_and_is_part_of_the_fingerprint() -> None:
    def inputs(*example: Any) -> dict[str, Any]:
        return {"x": (torch.float32, (-1, 64), example)}

    with ModelStore() as store:
        models_of = [
            store.add("c", models.chain, inputs=inputs(rows, 64), replace=True)
            for rows in (0, 8, 8)
        ]
        spec = models_of[1].inputs[0]
        assert spec.example_tensor().shape == (8, 64) and not spec.is_guessed
        assert spec.example_bytes == 8 * 64 * 4
        prints = [model.fingerprint() for model in models_of]
        assert prints[0] != prints[1] == prints[2]
        for example in ((), (8,), (8, 64, 1), (8, 63)):
            with pytest.raises(ArgumentError, match=r"does not fit the shape \(-1, 64\)"):
                store.add("c", models.chain, inputs=inputs(*example), replace=True)
        for wrong in (-1, 1.5):
            with pytest.raises(ArgumentError, match="must be an integer of at least 0"):
                store.add("c", models.chain, inputs=inputs(wrong, 64), replace=True)
        assert store.get("c").version == 2
