"""What errors advise is tried: it works, and gives what was wanted.

Advice that concerns processes is tried beside them: groups of ranks in ``multi``, damaged and
foreign files in ``faults``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from torchrelay import checkpoint
from torchrelay.checkpoint import async_save, latest, load, verify
from torchrelay.checkpoint._tools import convert
from torchrelay.deferred import deferred_init
from torchrelay.errors import TorchRelayError

save: Any = checkpoint.save  # in expressions
_torch_save: Any = torch.save


def _linear(*, seed: int = 0, out: int = 2) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, out)


def _adam(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), **options)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class _Wrong(NamedTuple):
    """A call that fails with a sentence, and one that follows its advice."""

    call: Callable[[Path], Any]
    advice: str
    follow: Callable[[Path], Any]


def _saves(wrong: Any, advice: str, right: Any) -> _Wrong:
    """A value that is not stored, and what to save instead, which comes back."""

    def follow(path: Path) -> None:
        save({"x": right}, path / "y")
        found: dict[str, Any] = {"x": None}
        if isinstance(right, torch.Tensor):
            found["x"] = torch.zeros_like(right)
        elif isinstance(right, list) and any(isinstance(one, torch.Tensor) for one in right):
            found["x"] = [torch.zeros_like(one) for one in right]
        load(found, path / "y")
        assert repr(found["x"]) == repr(right)

    return _Wrong(lambda path: save({"x": wrong}, path / "y"), advice, follow)


def _of_tensors(wrong: torch.Tensor, advice: str, *right: Any) -> _Wrong:
    return _saves(wrong, advice, list(right))


_NESTED: Any = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
_COO = torch.eye(3).to_sparse()
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Sparse C")
    _COMPRESSED = [
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)),
        torch.eye(4).to_sparse_bsc((2, 2)),
    ]


def _called(module: Any) -> Any:
    module(torch.ones(1, 3))
    return module


def _same(one: Any, other: Any) -> bool:
    assert one == other
    return True


def _dcp_state(module: nn.Module) -> Any:
    return get_state_dict(module, _adam(module))[1]


def _load_as_dcp(path: Path) -> None:
    module = _linear(seed=1)
    optimizer = torch.optim.Adam(module.parameters())
    model_state, state = get_state_dict(module, optimizer)
    load({"o": state}, path / "x")
    set_state_dict(module, optimizer, model_state_dict=model_state, optim_state_dict=state)
    assert optimizer.state_dict()["state"][0]["step"] == 1


def _load_both(path: Path, *, together: bool) -> None:
    saved = _linear()
    save({"m": saved, "o": _adam(saved)}, path / "x")
    module = deferred_init(_linear, seed=1)
    optimizer = torch.optim.Adam(module.parameters())
    if together:
        load({"m": module, "o": optimizer}, path / "x")
    load(module, path / "x", prefix="m.")
    optimizer = torch.optim.Adam(module.parameters())
    load(optimizer, path / "x", prefix="o.")
    assert torch.equal(module.weight, saved.weight)


_CASES = {
    "a name without a number and keep=": _Wrong(
        lambda path: save({"x": 1}, path / "best", keep=2),
        "save under a numbered name, or without keep=",
        lambda path: (save({"x": 1}, path / "best-1", keep=2), save({"x": 1}, path / "best")),
    ),
    "nested tensors": _of_tensors(
        _NESTED, r"save its values\(\) and offsets\(\)", _NESTED.values(), _NESTED.offsets()
    ),
    "sparse tensors": _of_tensors(
        _COO,
        r"save its coalesce\(\).indices\(\) and coalesce\(\).values\(\)",
        _COO.coalesce().indices(),
        _COO.coalesce().values(),
    ),
    **{
        str(one.layout): _of_tensors(
            one,
            r"save its (crow_indices\(\), col|ccol_indices\(\), row)_indices\(\) and values",
            one.crow_indices() if "r" in str(one.layout)[-1] else one.ccol_indices(),
            one.values(),
        )
        for one in _COMPRESSED
    },
    "another layout": _of_tensors(
        torch.eye(3).to_mkldnn(), r"save its to_dense\(\)", torch.eye(3).to_mkldnn().to_dense()
    ),
    "a dataclass": _saves(
        torch.Generator(), r"save its get_state\(\)", torch.Generator().get_state()
    ),
    "a set of a class of one's own": _saves(
        type("Mine", (set,), {})("a"), r"save set\(value\)", {"a"}
    ),
    "an array of objects": _saves(np.array([1, "a"], object), r"save its tolist\(\)", [1, "a"]),
    "a large array": _Wrong(
        lambda path: save({"x": np.zeros(9 << 20)}, path / "y"),
        r"save it as a tensor: .*torch.from_numpy\(value\)",
        lambda path: save({"x": torch.from_numpy(np.zeros(9 << 20))}, path / "y", fsync=False),
    ),
    "a large integer": _saves(1 << 2000, r"save its bytes or hex\(\)", hex(1 << 2000)),
    "a module on meta": _Wrong(
        lambda path: save(nn.Linear(2, 2, device="meta"), path / "x"),
        r"Module.to_empty\(device=\) makes some, or build the module with .*deferred_init\(\)",
        lambda path: (
            save(nn.Linear(2, 2, device="meta").to_empty(device="cpu"), path / "x"),
            load(deferred_init(nn.Linear, 2, 2), path / "x"),
        ),
    ),
    "a lazy module": _Wrong(
        lambda path: save(nn.LazyLinear(2), path / "x"),
        "call the module once",
        lambda path: save(_called(nn.LazyLinear(2)), path / "x"),
    ),
    "an expanded target": _Wrong(
        lambda path: (
            save({"x": torch.ones(3)}, path / "x"),
            load({"x": torch.zeros(1).expand(3)}, path / "x"),
        ),
        r"load into a clone\(\) of it",
        lambda path: load({"x": torch.zeros(1).expand(3).clone()}, path / "x"),
    ),
    "a prefix that is missing": _Wrong(
        lambda path: (save({"model": _linear()}, path / "x"), load(_linear(seed=1), path / "x")),
        r"prefix='model\.' finds them, strict=False leaves them as they are",
        lambda path: (
            load(_linear(seed=1), path / "x", prefix="model."),
            load(_linear(seed=1), path / "x", strict=False),
        ),
    ),
    "a head that is missing": _Wrong(
        lambda path: (
            save({"0": _linear()}, path / "x"),
            load(deferred_init(lambda: nn.Sequential(_linear(), _linear())), path / "x"),
        ),
        "strict=False leaves them as they are, initialize_missing=True initialises deferred ones",
        lambda path: [
            load(
                deferred_init(lambda: nn.Sequential(_linear(), _linear())),
                path / "x",
                strict=strict,
                initialize_missing=strict,
            )
            for strict in (False, True)
        ],
    ),
    "a head of another shape": _Wrong(
        lambda path: (
            save(_linear(out=5), path / "x"),
            load(deferred_init(_linear), path / "x"),
        ),
        "strict=False with initialize_missing=True initialises it",
        lambda path: (
            pytest.warns(UserWarning, match="are initialised, not loaded").__enter__()
            and load(deferred_init(_linear), path / "x", strict=False, initialize_missing=True)
        ),
    ),
    "keys that the module lacks": _Wrong(
        lambda path: (
            save(nn.Sequential(_linear(), _linear()), path / "x"),
            load(nn.Sequential(_linear()), path / "x"),
        ),
        "prefix= names what its keys begin with, strict=False ignores the rest",
        lambda path: (
            load(_linear(), path / "x", prefix="0."),
            load(nn.Sequential(_linear()), path / "x", strict=False),
        ),
    ),
    "several series": _Wrong(
        lambda path: (
            [save({"x": n}, path / name) for n, name in enumerate(["a-1", "a-2", "a-3-ema"])],
            load({"x": 0}, path),
        ),
        r"give the path of one of them, or that of latest\(folder, pattern='a-\*-ema'\)",
        lambda path: (
            load({"x": 0}, path / "a-1"),
            _same(latest(path, pattern="a-*"), str(path / "a-2")),
            _same(latest(path, pattern="a-*-ema"), str(path / "a-3-ema")),
        ),
    ),
    "no checkpoint": _Wrong(
        latest,
        r"latest\(folder, None\) returns None then",
        lambda path: _same(latest(path, None), None),
    ),
    "too little staging memory": _Wrong(
        lambda path: async_save(_linear(), path / "x", max_staging_bytes=1),
        r"allow more, or use save\(\)",
        lambda path: (
            async_save(_linear(), path / "x", max_staging_bytes=1 << 20).result(60),
            save(_linear(), path / "y", max_staging_bytes=1),
        ),
    ),
    "named parameters": _Wrong(
        lambda path: (
            save({"o": _dcp_state(_linear())}, path / "x"),
            load({"o": _adam(_linear())}, path / "x"),
        ),
        r"load it into what .*get_state_dict\(\) returns",
        _load_as_dcp,
    ),
    "a deferred parameter of an optimizer": _Wrong(
        lambda path: _load_both(path, together=True),
        "load the module first, then make and load the optimizer",
        lambda path: _load_both(path, together=False),
    ),
    "a file of torch.save": _Wrong(
        lambda path: (
            _torch_save({"w": torch.ones(2)}, path / "x.safetensors"),
            load({"w": torch.zeros(2)}, path / "x.safetensors"),
        ),
        "convert it with 'torchrelay checkpoint convert .* FOLDER --to torchrelay', and load",
        lambda path: (
            convert(str(path / "x.safetensors"), str(path / "y"), "torchrelay", 1 << 30),
            load({"w": torch.zeros(2)}, path / "y"),
        ),
    ),
    "a folder with a file of torch.save": _Wrong(
        lambda path: (
            _torch_save({"w": torch.ones(2)}, path / "pytorch_model.bin"),
            load({"w": torch.zeros(2)}, path),
        ),
        "if pytorch_model.bin is a file of torch.save, convert it with 'torchrelay checkpoint "
        "convert .*pytorch_model.bin FOLDER --to torchrelay', and load FOLDER",
        lambda path: (
            convert(str(path / "pytorch_model.bin"), str(path / "y"), "torchrelay", 1 << 30),
            load({"w": torch.zeros(2)}, path / "y"),
        ),
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_advice(name: str, tmp_path: Path) -> None:
    wrong = _CASES[name]
    with pytest.raises(TorchRelayError) as caught:
        wrong.call(tmp_path)
    assert re.search(wrong.advice, str(caught.value)), str(caught.value)
    wrong.follow(tmp_path)


def test_a_warning_about_checksums_is_silenced_as_it_says(tmp_path: Path) -> None:
    save(_linear(), tmp_path / "x", checksum=False)
    with pytest.warns(UserWarning, match="load it with verify='header'"):
        load(_linear(), tmp_path / "x")
    load(_linear(), tmp_path / "x", verify="header")
    assert not verify(tmp_path / "x")
