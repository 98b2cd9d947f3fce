"""Tensors that are more, or less, than plain memory: each is stored as what it is, or refused by
name before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.testing._internal.two_tensor import TwoTensor

from torchrelay.checkpoint import Reader, Writer, async_save, load, save
from torchrelay.checkpoint.engine._background import saver
from torchrelay.deferred import deferred_init, fake, is_deferred
from torchrelay.errors import (
    ArgumentError,
    DeferredError,
    MismatchError,
    TorchRelayError,
    UnsupportedError,
)

Save = Callable[[dict[str, Any], Path], object]


def _save_later(state: dict[str, Any], path: Path) -> None:
    async_save(state, path).result(60)


@contextmanager
def _raising_the_cause() -> Iterator[None]:
    try:
        yield
    except dcp.CheckpointException as error:
        ((cause, _),) = error.failures.values()
        raise cause from None


def _save_with_dcp(state: dict[str, Any], path: Path) -> None:
    with _raising_the_cause():
        dcp.save(state, storage_writer=Writer(path))


def _load_with_dcp(state: dict[str, Any], path: Path) -> None:
    with _raising_the_cause():
        dcp.load(state, storage_reader=Reader(path))


WAYS: dict[str, Save] = {"save": save, "async_save": _save_later, "Writer": _save_with_dcp}
LOADS: dict[str, Save] = {"load": load, "Reader": _load_with_dcp}
ways = pytest.mark.parametrize("way", WAYS)
loads = pytest.mark.parametrize("way", LOADS)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def no_writer_left() -> Iterator[None]:
    yield
    saver.close()


def _views() -> dict[str, torch.Tensor]:
    """Views of one memory that differ in nothing but a lazy bit; the last one is a tie."""
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    return {"z": z, "conj": z.conj(), "imag": z.imag, "neg": z.conj().imag, "again": z.view(2)}


@ways
def test_lazy_conjugates_are_not_ties(way: str, tmp_path: Path) -> None:
    state = _views()
    WAYS[way](state, tmp_path / "c")
    found = {key: torch.zeros_like(value) for key, value in _views().items()}
    load(found, tmp_path / "c")
    for key, value in state.items():
        assert torch.equal(found[key], value), key
    # Two complex tensors of 16 bytes, two of 8, the header and its padding.
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.safetensors")]
    assert sum(sizes) < 1500


@loads
def test_lazy_conjugates_are_filled(way: str, tmp_path: Path) -> None:
    state = _views()
    save(state, tmp_path / "c")
    for key, target in _views().items():
        target.zero_()
        LOADS[way]({key: target}, tmp_path / "c")
        assert torch.equal(target, state[key])


class _Own(torch.Tensor):
    """A class that adds nothing."""


@ways
def test_keys_in_another_order_keep_their_tensors(way: str, tmp_path: Path) -> None:
    """A save uses what it knows of the state that was saved last."""
    sizes = {"a": (4, 1.0), "b": (4, 2.0), "c": (9, 3.0)}
    state = {key: torch.full((size,), value) for key, (size, value) in sizes.items()}
    for kind in (torch.Tensor, _Own):
        for keys in ("abc", "bac", "cab"):
            path = tmp_path / f"{kind.__name__}-{keys}"
            WAYS[way]({key: state[key].as_subclass(kind) for key in keys}, path)
            found = {key: torch.zeros_like(value) for key, value in state.items()}
            load(found, path)
            assert all(torch.equal(found[key], state[key]) for key in keys)


def _one_element() -> dict[str, torch.Tensor]:
    """Tensors that are contiguous, with strides that a dense one would not have."""
    return {
        "column": torch.randn(1, 5)[:, 0],
        "row": torch.randn(3, 5).t()[:1, 1:2],
        "scalar": torch.randn(4)[2],
        "none": torch.randn(3, 0, 5)[:, :, 0],
        "strided": torch.randn(6, 4)[::2, ::3],
        "complex": torch.randn(1, 7, dtype=torch.complex128)[:, 3],
        "halves": torch.randn(2, 9, dtype=torch.bfloat16)[:, :1],
    }


@ways
@pytest.mark.parametrize("read", LOADS)
def test_views_of_one_element(way: str, read: str, tmp_path: Path) -> None:
    state = _one_element()
    WAYS[way](state, tmp_path / "c")
    found = _one_element()
    LOADS[read](found, tmp_path / "c")
    for key, value in state.items():
        assert torch.equal(found[key], value), key


def test_parts_of_one_element_of_a_larger_tensor(tmp_path: Path) -> None:
    """A sharded tensor whose blocks and segments are single elements."""
    whole = torch.arange(15.0).reshape(5, 3)
    save({"w": whole}, tmp_path / "c")
    target = deferred_init(torch.nn.Linear, 3, 5, bias=False)

    def last(name: str, tensor: torch.Tensor) -> tuple[slice, ...]:
        return slice(4, 5), slice(2, 3)

    load(target, tmp_path / "c", shard=last, prefix="", strict=False)
    assert is_deferred(target.weight)  # the names differ
    save({"weight": whole}, tmp_path / "d")
    load(target, tmp_path / "d", shard=last)
    assert target.weight.tolist() == [[14.0]]


def _subclasses() -> dict[str, Any]:
    two = TwoTensor(torch.ones(3), torch.full((3,), 2.0))
    model = torch.nn.Linear(2, 2)
    inner = TwoTensor(torch.eye(2), TwoTensor(torch.eye(2) * 2, torch.eye(2) * 3))
    model.weight = torch.nn.Parameter(inner)
    return {"two": two, "model": model, "list": [two]}


def _parts(tensor: Any) -> list[torch.Tensor]:
    if isinstance(tensor, TwoTensor):
        return [*_parts(tensor.a), *_parts(tensor.b)]
    return [tensor]


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_wrappers_are_stored_by_their_parts(way: str, tmp_path: Path) -> None:
    state, found = _subclasses(), _subclasses()
    WAYS[way](state, tmp_path / "c")
    for wrapper in (found["two"], found["model"].weight):
        for part in _parts(wrapper):
            part.detach().zero_()
    assert load(found, tmp_path / "c") == ([], [])
    for one, other in (
        (found["two"], state["two"]),
        (found["model"].weight, state["model"].weight),
    ):
        assert type(one) is TwoTensor
        assert all(map(torch.equal, _parts(one), _parts(other)))
    assert [float(part[0]) for part in _parts(found["list"][0])] == [1.0, 2.0]

    with pytest.raises(MismatchError, match="lacks 'two'"):
        load({"two": torch.zeros(3)}, tmp_path / "c")
    save({"two": {"a": torch.ones(3), "b": torch.ones(3), "$subclass": None}}, tmp_path / "d")
    with pytest.raises(MismatchError, match="'two' is of another tensor class"):
        load({"two": found["two"]}, tmp_path / "d")


class _Opaque(torch.Tensor):
    """A wrapper that does not say what it is made of."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Opaque:
        self: _Opaque = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return self

    held: torch.Tensor

    def __init__(self, inner: torch.Tensor) -> None:
        super().__init__()
        self.held = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inner = [one.held if isinstance(one, _Opaque) else one for one in args]
        result = func(*inner, **(kwargs or {}))
        return _Opaque(result) if isinstance(result, torch.Tensor) else result


def _lazy() -> torch.Tensor:
    return torch.nn.LazyLinear(3).weight


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def _released() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _imagined() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def _faked() -> torch.Tensor:
    with fake.fake_mode():
        return torch.ones(3)


WITHOUT_MEMORY: dict[str, tuple[Callable[[], torch.Tensor], type[TorchRelayError], str]] = {
    "opaque": (lambda: _Opaque(torch.ones(3)), UnsupportedError, "cannot hold a _Opaque"),
    "lazy": (_lazy, UnsupportedError, "no shape before the first call"),
    "nested": (_jagged, UnsupportedError, "nested"),
    "meta": (lambda: torch.ones(3, device="meta"), ArgumentError, "meta device"),
    "released": (_released, ArgumentError, "memory of the tensor was released"),
    "torch's fake": (_imagined, DeferredError, "deferred or fake"),
    "fake": (_faked, DeferredError, "deferred or fake"),
    "deferred": (lambda: deferred_init(torch.ones, 3), DeferredError, "deferred or fake"),
}


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
@pytest.mark.parametrize("way", ["save", "async_save"])
def test_tensors_without_memory_are_not_saved(kind: str, way: str, tmp_path: Path) -> None:
    make, error, message = WITHOUT_MEMORY[kind]
    state = {"good": torch.ones(2), "outer": [{"bad": make()}]}
    with pytest.raises(error, match=rf"^outer\.0\.bad: .*{message}"):
        WAYS[way](state, tmp_path / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["opaque", "meta", "released"])
def test_a_writer_refuses_tensors_without_memory(kind: str, tmp_path: Path) -> None:
    make, error, message = WITHOUT_MEMORY[kind]
    with pytest.raises(error, match=rf"^bad: .*{message}"):
        _save_with_dcp({"good": torch.ones(2), "bad": make()}, tmp_path / "c")
    with pytest.raises(UnsupportedError, match=r"two: .* cannot hold a TwoTensor"):
        _save_with_dcp({"two": TwoTensor(torch.ones(3), torch.ones(3))}, tmp_path / "d")
    assert not (tmp_path / "c").exists() and not (tmp_path / "d").exists()


class _Changing(dcp.DefaultSavePlanner):
    """Saves other tensors than the state has, and plans them if ``dtype`` is given."""

    def __init__(self, change: Callable[[Any], Any], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._change, self._dtype = change, dtype

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if self._dtype is not None and item.tensor_data is not None:
                item.tensor_data.properties.dtype = self._dtype
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        return self._change(super().resolve_data(write_item))


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (torch.Tensor.half, r"torch\.float16 and shape \[4\]"),
        (torch.Tensor.float, r"torch\.float32 and shape \[4\]"),
        (lambda tensor: tensor[:2], r"torch\.bfloat16 and shape \[2\]"),
    ],
)
def test_a_writer_refuses_tensors_that_are_not_as_planned(
    change: Callable[[Any], Any], given: str, tmp_path: Path
) -> None:
    state = {"w": torch.arange(4.0).bfloat16()}
    with (
        pytest.raises(MismatchError, match=rf"^w: _Changing plans .*bfloat16.*{given}; let create"),
        _raising_the_cause(),
    ):
        dcp.save(state, storage_writer=Writer(tmp_path / "c"), planner=_Changing(change))
    assert not (tmp_path / "c").exists()

    planner = _Changing(torch.Tensor.half, torch.float16)
    dcp.save(state, storage_writer=Writer(tmp_path / "d"), planner=planner)
    found = {"w": torch.zeros(4, dtype=torch.float16)}
    load(found, tmp_path / "d")
    assert found["w"].tolist() == [0, 1, 2, 3]


UNFILLABLE: dict[str, tuple[Callable[[], torch.Tensor], type[TorchRelayError], str]] = {
    **{kind: WITHOUT_MEMORY[kind] for kind in ("meta", "released", "opaque", "deferred")},
    "expanded": (lambda: torch.zeros(1).expand(3), ArgumentError, "share memory"),
    "windows": (lambda: torch.zeros(4).unfold(0, 2, 1)[:, :1].expand(3, 3), ArgumentError, "share"),
}


@loads
@pytest.mark.parametrize("kind", UNFILLABLE)
def test_targets_are_checked_before_anything_is_read(way: str, kind: str, tmp_path: Path) -> None:
    if (way, kind) == ("Reader", "meta"):
        pytest.skip("DCP puts a new tensor in place of one on the meta device")
    make, error, message = UNFILLABLE[kind]
    bad = make()
    save({"a": torch.ones(2), "bad": torch.ones(bad.shape), "z": torch.ones(2)}, tmp_path / "c")
    state: dict[str, Any] = {"a": torch.zeros(2), "bad": bad, "z": torch.zeros(2)}
    with pytest.raises(error, match=rf"^bad: .*{message}"):
        LOADS[way](state, tmp_path / "c")
    assert not state["a"].any() and not state["z"].any()


def test_a_module_on_the_meta_device_is_not_loaded_silently(tmp_path: Path) -> None:
    source = torch.nn.Linear(3, 2)
    save(source, tmp_path / "c")
    target = torch.nn.Linear(3, 2, device="meta")
    with pytest.raises(ArgumentError, match=r"weight: .*meta device.*to_empty"):
        load(target, tmp_path / "c")
    load(target.to_empty(device="cpu"), tmp_path / "c")
    assert torch.equal(target.weight, source.weight)


@loads
def test_inference_tensors_are_filled(way: str, tmp_path: Path) -> None:
    save({"w": torch.ones(3, 4), "t": torch.ones(4, 3)}, tmp_path / "c")
    with torch.inference_mode():
        state = {"w": torch.zeros(3, 4), "t": torch.zeros(3, 4).t()}
    LOADS[way](state, tmp_path / "c")
    assert bool(state["w"].all()) and bool(state["t"].all())
