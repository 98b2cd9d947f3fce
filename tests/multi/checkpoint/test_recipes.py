"""The examples of docs/checkpoint.md run as they are printed; the recipes save on one rank and load
on two.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

PAGE = Path(__file__).parents[3] / "docs" / "checkpoint.md"
NEXT_JOB = "# the next job"


def _examples(title: str) -> list[str]:
    """The Python blocks printed between a heading that starts with ``title`` and the next one."""
    sections = re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE)
    (section,) = (section for section in sections if section.startswith(title))
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def _recipe(title: str) -> str:
    (code,) = _examples(title)
    return code


def _names() -> dict[str, Any]:
    """What a recipe takes for granted: imports of the page's first example, the user's own
    names.
    """
    from transformers import AutoModelForCausalLM, GPT2Config

    from torchrelay.checkpoint import async_save, latest, load, save, verify
    from torchrelay.deferred import deferred_init

    config = GPT2Config(
        n_embd=24,
        n_layer=2,
        n_head=2,
        vocab_size=99,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    names = {"config": config, "AutoModelForCausalLM": AutoModelForCausalLM, "step": 1000}
    names.update(async_save=async_save, latest=latest, load=load, save=save, verify=verify)
    return {**names, "deferred_init": deferred_init}


def _trained(names: dict[str, Any], seed: int) -> None:
    """A model under FSDP2, and an optimizer that has taken a step."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = names["AutoModelForCausalLM"].from_config(names["config"])
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    names.update(model=model, optimizer=optimizer)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in model.state_dict().items()
    }


def _moments(names: dict[str, Any]) -> list[torch.Tensor]:
    states = names["optimizer"].state.values()
    return [state["exp_avg"].full_tensor() for state in states]


def _start(world: World, folder: str) -> None:
    import torch.distributed as dist

    os.chdir(folder)
    dist.init_process_group("gloo", store=world.connect(), rank=world.rank, world_size=world.size)


def _save(world: World, folder: str) -> None:
    _start(world, folder)
    names = _names()
    _trained(names, seed=1)
    torch.save({"weights": _weights(names["model"]), "moments": _moments(names)}, "expected.pt")
    exec(_recipe("FSDP2").split(NEXT_JOB)[0], names)
    torch.manual_seed(2)
    snapshot = names["AutoModelForCausalLM"].from_config(names["config"])
    snapshot.save_pretrained("path/to/snapshot")
    torch.save(_weights(snapshot), "snapshot.pt")


def _load(world: World, folder: str) -> None:
    _start(world, folder)
    expected = torch.load("expected.pt")

    names = _names()
    _trained(names, seed=3)
    save_part, load_part = _recipe("FSDP2").split(NEXT_JOB)
    exec(save_part.splitlines()[0] + "\n#" + load_part, names)
    torch.testing.assert_close(_weights(names["model"]), expected["weights"], rtol=0, atol=0)
    torch.testing.assert_close(_moments(names), expected["moments"], rtol=0, atol=0)

    names = _names()
    exec(_recipe("A transformers model"), names)
    parameters = list(names["model"].parameters())
    held = sum(parameter.to_local().numel() for parameter in parameters)
    assert held < 0.6 * sum(parameter.numel() for parameter in parameters)
    torch.testing.assert_close(_weights(names["model"]), expected["weights"], rtol=0, atol=0)

    names = _names()
    exec(_recipe("Weights from a Hugging Face snapshot"), names)
    torch.testing.assert_close(_weights(names["model"]), torch.load("snapshot.pt"), rtol=0, atol=0)
    tokens = torch.arange(6).reshape(1, 6)
    assert names["model"](tokens).logits.isfinite().all()


@pytest.mark.timeout(300)
def test_recipes_as_printed(tmp_path: Path, run_processes: RunProcesses) -> None:
    pytest.importorskip("transformers")
    for function, size in ((_save, 1), (_load, 2)):
        results = run_processes(function, size, timeout_s=140, folder=str(tmp_path))
        assert all(result.ok for result in results), [result.error for result in results]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_examples_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrelay.checkpoint import latest
    from torchrelay.checkpoint.engine._background import saver

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, asynchronous = _examples("Minimal example")
    exec(first, names)
    weight = names["model"].weight
    expected = weight.detach().clone()
    for parameter in names["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        exec(asynchronous, names)
    finally:
        saver.close()
    assert not torch.equal(weight, expected)  # the optimizer has stepped since
    resumed = {"model": names["model"]}
    exec(_recipe("Resume, or start anew"), {**names, "latest": latest, "state": resumed})
    assert torch.equal(weight, expected)

    names["state"] = {"w": torch.ones(3)}
    exec(_recipe("From DCP"), names)
    for step in _examples("From `torch.save`"):
        exec(step, names)
    assert sorted(path.name for path in tmp_path.glob("model*")) == ["model", "model.pt"]
