"""The record decides every value: what is read before it is overwritten, run twice, changed in
between, drawn for real.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchrelay.deferred import (
    deferred_init,
    dematerialize,
    materialize_module,
    materialize_tensor,
)
from torchrelay.errors import DeferredError

Build = Callable[[], nn.Module]


def both(build: Build) -> tuple[Any, Any]:
    """The eager and the deferred module; the generator ends where it does after eager
    construction.
    """
    torch.manual_seed(5)
    eager = build()
    end = torch.get_rng_state()
    torch.manual_seed(5)
    module = deferred_init(build)
    assert torch.equal(torch.get_rng_state(), end)
    return eager, module


def assert_same(module: nn.Module, eager: nn.Module) -> None:
    mine, theirs = module.state_dict(), eager.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def in_every_order(module_of: Callable[[], nn.Module], eager: nn.Module) -> None:
    """Materialized whole, each tensor first, and by halves, the module equals ``eager``."""
    module = module_of()
    materialize_module(module)
    assert_same(module, eager)
    for first in eager.state_dict():
        module = module_of()
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        materialize_tensor(tensors[first])
        materialize_module(module)
        assert_same(module, eager)
    module = module_of()
    materialize_module(
        module, shard=lambda name, tensor: (slice(1, None),) if tensor.dim() else None
    )
    for name, tensor in eager.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor[1:] if tensor.dim() else tensor), name


def check(build: Build) -> None:
    eager, _ = both(build)
    in_every_order(lambda: both(build)[1], eager)


def test_a_reader_of_what_is_overwritten_reads_what_was_there() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        table = torch.randn(1000, 8)
        module.emb = nn.Parameter(table[:100].clone())
        module.out = nn.Parameter(module.emb.detach() * 0.5)
        with torch.no_grad():
            module.emb[0].zero_()
        return module

    check(build)


def test_readers_of_readers_too() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.student, module.teacher, module.anchor = (nn.Linear(40, 30) for _ in range(3))
        module.anchor.load_state_dict(module.teacher.state_dict())
        module.teacher.load_state_dict(module.student.state_dict())
        module.student.reset_parameters()
        return module

    check(build)


def test_every_step_of_a_tensor_that_is_changed_step_by_step() -> None:
    def build() -> nn.Module:
        module: Any = nn.Module()
        module.register_buffer("state", torch.rand(5, 5))
        steps = torch.zeros(6, 5, 5)
        for index in range(6):
            steps[index] = module.state
            module.register_buffer(f"step{index}", module.state.clone())
            module.state.mul_(0.5).add_(module.state.t().clone())
        module.register_buffer("steps", steps)
        return module

    check(build)


def test_all_results_of_one_operation() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        norm = nn.BatchNorm1d(4)
        module.out = nn.Parameter(norm(torch.rand(7, 4)))
        module.norm = norm
        left, right = torch.rand(4), torch.rand(4)
        torch._foreach_add_([left, right], [right, left])
        module.register_buffer("left", left)
        module.q, module.r = map(nn.Parameter, torch.linalg.qr(torch.rand(4, 4)))
        with torch.no_grad():
            module.r.zero_()
        return module

    check(build)


def test_what_a_checkpoint_overwrote_is_not_read_again() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.a = nn.Linear(20, 20)
        module.b = copy.deepcopy(module.a)
        return module

    eager, module = both(build)
    materialize_module(module.a)
    module.a.load_state_dict({"weight": torch.ones(20, 20), "bias": torch.ones(20)})
    module.a.weight.data.fill_(2)  # which no version counter shows
    materialize_module(module.b)
    assert_same(module.b, eager.b)


def test_a_deferred_view_of_a_materialized_tensor_is_that_tensor() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        base = torch.rand(6)
        module.register_buffer("base", base)
        module.register_buffer("view", base[2:])
        return module

    _, module = both(build)
    materialize_tensor(module.base).fill_(3)
    now = deferred_init(lambda: module.view * 2)
    assert now.tolist() == [6] * 4
    later = deferred_init(lambda: torch.zeros(4) + module.view)
    module.view.add_(1)
    assert module.base.tolist() == [3, 3, 4, 4, 4, 4]
    with pytest.raises(DeferredError, match="changed in place"):
        materialize_tensor(later)
    assert materialize_tensor(module.view).tolist() == [4] * 4
    assert module.view.data_ptr() == module.base[2:].data_ptr()


@pytest.mark.parametrize("inside", [False, True])
def test_a_deferred_view_of_a_materialized_tensor_is_drawn_and_copied(inside: bool) -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.register_buffer("base", torch.zeros(60))
        module.view = nn.Parameter(module.base[20:])  # type: ignore[index]
        return module

    def change(module: nn.Module) -> nn.Module:
        nn.init.trunc_normal_(module.view, std=1.0, a=-1, b=1)  # type: ignore[arg-type]
        return copy.deepcopy(module)

    eager, module = both(build)
    materialize_tensor(module.base)
    torch.manual_seed(3)
    copied = deferred_init(change, module) if inside else change(module)
    end = torch.get_rng_state()
    torch.manual_seed(3)
    change(eager)
    assert torch.equal(torch.get_rng_state(), end)
    for one in (module, copied):
        materialize_module(one)
        assert_same(one, eager)
        assert one.view.data_ptr() == one.base[20:].data_ptr()  # type: ignore[operator,index]
    assert isinstance(copied.view, nn.Parameter)
    assert copied.view.data_ptr() != module.view.data_ptr()


@pytest.mark.parametrize("inference", [False, True])
def test_factories_read_only_the_attributes_of_a_tensor(inference: bool) -> None:
    """Not its values, which may change, and not its memory, which nothing keeps."""
    with torch.inference_mode(inference):
        held = [torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last).double()]

    def build() -> nn.Module:
        module = nn.Module()
        for name, make in FACTORIES.items():
            module.register_buffer(name, make(held[0]))
        return module

    eager, module = both(build)
    with torch.inference_mode(inference):
        held[0].add_(1)
    memory = weakref.ref(held.pop())
    gc.collect()
    assert memory() is None

    def again() -> nn.Module:
        dematerialize(module)
        return module

    in_every_order(again, eager)


FACTORIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda t: torch.full_like(t, 3),
    "rand_like": torch.rand_like,
    "randn_like": lambda t: torch.randn_like(t, dtype=torch.float32),
    "randint_like": lambda t: torch.randint_like(t, 9),
    "randint_like_from": lambda t: torch.randint_like(t, 5, 9),
    "generator": lambda t: torch.rand_like(t, generator=torch.Generator().manual_seed(2)),
    "new_zeros": lambda t: t.new_zeros(3),
    "new_ones": lambda t: t.new_ones(3),
    "new_full": lambda t: t.new_full((3,), 2),
    "empty_like": lambda t: torch.empty_like(t).fill_(1),
    "new_empty": lambda t: t.new_empty(3).fill_(1),
    "new_empty_strided": lambda t: t.new_empty_strided((3, 2), (1, 3)).normal_(),
}


def test_factories_do_not_compute_the_tensors_whose_attributes_they_read() -> None:
    with pytest.raises(DeferredError, match="changed in place"):
        materialize_tensor(_like_a_changed_sum(lambda t: t + 1))
    assert not materialize_tensor(_like_a_changed_sum(torch.zeros_like)).any()


def _like_a_changed_sum(make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    outside = torch.ones(3)
    made = deferred_init(lambda: make(torch.zeros(3) + outside))
    outside.add_(1)
    return made


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.randn(4, 3)[4:].clone(),  # noqa: PLW0108
        lambda: torch.randn(0, 3).mul_(2),
        lambda: torch.randn(6, 4)[2:2].copy_(torch.rand(4)),
        lambda: torch.cat([torch.rand(5), torch.rand(5)[5:]])[3:].clone(),  # noqa: PLW0108
        lambda: torch.randn(4, 3)[:, 3:].clone().add_(1),
    ],
)
def test_empty_copies(build: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(5)
    expected = build()
    torch.manual_seed(5)
    assert torch.equal(materialize_tensor(deferred_init(build)), expected)
    torch.manual_seed(5)
    module: Any = nn.Module()
    module.register_buffer("made", deferred_init(build))
    materialize_module(module, shard=lambda name, tensor: (slice(0, 1),))
    assert torch.equal(module.made, expected[:1])


def _reset_outside(outside: nn.Linear) -> list[torch.Tensor]:
    outside.reset_parameters()
    return [outside.weight.detach().clone(), outside.bias.detach().clone()]


REAL_DRAWS: dict[str, Callable[[nn.Linear], Any]] = {
    "reset_parameters": _reset_outside,
    "multinomial": lambda m: torch.multinomial(m.weight.detach().abs(), 2),
    "bernoulli": lambda m: torch.bernoulli(m.weight.detach().abs().clamp(max=1)),
    "normal": lambda m: torch.normal(m.weight.detach(), 1.0),
    "dropout": lambda m: nn.functional.dropout(m.weight.detach(), 0.3),
    "part of a clone": lambda m: nn.init.uniform_(m.weight.detach().clone()[-2:]),
    "custom operator": lambda m: torch.ops.torchrelay_test.noisy(m.weight.detach()),
    "rand_like": lambda m: m.weight.detach().clone().random_(0, 100),
}


@torch.library.custom_op("torchrelay_test::noisy", mutates_args=())
def noisy(values: torch.Tensor) -> torch.Tensor:
    """Draws, and does not say so."""
    return values + torch.rand(values.shape)


@noisy.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


@pytest.mark.parametrize("name", REAL_DRAWS)
def test_draws_on_real_tensors_take_their_place_in_the_sequence(name: str) -> None:
    seen: list[Any] = []

    def build() -> nn.Module:
        module = nn.Module()
        module.first = nn.Linear(30, 30)
        seen.append([outside_draw(outside), outside_draw(outside)])
        module.second = nn.Linear(30, 30)
        return module

    outside, outside_draw = nn.Linear(6, 5), REAL_DRAWS[name]
    eager, module = both(build)
    materialize_module(module)
    assert_same(module, eager)
    mine, theirs = (tree_leaves(values) for values in (seen[1], seen[0]))
    assert all(map(torch.equal, map(materialize_tensor, mine), theirs))


@pytest.mark.parametrize(
    "draw",
    [
        lambda t: torch.binomial(torch.full_like(t, 9), t),
        lambda t: torch._sample_dirichlet(t + 0.1),
        lambda t: torch.distributions.Gamma(t + 0.1, t + 0.1).sample(),
        torch.ops.torchrelay_test.noisy,
        torch.poisson,
        lambda t: nn.functional.rrelu(t, training=True),
        lambda t: torch.normal(1.0, torch.poisson(t.t())),
        torch.nn.functional.gumbel_softmax,
        lambda t: torch.poisson(t, generator=torch.Generator().manual_seed(1)),
        lambda t: torch._standard_gamma(t + 0.1, generator=torch.Generator().manual_seed(2)),
    ],
)
def test_draws_on_deferred_tensors(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def build() -> nn.Module:
        module = nn.Linear(12, 12)
        with torch.no_grad():
            module.register_buffer("drawn", draw(torch.rand(5, 6)))
            module.register_buffer("again", draw(torch.rand(5, 6)))
        module.register_buffer("after", torch.rand(5))
        return module

    check(build)


def test_draws_like_a_tensor_that_is_not_contiguous() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        like = torch.rand(2, 4, 8, 8).to(memory_format=torch.channels_last)
        module.register_buffer("normal", torch.randn_like(like))
        module.register_buffer("uniform", torch.rand_like(like))
        module.register_buffer("after", torch.rand(5))
        return module

    check(build)


def test_another_thread_draws_other_numbers() -> None:
    theirs: list[torch.Tensor] = []

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: theirs.append(torch.rand(50)))
        thread.start()
        thread.join()

    def build(between: Callable[[], None]) -> nn.Module:
        module = nn.Module()
        for index in range(4):
            module.register_buffer(f"t{index}", torch.rand(50))
            between()
        return module

    torch.manual_seed(5)
    eager = build(lambda: None)
    torch.manual_seed(5)
    module = deferred_init(build, elsewhere)
    materialize_module(module)
    assert_same(module, eager)
    numbers = torch.cat([*theirs, *module.state_dict().values()])
    # Of 400 numbers of 24 bits, hardly two are the same by chance.
    assert numbers.unique().numel() > 395


@pytest.mark.parametrize(
    "build",
    [
        lambda z: z.conj(),
        lambda z: z.mH,
        lambda z: z.adjoint(),
        lambda z: z.conj() @ z,
        lambda z: z.conj()[1:].clone(),
        lambda z: z.conj().imag,
        lambda z: torch.view_as_real(z.conj().resolve_conj()),
        lambda z: z.imag.neg(),
        lambda z: copy.deepcopy(z.conj()),
        lambda z: torch.cat([z, z.conj()]),
        lambda z: z.conj().mul_(2j),
        lambda z: torch.zeros_like(z).copy_(z.conj()),
        lambda z: z.conj() + 1,
        lambda z: torch.empty_like(z).set_(z.conj()),
    ],
)
def test_conjugates(build: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def module_of() -> nn.Module:
        module = nn.Module()
        z = torch.randn(4, 4, dtype=torch.complex64)
        module.register_buffer("made", build(z))
        module.register_buffer("z", z)
        return module

    check(module_of)
    eager, module = both(module_of)
    materialize_module(module)
    assert (
        module.made.is_conj() == eager.made.is_conj()
        and module.made.is_neg() == eager.made.is_neg()
    )


_OF_LAPACK: dict[str, Callable[[torch.Tensor], Any]] = {
    "svd": lambda x: torch.linalg.svd(x).S,
    "eigh": lambda x: torch.linalg.eigh(x).eigenvalues,
    "qr": lambda x: torch.linalg.qr(x).Q,
    "inv": torch.linalg.inv,
    "orthogonal_": nn.init.orthogonal_,
    # Of these, eager execution has the same bits where a gradient is required.
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": torch.linalg.eigvalsh,
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, ord=2),
}


@pytest.mark.parametrize("name", _OF_LAPACK)
@pytest.mark.parametrize("layout", ["whole", "transposed", "part"])
def test_results_of_lapack_are_those_of_eager_execution(name: str, layout: str) -> None:
    needs_gradient = name in ("svdvals", "eigvalsh", "matrix_norm")

    def build() -> nn.Module:
        drawn = torch.randn(65, 80)[1:, 3:67]
        x = {"whole": drawn.clone(), "transposed": drawn.t(), "part": drawn}[layout]
        made = nn.Module()
        found = _OF_LAPACK[name](x.requires_grad_() if needs_gradient else x)
        made.register_buffer("found", found.detach())
        return made

    torch.manual_seed(3)
    expected = build()
    torch.manual_seed(3)
    found = deferred_init(build)
    materialize_module(found)
    assert torch.equal(found.get_buffer("found"), expected.get_buffer("found"))
