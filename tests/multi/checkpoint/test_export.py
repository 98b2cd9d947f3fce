"""``layout="huggingface"``: the files of a checkpoint are read by transformers and safetensors as
those that ``save_pretrained`` writes, and by ``load`` as any checkpoint.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.checkpoint import HuggingFace, async_save, load, save, verify
from torchrelay.checkpoint._tools import read_state
from torchrelay.checkpoint.engine._background import saver
from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError
from torchrelay.world import World

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def no_writer_left() -> Iterator[None]:
    yield
    saver.close()


def _model(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=40, n_positions=16, **options
    )
    return transformers.GPT2LMHeadModel(config)


def _trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(12).view(2, 6)).logits.float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """What a reader finds that keeps to the index, as vLLM does."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in {*index["weight_map"].values()}:
        tensors = safetensors.load_file(folder / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        found |= tensors
    assert found.keys() == index["weight_map"].keys()
    assert sum(one.nbytes for one in found.values()) == index["metadata"]["total_size"]
    return found


def _same(one: nn.Module, other: nn.Module, dtype: torch.dtype | None = None) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name].to(dtype or mine[name].dtype), theirs[name]) for name in mine
    )


@pytest.mark.parametrize(
    ("dtype", "tied", "call", "max_file_bytes"),
    [
        (None, True, save, 5 << 30),
        (None, False, async_save, 2000),
        (torch.bfloat16, True, async_save, 5 << 30),
        (torch.bfloat16, False, save, 2000),
    ],
)
def test_one_checkpoint_trains_and_is_read_by_from_pretrained(
    tmp_path: Path, dtype: Any, tied: bool, call: Any, max_file_bytes: int
) -> None:
    model = _model(tie_word_embeddings=tied)
    optimizer = _trained(model)
    folder = tmp_path / "step-1"
    for _ in range(2):  # the second one replaces the first
        layout = HuggingFace(dtype=dtype, max_file_bytes=max_file_bytes)
        found = call({"model": model, "optimizer": optimizer, "step": 1}, folder, layout=layout)
        if found is not None:
            found.result(60)

    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert _same(model, loaded, dtype)
    auto = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert type(auto) is type(model) and _same(model, auto, dtype)
    expected = {
        name: one.to(dtype or one.dtype)
        for name, one in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    weights = _weights(folder)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert (max_file_bytes > 2000) == (folder / "model.safetensors").exists()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]

    assert verify(folder)
    fresh = _model(1, tie_word_embeddings=tied)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    state: dict[str, Any] = {"model": fresh, "optimizer": other, "step": 0}
    assert load(state, folder) == ([], []) and state["step"] == 1
    assert _same(model, fresh)
    assert repr(other.state_dict()) == repr(optimizer.state_dict())
    assert _same(model, read_as(folder, tied))

    # Retention knows all of its files.
    save({"x": 1}, tmp_path / "step-2", keep=1)
    assert os.listdir(tmp_path) == ["step-2"]


def read_as(folder: Path, tied: bool) -> Any:
    made = _model(2, tie_word_embeddings=tied)
    state = read_state(str(folder), "model.")
    assert not any(key.startswith("$") for key in state)
    made.load_state_dict(state)
    return made


def test_names_files_and_what_is_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokens" / "model.safetensors").write_text("weights are not copied")
    layout = HuggingFace(
        rename=lambda name: None if "running" in name or "num_" in name else f"net.{name}",
        files=tmp_path / "tokens",
    )
    save(model, tmp_path / "x", layout=layout)
    assert {*_weights(tmp_path / "x")} == {
        "net.0.weight",
        "net.0.bias",
        "net.1.weight",
        "net.1.bias",
    }
    assert (tmp_path / "x" / "tokenizer.json").read_text() == "{}"
    fresh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    load(fresh, tmp_path / "x")
    assert _same(model, fresh)
    (tmp_path / "x" / "tokenizer.json").write_text("[]")
    with pytest.raises(OSError, match=r"tokenizer\.json: the header, .* is damaged"):
        verify(tmp_path / "x")

    for state, wrong, message in (
        ({"a": model, "b": model}, HuggingFace(), r"2 modules .*\(prefix="),
        (model, HuggingFace(rename=lambda name: "same"), "two tensors the name 'same'"),
        (model, HuggingFace(prefix="x."), "begin with 'x.', it has no tensor"),
        (model, HuggingFace(files={"../x": "y"}), "cannot lie beside"),
        (model, HuggingFace(files={"manifest.json": "y"}), "cannot lie beside"),
        (model, HuggingFace(files={"model.safetensors": "y"}), "cannot lie beside"),
        (model, "hf", "it is 'huggingface', or"),
    ):
        with pytest.raises(ArgumentError, match=message):
            save(state, tmp_path / "y", layout=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cannot begin a file's name"):
        HuggingFace(name="../x")
    with pytest.raises(UnsupportedError, match="needs a mounted file system"):
        save(model, "memory://bucket/x", layout="huggingface")
    assert sorted(os.listdir(tmp_path)) == ["tokens", "x"]


def test_an_adapter_alone(tmp_path: Path) -> None:
    """With the names that peft's ``save_pretrained`` gives."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(4, 4)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})

    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": nn.Sequential(Lora(), Lora())})})
    layout = HuggingFace(
        prefix="model.",
        rename=lambda name: name.replace(".default.", ".") if "lora_" in name else None,
        files={"adapter_config.json": '{"peft_type": "LORA"}'},
        name="adapter_model",
    )
    adapter = {name: one for name, one in model.state_dict().items() if "lora_" in name}
    save({"model": adapter}, tmp_path / "x", layout=layout)
    found = safetensors.load_file(tmp_path / "x" / "adapter_model.safetensors")
    assert found.keys() == {name.replace(".default.", ".") for name in adapter}
    assert all(torch.equal(found[n.replace(".default.", ".")], t) for n, t in adapter.items())
    assert sorted(os.listdir(tmp_path / "x")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.safetensors.index.json",
        "manifest.json",
    ]
    assert verify(tmp_path / "x")


@pytest.mark.filterwarnings("ignore")  # of peft
def test_peft_reads_the_adapter_of_a_training_checkpoint(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, config = _model(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)

    def adapted() -> Any:
        return peft.get_peft_model(copy.deepcopy(base), config).eval()

    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    layout = HuggingFace(
        prefix="model.",
        rename=lambda name: name.replace(".default.", ".") if "lora_" in name else None,
        files={"adapter_config.json": json.dumps(config.to_dict(), default=list)},
        name="adapter_model",
    )
    save({"model": model, "step": 3}, tmp_path / "step-3", layout=layout)
    found = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "step-3").eval()
    other = adapted()
    load({"model": other, "step": None}, tmp_path)  # training goes on from the same checkpoint
    tokens = torch.arange(12).view(2, 6)
    expected = model(tokens).logits
    assert torch.equal(found(tokens).logits, expected)
    assert torch.equal(other(tokens).logits, expected)
    assert not torch.equal(base.eval()(tokens).logits, expected)


@pytest.mark.parametrize("moment", range(1, 12))
def test_an_export_that_is_killed_leaves_nothing_that_looks_whole(
    tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(_model(), tmp_path / "x", layout="huggingface")
    pid = os.fork()
    if pid == 0:
        left, rename, patched = moment, os.rename, pytest.MonkeyPatch()

        def dying(*args: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(1)
            rename(*args)

        patched.setattr(os, "rename", dying)
        save(_model(1), tmp_path / "y", layout="huggingface")
        os._exit(0)
    os.waitpid(pid, 0)
    whole = (tmp_path / "y").exists()
    save({"x": 1}, tmp_path / "z")
    assert sorted(os.listdir(tmp_path)) == (["x", "y", "z"] if whole else ["x", "z"])
    if whole:
        assert _same(_model(1), transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "y"))
    assert _same(_model(), transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "x"))


@pytest.mark.processes(2)
def test_a_sharded_model_is_whole_in_its_files(tmp_path: Path, world: World) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=world.connect(), rank=world.rank, world_size=world.size)
    expected = _model()
    for dtype in (None, torch.float16):
        model = _model()
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        optimizer = _trained(model)
        state = {"model": model, "optimizer": optimizer, f"rank{world.rank}": world.rank}
        layout = HuggingFace(dtype=dtype)
        folder = tmp_path / str(dtype)
        async_save(state, folder, layout=layout).result(100)
        whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
        loaded = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
        assert all(torch.equal(one.to(dtype or one.dtype), loaded[n]) for n, one in whole.items())
        assert {*_weights(folder)} >= {*whole} - {"lm_head.weight"}
        plain = _model(1)
        load(plain, folder, prefix="model.", no_dist=True)
        assert all(torch.equal(whole[n], one) for n, one in plain.state_dict().items())
        fresh = _model(1)
        fully_shard(fresh)
        other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
        load({"model": fresh, "optimizer": other}, folder)
        assert all(torch.equal(whole[n], t.full_tensor()) for n, t in fresh.state_dict().items())
        names = [one for one in os.listdir(folder) if one.startswith("model-")]
        assert len(names) == 2, "each rank writes a part"
        verify(folder)
        dist.barrier()
    state = {"model": {f"w{world.rank}": torch.full((3,), world.rank)}}
    layout = HuggingFace(prefix="model.", rename=lambda name: "same")
    with pytest.raises(MismatchError, match="different tensors with the name 'same'"):
        save(state, tmp_path / "x", layout=layout)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ArgumentError, match=r"rank 1: .*no tensor"):
        save(expected, tmp_path / "x", layout=HuggingFace(prefix="x." if world.rank else ""))
    saver.close()
