"""Checkpoints of what training loops hold beside a plain model, in processes that were forked,
spawned or pickled to.
"""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from torchrelay.checkpoint import Reader, Writer, async_save, load, save
from torchrelay.checkpoint.engine._background import saver
from torchrelay.errors import ArgumentError


class _Counting(torch.nn.Linear):
    """A module with a state that is no tensor."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def _trained(seed: int) -> dict[str, Any]:
    """A model after two steps, and all that its training loop must save to go on."""
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), _Counting(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + seed, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[3])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + seed))
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2 + seed):
        scaler.scale(model(torch.rand(3, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        model[2].calls += 1
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "average": average,
        "random": torch.random.get_rng_state(),
        "step": 2 + seed,
    }


def _values(state: dict[str, Any]) -> str:
    """Everything in it, to the last bit."""
    with torch._tensor_str.printoptions(precision=20, threshold=10_000):
        return str(
            {key: v.state_dict() if hasattr(v, "state_dict") else v for key, v in state.items()}
        )


def test_a_training_loop_goes_on_where_it_was(tmp_path: Path) -> None:
    saved, found = _trained(0), _trained(1)
    save(saved, tmp_path / "step")
    expected = _values(saved)
    assert _values(found) != expected
    load(found, tmp_path / "step")
    assert _values(found) == expected
    assert found["model"][2].calls == 2


def test_compiled_and_activation_checkpointed_modules(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    plain = _trained(0)["model"]
    wrapped = copy.deepcopy(plain)
    apply_activation_checkpointing(
        wrapped, check_fn=lambda module: isinstance(module, torch.nn.Linear)
    )
    compiled: Any = torch.compile(copy.deepcopy(plain), backend="eager")
    blank = _trained(1)["model"]

    save(wrapped, tmp_path / "wrapped")  # its keys are those of the module inside
    load(blank, tmp_path / "wrapped")
    assert _values({"": blank}) == _values({"": plain})

    blank = _trained(1)["model"]
    save(get_model_state_dict(compiled), tmp_path / "compiled")  # as DCP names its keys
    load(get_model_state_dict(torch.compile(blank, backend="eager")), tmp_path / "compiled")  # type: ignore[arg-type]
    assert torch.equal(blank[0].weight, plain[0].weight)

    blank = _trained(1)["model"]
    save(compiled, tmp_path / "raw")
    load(blank, tmp_path / "raw", prefix="_orig_mod.")
    assert _values({"": blank}) == _values({"": plain})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_writers_and_readers_are_pickled_and_used_again(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    writer: Writer = pickle.loads(pickle.dumps(Writer(tmp_path / "a", threads=1)))
    reader: Reader = pickle.loads(pickle.dumps(Reader(verify="header")))
    for step, path in enumerate(("a", "b")):
        dcp.save({"step": step}, storage_writer=writer, checkpoint_id=tmp_path / path)
        found = {"step": None}
        dcp.load(found, storage_reader=reader, checkpoint_id=tmp_path / path)
        assert found == {"step": step}
    pickle.dumps((writer, reader))  # nothing of a save or load is left in them


def _in_fork(function: Any) -> None:
    """Runs ``function`` in a forked child, which must end well."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            saver.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_save_alone(tmp_path: Path) -> None:
    handle = async_save({"step": torch.zeros(3)}, tmp_path / "parent")

    def child() -> None:
        with pytest.raises(ArgumentError, match="only it can wait for it"):
            handle.result()
        async_save({"step": torch.ones(3)}, tmp_path / "child").result(60)

    try:
        _in_fork(child)
        assert handle.result(60) == str(tmp_path / "parent")
        _in_fork(lambda: save({"step": torch.ones(3)}, tmp_path / "child again"))
    finally:
        saver.close()
    for name, value in (("parent", 0.0), ("child", 1.0), ("child again", 1.0)):
        found = {"step": torch.full((3,), -1.0)}
        load(found, tmp_path / name)
        assert found["step"].tolist() == [value] * 3
