"""Hugging Face snapshots: what is on the disk becomes what ``from_pretrained`` makes of it; what is
not there is not made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from torchrelay.checkpoint import load, save, verify
from torchrelay.checkpoint._tools import convert
from torchrelay.deferred import deferred_init, is_deferred
from torchrelay.errors import CorruptionError, MismatchError, TorchRelayError, UnsupportedError

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
        "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "qwen3_next": {
        **_EXPERTS, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "jamba": {
        "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False, "mamba_d_state": 4,
        "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1, "mamba_dt_rank": 4,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
        "moe_layer_start_index": 1, "moe_num_shared_experts": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
}  # fmt: skip


def _transformers() -> Any:
    transformers = pytest.importorskip("transformers", minversion="5")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _assert_equal(module: nn.Module, expected: nn.Module) -> None:
    mine, theirs = module.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("kind", _MODELS)
def test_a_snapshot_is_what_from_pretrained_makes_of_it(tmp_path: Path, kind: str) -> None:
    transformers = _transformers()
    config = transformers.AutoConfig.for_model(kind, **{**_SIZES, **_MODELS[kind]})
    auto = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path, max_shard_size="20KB")
    theirs = auto.from_pretrained(tmp_path)
    module = deferred_init(auto.from_config, config)
    assert load(module, tmp_path) == ([], [])
    _assert_equal(module, theirs)

    def cut(name: str, tensor: torch.Tensor) -> tuple[slice, ...]:
        return tuple(slice(size // 3, size) for size in tensor.shape[:2])

    part = deferred_init(auto.from_config, config)
    load(part, tmp_path, shard=cut)
    for name, tensor in part.named_parameters():
        whole = theirs.get_parameter(name)
        assert torch.equal(tensor, whole[cut(name, whole)]), name


def test_modules_that_fsdp_wraps_are_those_of_transformers(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FSDPModule

    transformers = _transformers()
    config = transformers.AutoConfig.for_model("mixtral", **_SIZES, num_local_experts=4)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    module = deferred_init(transformers.MixtralForCausalLM, config)
    for one in (module, module.model):  # as fully_shard() does it
        one.__class__ = type(f"FSDP{type(one).__name__}", (FSDPModule, type(one)), {})
    load(module, tmp_path)
    _assert_equal(module, transformers.MixtralForCausalLM.from_pretrained(tmp_path))


def test_a_head_over_the_snapshot_of_a_base_model_and_the_reverse(tmp_path: Path) -> None:
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=33, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    transformers.GPT2Model(config).save_pretrained(tmp_path / "base")
    head = deferred_init(transformers.GPT2LMHeadModel, config)
    load(head, tmp_path / "base")
    _assert_equal(head, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base"))
    bert = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    transformers.BertForSequenceClassification(bert).save_pretrained(tmp_path / "task")
    base = deferred_init(transformers.BertModel, bert)
    with pytest.raises(MismatchError, match=r"'classifier\.bias'.* BertModel lacks"):
        load(base, tmp_path / "task")
    load(base, tmp_path / "task", strict=False)
    _assert_equal(base, transformers.BertModel.from_pretrained(tmp_path / "task"))


def test_a_conversion_that_computes_names_what_to_do_and_it_works(tmp_path: Path) -> None:
    transformers = _transformers()
    from transformers import conversion_mapping
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Double(ConversionOps):
        def convert(self, input_dict: Any, *args: Any, **more: Any) -> Any:
            return {key: 2 * value[0] for key, value in input_dict.items()}

    config = transformers.AutoConfig.for_model("llama", **_SIZES)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hub")
    known = conversion_mapping.get_checkpoint_conversion_mapping("llama") or []
    rule = WeightConverter("q_proj.weight", "q_proj.weight", operations=[Double()])
    conversion_mapping.register_checkpoint_conversion_mapping("llama", [*known, rule], True)
    try:
        module = deferred_init(transformers.LlamaForCausalLM, config)
        with pytest.raises(UnsupportedError, match=r"Double.*LlamaForCausalLM\.from_pretrained"):
            load(module, tmp_path / "hub")
        theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hub")
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache.pop("llama")  # type: ignore[attr-defined]
        conversion_mapping.USER_REGISTERED_MAPPINGS.discard("llama")
    save(theirs, tmp_path / "ours")
    load(module, tmp_path / "ours")
    _assert_equal(module, theirs)


def _body(classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, classes))


def _sharded(folder: Path, module: nn.Module, files: int = 3) -> None:
    folder.mkdir()
    weights = {}
    for part in range(files):
        name = f"model-{part + 1:05d}-of-{files:05d}.safetensors"
        found = {k: v for k, v in module.state_dict().items() if k.startswith(str(part))}
        save_file(found, folder / name)
        weights.update(dict.fromkeys(found, name))
    text = json.dumps({"metadata": {}, "weight_map": weights})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("options", [
    {}, {"initialize_missing": True}, {"strict": False},
    {"strict": False, "initialize_missing": True},
], ids=str)  # fmt: skip
def test_an_absent_file_is_named_and_not_made_up(
    tmp_path: Path, options: dict[str, bool], index: bool
) -> None:
    trained = _body(2)
    _sharded(tmp_path / "hub", trained)
    (tmp_path / "hub" / "model-00002-of-00003.safetensors").unlink()
    if not index:
        (tmp_path / "hub" / "model.safetensors.index.json").unlink()
    module = deferred_init(_body, 2)
    actions: list[Callable[[], object]] = [
        lambda: load(module, tmp_path / "hub", **options),  # type: ignore[arg-type]
        lambda: verify(tmp_path / "hub"),
        lambda: convert(str(tmp_path / "hub"), str(tmp_path / "other"), "torchrelay", 1 << 20),
    ]
    for action in actions:
        with pytest.raises(CorruptionError, match=r"model-00002-of-00003\.safetensors is not"):
            action()
    assert is_deferred(module)
    part = nn.Sequential(nn.Linear(4, 4))  # all of it is there
    load(part, tmp_path / "hub", strict=False)
    assert torch.equal(part[0].weight, trained[0].weight)  # type: ignore[arg-type]


def test_what_no_file_is_said_to_hold_is_initialized(tmp_path: Path) -> None:
    _sharded(tmp_path / "hub", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), files=2)
    module = deferred_init(_body, 5)
    found = load(module, tmp_path / "hub", initialize_missing=True)
    assert found.missing_keys == ["2.weight", "2.bias"]


def test_a_head_of_the_same_name_for_other_labels(tmp_path: Path) -> None:
    trained = _body(2)
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    module = deferred_init(_body, 5)
    for options in ({}, {"initialize_missing": True}):
        with pytest.raises(MismatchError, match="strict=False with initialize_missing=True"):
            load(module, tmp_path, **options)  # type: ignore[arg-type]
    torch.manual_seed(4)
    expected = _body(5)
    torch.manual_seed(4)
    module = deferred_init(_body, 5)
    with pytest.warns(UserWarning, match=r"'2.weight', '2.bias' are initialised, not loaded"):
        found = load(module, tmp_path, strict=False, initialize_missing=True)
    assert found == (["2.weight", "2.bias"], [])
    for place, like in enumerate((trained, trained, expected)):
        _assert_equal(module[place], like[place])


@pytest.mark.parametrize("has_model", [True, False])
def test_an_adapter_is_not_the_model(tmp_path: Path, has_model: bool) -> None:
    trained = _body(2)
    adapter = {"base_model.model.0.lora_A.weight": torch.ones(2, 4)}
    save_file(adapter, tmp_path / "adapter_model.safetensors")
    if has_model:
        save_file(trained.state_dict(), tmp_path / "model.safetensors")
        module = deferred_init(_body, 2)
        assert load(module, tmp_path) == ([], [])
        _assert_equal(module, trained)
    path = tmp_path / "adapter_model.safetensors" if has_model else tmp_path
    for options in ({}, {"strict": False}, {"strict": False, "initialize_missing": True}):
        module = deferred_init(_body, 2)
        with pytest.raises(TorchRelayError, match="an adapter, without the model"):
            load(module, path, **options)  # type: ignore[arg-type]
        assert is_deferred(module)
    state = dict.fromkeys(adapter, torch.zeros(2, 4))
    load(state, path)  # as it is
    assert torch.equal(state.popitem()[1], torch.ones(2, 4))
