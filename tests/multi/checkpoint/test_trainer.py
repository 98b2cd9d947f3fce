"""A trainer's whole state: saved, loaded into fresh objects of another process, and trained on."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from torchrelay.checkpoint import async_save, load, save
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

STEPS = 4


class _Trainer:
    """What a training script has: every object that a step changes."""

    def __init__(self, seed: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        random.seed(seed)
        torch.manual_seed(seed)
        self.data = np.random.default_rng(seed)
        self.noise = np.random.RandomState(seed)
        sizes: dict[str, Any] = {
            "n_layer": 2,
            "n_embd": 16,
            "n_head": 2,
            "vocab_size": 50,
            "n_positions": 8,
        }
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        model: Any = GPT2LMHeadModel(config)  # with tied weights, and dropout
        model.spare = torch.nn.Linear(3, 3)  # never used: it never has a gradient
        model.transformer.wpe.requires_grad_(False)
        self.model = model.train()
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups: list[Any] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01 * (1 + seed), amsgrad=True)
        warm_up = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=3)
        decay = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer, [warm_up, decay], milestones=[3]
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + seed), growth_interval=2)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.progress: dict[str, Any] = {"step": 0, "best": (0, float("inf")), "losses": []}
        self.seen: Any = Counter()

    def step(self) -> None:
        tokens = torch.from_numpy(self.data.integers(0, 50, (2, 8)))
        self.seen.update(tokens.flatten().tolist())
        loss = self.model(tokens, labels=tokens).loss * (1 + 0.1 * random.random())
        self.scaler.scale(loss + float(self.noise.random())).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)
        self.progress["step"] += 1
        self.progress["losses"].append(loss.item())
        best = min((self.progress["step"], loss.item()), self.progress["best"], key=lambda b: b[1])
        self.progress["best"] = best

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "training": {
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "scaler": self.scaler,
                "averages": [self.average],
            },
            "random": {
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": self.data.bit_generator.state,
                "old numpy": self.noise.get_state(),
            },
            "progress": self.progress,
            "seen": (self.seen,),
            "settings": {"dtype": torch.bfloat16, "device": torch.device("cpu"), "id": b"\x01\xff"},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Give back what is no object of torch's."""
        torch.set_rng_state(state["random"]["torch"])
        random.setstate(state["random"]["python"])
        self.data.bit_generator.state = state["random"]["numpy"]
        self.noise.set_state(state["random"]["old numpy"])
        self.progress, (self.seen,) = state["progress"], state["seen"]

    def digests(self) -> dict[str, str]:
        """A hash of each part, of all its bits."""
        state = self.state()
        return {
            name: hashlib.sha256(repr(_plain(value)).encode()).hexdigest()
            for name, value in {**state, **state["training"], **state["random"]}.items()
        }


def _plain(value: Any) -> Any:
    """The value in a form whose text is the same wherever all bits are."""
    if hasattr(value, "state_dict"):
        return _plain(value.state_dict())
    if isinstance(value, torch.Tensor):
        return repr(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if isinstance(value, dict):
        return sorted((str(name), _plain(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value)


def _train_and_save(world: World, folder: str) -> dict[str, str]:
    torch.set_num_threads(1)
    trainer = _Trainer(0)
    for _ in range(STEPS):
        trainer.step()
    save(trainer.state(), f"{folder}/save")
    handle = async_save(trainer.state(), f"{folder}/async_save")
    for _ in range(STEPS):
        trainer.step()
    handle.result(60)
    return trainer.digests()


def _resume(world: World, folder: str, way: str) -> dict[str, str]:
    torch.set_num_threads(1)
    trainer = _Trainer(1)
    state = trainer.state()
    found = load(state, f"{folder}/{way}")
    assert found == ([], []), found
    trainer.restore(state)
    assert trainer.progress["step"] == STEPS
    assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight
    assert trainer.model.spare.weight not in trainer.optimizer.state
    for _ in range(STEPS):
        trainer.step()
    return trainer.digests()


@pytest.mark.timeout(300)
def test_training_goes_on_in_another_process(tmp_path: Path, run_processes: RunProcesses) -> None:
    pytest.importorskip("transformers")
    (expected,) = run_processes(_train_and_save, 1, timeout_s=120, folder=str(tmp_path))
    assert expected.ok, expected.error
    for way in ("save", "async_save"):
        (found,) = run_processes(_resume, 1, timeout_s=120, folder=str(tmp_path), way=way)
        assert found.ok, found.error
        assert found.value == expected.value
