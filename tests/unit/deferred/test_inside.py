"""What programs do inside deferred_init beside drawing: load real values, run layers, read and
format values.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchrelay.deferred import _replay as replays
from torchrelay.deferred import (
    _results,
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)


def equals_eager(build: Callable[[], Any]) -> list[Any]:
    """What a deferred ``build`` gives, before it is materialized and compared with what an eager
    one gives.
    """
    torch.manual_seed(5)
    eager = tree_leaves(build())
    end = torch.get_rng_state()
    torch.manual_seed(5)
    made: list[Any] = tree_leaves(deferred_init(build))
    assert torch.equal(torch.get_rng_state(), end)
    deferred = [isinstance(one, torch.Tensor) and is_deferred(one) for one in made]
    for one, other in zip(made, eager, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(materialize_tensor(one), other)
        else:
            assert one == other
    return deferred


def _nested() -> dict[str, torch.Tensor]:
    inner = deferred_init(nn.Linear, 3, 3)
    materialize_module(inner)
    return inner.state_dict()


def test_real_tensors_stay_real(tmp_path: Path) -> None:
    real = nn.Linear(3, 3)
    torch.save(real.state_dict(), tmp_path / "state.pt")
    for build in (
        lambda: copy.deepcopy(real).state_dict(),
        lambda: torch.load(tmp_path / "state.pt"),
        lambda: torch.load(tmp_path / "state.pt", mmap=True),
        lambda: pickle.loads(pickle.dumps(real)).state_dict(),
        _nested,
    ):
        assert not any(equals_eager(build))


def test_a_real_tensor_that_buffers_get_as_data_stays_real() -> None:
    stats = torch.full((4,), 5.0)

    def build() -> nn.BatchNorm1d:
        norm = nn.BatchNorm1d(4)
        norm.running_mean.data = norm.running_var.data = stats  # type: ignore[union-attr]
        return norm

    norm = deferred_init(build)
    for buffer in (norm.running_mean, norm.running_var):
        assert buffer is not None and not is_deferred(buffer)
        assert buffer.data_ptr() == stats.data_ptr()
    assert stats.tolist() == [5.0] * 4


def test_deep_copies_of_what_is_real_are_real() -> None:
    """Buffers, plain tensors, views and modules; TransformerEncoder copies a layer that it gets."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    norm, plain = nn.BatchNorm1d(4), torch.randn(3)
    for what in (norm, nn.Sequential(nn.Linear(2, 2), norm), [plain, plain.conj(), plain[1:]]):
        copied = deferred_init(copy.deepcopy, what)
        tensors = copied.state_dict().values() if isinstance(copied, nn.Module) else copied
        expected = what.state_dict().values() if isinstance(what, nn.Module) else what
        for mine, theirs in zip(tensors, expected, strict=True):
            assert not is_deferred(mine) and torch.equal(mine, theirs)
            assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
    first, *_, view = deferred_init(copy.deepcopy, [plain, plain[1:]])
    assert view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()

    def encoder() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 3))

    equals_eager(lambda: encoder().state_dict())


def test_safetensors_stay_real(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    files.save_file(nn.Linear(3, 3).state_dict(), tmp_path / "state")

    def loaded() -> nn.Module:
        module = nn.Linear(3, 3)
        module.load_state_dict(files.load_file(tmp_path / "state"))
        return module

    def rows() -> torch.Tensor:
        with files.safe_open(tmp_path / "state", "pt") as file:
            return torch.as_tensor(file.get_slice("weight")[1:])

    assert not any(equals_eager(lambda: files.load_file(tmp_path / "state")))
    assert not any(equals_eager(rows))
    assert all(equals_eager(lambda: list(loaded().parameters())))
    assert not any(
        equals_eager(lambda: torch.asarray(torch.UntypedStorage(8).fill_(3), dtype=torch.uint8))  # type: ignore[attr-defined]
    )
    assert all(equals_eager(lambda: [torch.tensor([1.0, 2.0]), torch.asarray([3.0])]))


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.tensor([torch.tensor(1.0), torch.tensor(2.0)]),
        lambda: torch.tensor([torch.rand(()), torch.rand(()) * 3]),
        lambda: torch.tensor([torch.randint(9, ()), 3]),
        lambda: torch.as_tensor([torch.rand(()), 1.0]),
        lambda: torch.asarray(torch.UntypedStorage(8), dtype=torch.uint8).numel(),
        lambda: [
            int(torch.rand(()) * 9),
            float(torch.rand(1)),
            complex(torch.rand(())),
            bool(torch.zeros(1)),
        ],
        lambda: list(range(10))[torch.tensor(4) :],
        lambda: f"{torch.rand(9).norm():.3f}",
        lambda: f"{torch.rand(())} {torch.arange(3).sum():>5}",
    ],
)
def test_numbers_out_of_tensors(build: Callable[[], Any]) -> None:
    equals_eager(build)


def test_arrays_are_read_only_unless_they_are_copies() -> None:
    """In eager mode, a write to one that shares memory would change the tensor."""

    def build() -> torch.Tensor:
        tensor = torch.zeros(3)
        for array in (tensor.numpy(), np.asarray(tensor)):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 7
        for array in (np.array(tensor), np.asarray(tensor, np.float64)):
            array[:] = 7
        return tensor

    assert not materialize_tensor(deferred_init(build)).any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run(kind: Any, bias: bool) -> None:
    def build() -> Any:
        layer = kind(3, 4, 2, bidirectional=True, bias=bias)
        output, state = layer(torch.randn(5, 2, 3))
        with torch.no_grad():
            layer.weight_hh_l0.mul_(2)
            return [output, state, layer(torch.randn(5, 2, 3))[0]]

    equals_eager(build)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags_run(mode: str) -> None:
    equals_eager(
        lambda: nn.EmbeddingBag(7, 3, mode=mode)(
            torch.tensor([1, 2, 4, 5]), torch.tensor([0, 2, 2])
        )
    )
    equals_eager(lambda: nn.EmbeddingBag(7, 3, mode=mode)(torch.tensor([[1, 2], [4, 5]])))


def test_attention_runs() -> None:
    equals_eager(lambda: nn.TransformerEncoderLayer(8, 2, 16)(torch.randn(4, 2, 8)))


def test_compiled_functions_run() -> None:
    double = torch.compile(lambda values: values.sin() * 2, backend="eager")

    def build() -> list[Any]:
        weights = torch.randn(3, 4)
        return [double(weights), double(weights).sum().item(), double(torch.ones(2))]

    equals_eager(build)


def test_the_first_deferred_module_does_not_import_the_compiler() -> None:
    program = (
        "import sys, torch; from torchrelay.deferred import deferred_init, materialize_module\n"
        "materialize_module(deferred_init(torch.nn.Linear, 3, 3))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def _executed(build: Callable[[], Any]) -> Counter[str]:
    """Return how often each operation is executed on values during ``deferred_init(build)``."""
    deferred_init(build)  # the shapes of results are known from now on
    return _called(lambda: deferred_init(build)) - _called(build)


def _called(run: Callable[[], Any]) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return Counter(event.name for event in profile.events())


def _power_iteration(rounds: int = 160) -> tuple[float, torch.Tensor]:
    matrix, vector = torch.randn(30, 30), torch.randn(30)
    for _ in range(rounds):
        vector = matrix @ vector
        vector = vector / vector.norm().item()
        if (matrix @ vector).norm().item() < 0:
            break
    return (matrix @ vector).norm().item(), vector


def test_reading_runs_each_operation_once() -> None:
    executed = _executed(_power_iteration)
    assert executed["aten::mv"] == 2 * 160 + 1
    assert executed["aten::div"] == 160
    equals_eager(_power_iteration)


def test_operations_that_follow_a_read_run_once() -> None:
    """Those that no read needs, because a later one overwrites what they wrote, do not run."""

    def build() -> list[Any]:
        known, other = torch.randn(6, 4), torch.randn(4)
        first = known.sum().item()
        known.div_(known.norm().item())
        known[0].add_(1)  # a view, in place
        halves = known.double().split(3)
        lazy = other * 2  # not computed yet
        known.mul_(lazy)
        known.normal_(0, abs(first))  # draws
        best, where = (known + 1).max(0)
        known.sum().item()
        best, where = known.max(0)
        best.neg_()
        large = known.new_ones(1).expand(600_000).clone()
        with torch.inference_mode(False), torch.enable_grad():
            bounded = known.clamp(-1, 1)
        return [first, known, *halves, lazy, best, where, large, bounded, best.sum().item()]

    equals_eager(build)
    executed = _executed(build)
    for name in ("aten::max", "aten::neg_", "aten::normal_"):
        assert executed[name] == 1, (name, executed)
    for name in ("aten::div_", "aten::add_"):
        assert executed[name] == 0, (name, executed)


def test_an_operation_that_fails_at_once_is_not_recorded() -> None:
    def build() -> list[torch.Tensor]:
        table, places = torch.randn(3, 2), torch.arange(4)
        (table.sum() + places.sum()).item()
        try:
            table[places]
        except IndexError:
            table.mul_(2)
        else:
            pytest.fail("the index is out of bounds")
        return [table, table.sum(0)]

    equals_eager(build)


def test_shapes_of_like_operations_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, old = [], _results._shapes_of
    monkeypatch.setattr(
        _results,
        "_shapes_of",
        lambda *call: (computed.append(call[0]), old(*call))[1],  # type: ignore[func-returns-value]
    )
    monkeypatch.setattr(_results, "_known", {})
    deferred_init(_power_iteration)
    assert 0 < len(computed) < 10
    for build in (
        lambda: [
            torch.arange(3) * 2,
            torch.arange(3) * 2.0,
            torch.arange(3) * 2.5,
            torch.arange(3) * True,
        ],
        lambda: [
            torch.ones(4)[1:].clone(),
            torch.ones(4)[2:].clone(),
            torch.ones(4, 1).t(),
            torch.ones(1, 4).t(),
        ],
        lambda: [
            torch.rand(3).double() / 2,
            torch.rand(3) / 2,
            torch.rand(3).clamp(0, 1),
            torch.rand(3) > 0.5,
        ],
        lambda: [
            torch.rand(6).view(2, 3).sum(0),
            torch.rand(6).view(2, 3).sum(1),
            torch.rand(2, 3).sum(1, True),
        ],
    ):
        equals_eager(build)
    results = [deferred_init(lambda: torch.ones(2, dtype=torch.int64) / 2) for _ in range(2)]
    torch.set_default_dtype(torch.float64)
    try:
        results.append(deferred_init(lambda: torch.ones(2, dtype=torch.int64) / 2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert [one.dtype for one in results] == [torch.float32, torch.float32, torch.float64]


def test_what_reading_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "KEPT_BYTES", 40_000)
    equals_eager(lambda: [torch.randn(40, 40).mul_(2).sum().item() for _ in range(20)])

    def build() -> nn.Module:
        module = nn.Sequential(*(nn.Linear(40, 40) for _ in range(20)))
        for layer in module:
            assert isinstance(layer, nn.Linear)
            layer.weight.data.div_(layer.weight.data.norm().item())
            assert _memory(module) <= 40_000
        return module

    module = deferred_init(build)
    assert _memory(module) == 0
    monkeypatch.setattr(replays, "KEPT_BYTES", 1_000)  # less than what one read needs
    equals_eager(lambda: [torch.randn(40, 40).mul_(2).sum().item() for _ in range(20)])


def _memory(module: nn.Module) -> int:
    """Bytes that deferred parameters hold."""
    histories = [parameter._history for parameter in module.parameters()]  # type: ignore[attr-defined]
    return sum(history.storage.size_bytes for history in histories if history.real is not None)


def test_autocast_does_not_change_what_is_recorded() -> None:
    """Reads inside an autocast region, and materialization inside one, give the recorded values."""

    def build() -> list[Any]:
        weight = torch.randn(20, 20)
        product = weight @ weight
        with torch.autocast("cpu", torch.bfloat16):
            numbers = [float(product.sum()), product.sum().item(), product[0].tolist()]
            scale = weight.norm().item()
            lower = weight @ weight / scale
            return [product, *numbers, lower, lower.sum().item()]

    equals_eager(build)
    torch.manual_seed(5)
    deferred = deferred_init(lambda: (one := torch.randn(20, 20)) @ one)
    torch.manual_seed(5)
    eager = (one := torch.randn(20, 20)) @ one
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(materialize_tensor(deferred), eager)
