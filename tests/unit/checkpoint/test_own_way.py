"""A load gives each object its state as ``torch.load`` and its own ``load_state_dict`` do: hooks
run, what appears later is there, and what refuses a state is as it was.
"""

from __future__ import annotations

import copy
import io
import os
import random
import warnings
from collections import OrderedDict, defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from torchrelay.checkpoint import load, save
from torchrelay.checkpoint._tools import read_state
from torchrelay.deferred import deferred_init
from torchrelay.errors import ArgumentError, MismatchError

PROGRAMS = int(os.environ.get("TORCHRELAY_TEST_LOADS", "150"))


def _by_torch(saved: Any, fresh: Any) -> Any:
    """Give ``fresh`` the state of ``saved`` as a user of ``torch.save`` does."""
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    return fresh


class _Scaled(torch.nn.Module):
    """Has a derived buffer, which a hook renews after a load."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.rand(3))
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.register_load_state_dict_post_hook(lambda module, keys: module.renew())
        self.renew()

    def renew(self) -> None:
        self.table.copy_(self.gain.detach().exp())


class _Fused(torch.nn.Module):
    """Is stored in parts, which are views of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.rand(6, 4))
        self.register_state_dict_post_hook(self._part)
        self.register_load_state_dict_pre_hook(self._fuse)

    @staticmethod
    def _part(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        parts = state.pop(f"{prefix}qkv").chunk(3)
        state.update(zip((f"{prefix}{name}" for name in "qkv"), parts, strict=True))

    @staticmethod
    def _fuse(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}qkv"] = torch.cat([state.pop(f"{prefix}{name}") for name in "qkv"])


class _Renamed(torch.nn.Linear):
    """Stores its weight under another name, and reads it by a method of its own."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kernel"] = destination.pop(f"{prefix}weight").t()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").t()
        super()._load_from_state_dict(state, prefix, *rest)


class _Inner(torch.nn.Module):
    """Takes no options in either method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def state_dict(self) -> Any:  # type: ignore[override]
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return self.inner.load_state_dict(state)


class _Blending(torch.nn.Linear):
    """Uses the old values beside the new ones."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        mixed = {name: (value + self.state_dict()[name]) / 2 for name, value in state.items()}
        return super().load_state_dict(mixed, strict, assign)


class _Reset(torch.nn.Linear):
    """Starts anew before it takes what it is given."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_load_state_dict_pre_hook(lambda module, *_: module.zero())

    def zero(self) -> None:
        with torch.no_grad():
            self.weight.zero_()


class _Remembering(torch.nn.Linear):
    """Has extra state of any form."""

    history: Any = None

    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


class _Observed(torch.ao.quantization.PerChannelMinMaxObserver):
    """Of torch: its buffers have the shape of what it has seen, which its loading gives them."""

    def __init__(self) -> None:
        super().__init__()
        if torch.initial_seed() == 0:
            self(torch.rand(4, 5))


class _Lazy(torch.nn.LazyLinear):
    """Of torch: has no shape before the first call, or before it is loaded."""

    def __init__(self) -> None:
        super().__init__(3)
        if torch.initial_seed() == 0:
            self(torch.rand(1, 2))


class _Normed(torch.nn.Module):
    """Had torch's old weight norm when it was saved, whose names the new one's hook converts."""

    def __init__(self) -> None:
        super().__init__()
        norms = torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.weight_norm
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.inner = norms[torch.initial_seed() == 0](torch.nn.Linear(2, 2))


MODULES: list[type[torch.nn.Module]] = [
    _Scaled, _Fused, _Renamed, _Inner, _Blending, _Reset, _Remembering, torch.nn.LSTM,
    torch.nn.BatchNorm1d, _Observed, _Lazy, _Normed,
]  # fmt: skip


def _made(kind: type[torch.nn.Module], seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    sizes = {torch.nn.LSTM: (2, 3), torch.nn.BatchNorm1d: (3,)}
    return kind(*sizes.get(kind, ()))


def _values(module: torch.nn.Module) -> str:
    values = [*module.named_parameters(), *module.named_buffers()]
    with torch._tensor_str.printoptions(precision=20, threshold=10_000):
        return str(values) + str(getattr(module, "history", None))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_module_is_loaded_as_by_torch(kind: Any, nested: bool, tmp_path: Path) -> None:
    if nested and kind is _Inner:
        return  # torch itself passes options to what is inside a module

    def made(seed: int) -> Any:
        module = _made(kind, seed)
        return torch.nn.Sequential(module, torch.nn.Linear(2, 2)) if nested else module

    saved = made(0)
    save({"model": saved}, tmp_path / "c")
    expected, found = _by_torch(saved, made(1)), made(1)
    assert load({"model": found}, tmp_path / "c") == ([], [])
    assert _values(found) == _values(expected)


class _Resized(torch.nn.Module):
    """Takes the shape of what it is given, as observers of quantization do."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.scale.resize_(state[f"{prefix}scale"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_deferred_module_that_grows(tmp_path: Path) -> None:
    saved: Any = torch.nn.Sequential(_Resized(), torch.nn.Linear(2, 2))
    saved[0].scale = torch.arange(3.0)
    save(saved, tmp_path / "c")
    found: Any = deferred_init(lambda: torch.nn.Sequential(_Resized(), torch.nn.Linear(2, 2)))
    load(found, tmp_path / "c")
    assert _values(found) == _values(saved)


@pytest.mark.parametrize("kind", [_Fused, _Renamed, _Reset], ids=lambda kind: kind.__name__)
def test_a_deferred_module_with_code_of_its_own(kind: Any, tmp_path: Path) -> None:
    saved = torch.nn.Sequential(kind(), torch.nn.Linear(2, 2))
    save(saved, tmp_path / "c")
    found: Any = deferred_init(lambda: torch.nn.Sequential(kind(), torch.nn.Linear(2, 2)))
    load(found, tmp_path / "c")
    assert _values(found) == _values(saved)


HISTORIES: dict[str, tuple[Any, Any]] = {
    "a longer tensor": (torch.arange(5.0), torch.zeros(2)),
    "another dtype": (torch.arange(5), torch.zeros(5)),
    "a tensor for None": (torch.arange(5.0), None),
    "None for a tensor": (None, torch.zeros(5)),
    "a dictionary that was empty": ({"amax": 1.0}, {}),
    "a dictionary that is empty": ({}, {"amax": 1.0}),
    "tensors in a list that was empty": ([torch.ones(2)], []),
    "a longer list of tensors": ([torch.ones(2), torch.ones(3)], [torch.zeros(2)]),
    "other keys": ({1: {"x": torch.ones(1)}, "y": [{}]}, {"x": 3, 1: None}),
    "a pair": ((torch.ones(2), 3), (torch.zeros(2), 4)),
    "pairs for None": ([(torch.ones(2), (torch.zeros(1),)), [torch.ones(1)]], None),
    "a value for a dictionary": (7, {"x": torch.ones(1)}),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_extra_state_takes_any_form(name: str, tmp_path: Path) -> None:
    saved, found = (torch.nn.Sequential(_Remembering()) for _ in range(2))
    saved[0].history, found[0].history = HISTORIES[name]
    before = str(saved[0].history)
    save({"m": saved}, tmp_path / "c")
    load({"m": found}, tmp_path / "c")
    assert str(found[0].history) == before == str(saved[0].history)


class _Holder:
    """A stateful object that starts anew with what it is given, as many do."""

    def __init__(self, value: dict[Any, Any]) -> None:
        self.value = value

    def state_dict(self) -> dict[Any, Any]:
        return self.value

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        for tensor in self.value.values():
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        self.value.clear()
        self.value.update(state)


class _Pair(NamedTuple):
    first: Any
    second: Any


def _random_value(rng: random.Random, kinds: int = 9, depth: int = 0) -> Any:
    kind = rng.randrange(kinds if depth < 3 else 3)
    if kind == 0:
        return torch.arange(rng.randrange(4), dtype=rng.choice([torch.int32, torch.float32])) + 1
    if kind < 3:
        return rng.choice([None, True, 3, 2.5, "text", b"bytes", (1, 2), [1, 2], float("inf")])
    if kind == 3:
        return [_random_value(rng, kinds, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 8:
        return _Pair(_random_value(rng, kinds, depth + 1), _random_value(rng, kinds, depth + 1))
    items = {
        name: _random_value(rng, kinds, depth + 1)
        for name in rng.sample(["a", "b", 0, 1], rng.randrange(4))
    }
    of: dict[int, Any] = {6: OrderedDict, 7: partial(defaultdict, list)}
    return of.get(kind, dict)(items)


@pytest.mark.parametrize("seed", range(4))
def test_any_stateful_object_gets_what_was_saved(seed: int, tmp_path: Path) -> None:
    """Whatever it has now: entries appear, disappear and change their form."""
    rng = random.Random(seed)
    for program in range(PROGRAMS // 4):
        names = rng.sample(["x", "y", "z", "w"], rng.randrange(1, 5))
        saved = {name: _random_value(rng) for name in names}
        fresh = {
            name: _random_value(rng, 6) for name in rng.sample(names, rng.randrange(len(names) + 1))
        }
        expected, before = str({k: saved[k] for k in sorted(saved)}), copy.deepcopy(fresh)
        holder = _Holder(fresh)
        path = tmp_path / str(program)
        save({"holder": _Holder(saved), "step": 1}, path, fsync=False)
        load({"holder": holder, "step": 0}, path)
        for value in (holder.value, read_state(str(path))["holder"]):
            assert str({k: value[k] for k in sorted(value)}) == expected, (program, before)


def test_names_with_a_meaning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^options\.\$container: the key has a meaning"):
        save({"options": {"$container": "box"}}, tmp_path / "c")


class _Refusing(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_load_state_dict_pre_hook(self._refuse)

    @staticmethod
    def _refuse(*_: Any) -> None:
        raise KeyError("of another run")


def test_an_object_that_refuses_its_state_is_as_it_was(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    save({"a": linear, "b": linear, "c": _Holder({"x": torch.ones(1)})}, tmp_path / "c")
    state: dict[str, Any] = {"a": torch.nn.Linear(2, 2), "b": _Refusing(), "c": _Holder({"x": 3})}
    before = _values(state["b"])
    with pytest.raises(
        MismatchError,
        match=r"load_state_dict\(\) of _Refusing 'b' refused .*KeyError: 'of another run'.*"
        r"loaded: Linear 'a'; as before: _Holder 'c'",
    ):
        load(state, tmp_path / "c")
    assert _values(state["b"]) == before and state["c"].value == {"x": 3}


def test_the_owner_judges_what_goes_through_its_code(tmp_path: Path) -> None:
    save({"model": torch.nn.Sequential(torch.nn.Linear(3, 3))}, tmp_path / "c")
    found = torch.nn.Sequential(_Renamed())
    before = _values(found)
    with pytest.raises(MismatchError, match=r"refused what the checkpoint has .*kernel"):
        load({"model": found}, tmp_path / "c")
    assert _values(found) == before
    with pytest.raises(MismatchError, match=r"lacks 'modle\.0\.bias'"):
        load({"modle": found}, tmp_path / "c")
    torch.manual_seed(0)
    saved: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    save({"model": saved}, tmp_path / "d")
    other: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), _Reset())
    del other[0].bias
    other[0].register_parameter("bias", None)
    found_keys = load({"model": other}, tmp_path / "d", strict=False)
    assert found_keys == ([], ["model.0.bias"])
    assert torch.equal(other[1].weight, saved[1].weight)


class _Growing(torch.nn.Linear):
    """Has a part more than it had, or less, which a hook accepts after a load."""

    def __init__(self, accepts: str, *parts: str) -> None:
        super().__init__(2, 2)
        for part in parts:
            self.register_buffer(part, torch.rand(2))
        self._accepts = accepts
        self.register_load_state_dict_post_hook(self._accept)

    @staticmethod
    def _accept(module: Any, keys: Any) -> None:
        for found in (keys.missing_keys, keys.unexpected_keys):
            found[:] = [key for key in found if not key.endswith(module._accepts)]


@pytest.mark.parametrize("way", ["eager", "deferred"])
@pytest.mark.parametrize(("before", "after"), [((), ("new",)), (("new",), ())])
def test_a_hook_after_the_load_accepts_keys(
    before: Any, after: Any, way: str, tmp_path: Path
) -> None:
    def made(accepts: str = "new") -> Any:
        return torch.nn.Sequential(_Growing(accepts, *after), torch.nn.Linear(2, 2))

    saved = torch.nn.Sequential(_Growing("", *before), torch.nn.Linear(2, 2))
    save({"model": saved}, tmp_path / "c")
    torch.manual_seed(1)
    expected = _by_torch(saved, made())
    torch.manual_seed(1)
    found = deferred_init(made) if way == "deferred" else made()
    assert load({"model": found}, tmp_path / "c") == ([], [])
    assert _values(found) == _values(expected)
    with pytest.raises(MismatchError, match=r"Missing key|Unexpected key"):
        load({"model": made(accepts="none")}, tmp_path / "c")


class _Rare(torch.optim.SGD):
    """Has entries of its own, which are there after the first slow step only."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.slow: dict[int, torch.Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        super().step()
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            self.slow[index] = parameter.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "steps": len(self.slow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slow = {index: tensor.clone() for index, tensor in state["slow"].items()}
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})


def test_an_optimizer_of_a_lazy_module(tmp_path: Path) -> None:
    saved, fresh = torch.nn.LazyLinear(2), torch.nn.LazyLinear(2)
    saved(torch.ones(1, 3))
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (saved, fresh)]
    saved(torch.ones(1, 3)).sum().backward()
    optimizers[0].step()
    save({"model": saved, "optimizer": optimizers[0]}, tmp_path / "c")
    load({"model": fresh, "optimizer": optimizers[1]}, tmp_path / "c")
    assert str(optimizers[1].state_dict()) == str(optimizers[0].state_dict())


def test_entries_of_an_optimizer_that_appear_later(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer, fresh, never = (_Rare(model.parameters()) for _ in range(3))
    save({"optimizer": never}, tmp_path / "never")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save({"optimizer": optimizer}, tmp_path / "c")
    for strict in (True, False):
        load({"optimizer": fresh}, tmp_path / "c", strict=strict)
        assert str(fresh.state_dict()) == str(optimizer.state_dict())
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(MismatchError, match=r"slow\.0.*another kind of optimizer"):
        load({"optimizer": plain}, tmp_path / "c")
    load({"optimizer": optimizer}, tmp_path / "never")  # and that are not there yet
    assert not optimizer.slow and not optimizer.state_dict()["state"]
