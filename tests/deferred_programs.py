"""Random initialisation programs, built eagerly and deferred, and the comparison of the two.

A program is a seed and a length: :func:`run` derives each instruction from them and from the shapes
of the tensors made so far, so that the same seed means the same program however its tensors are
made. Instructions draw, view, write in place, copy, read values, reset modules, seed and register
tensors. :func:`check` builds a program eagerly, then deferred once for each way of materializing
it, and compares every tensor, every value that the program has read and every generator's end state
bit for bit.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchrelay.deferred import (
    deferred_init,
    dematerialize,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchrelay.errors import DeferredError, TorchRelayError, UnsupportedError

__all__ = ["WAYS", "check"]

Step = Callable[["Program"], Any]

STEPS: list[tuple[int, Step]] = []
_MOST_ELEMENTS = 6000


def step(weight: int) -> Callable[[Step], Step]:
    """Enter an instruction; ``weight`` is how often it is chosen."""

    def enter(function: Step) -> Step:
        STEPS.append((weight, function))
        return function

    return enter


class Outside:
    """Real tensors and modules that a program finds, and may change."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(99)
        self.tensors = [
            torch.rand(size, generator=generator)
            for size in ((4,), (5, 6), (3, 4, 5), (1,), (16, 4))
        ]
        self.layer = nn.Linear(4, 5)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))


@dataclass
class Program:
    """The state of a running program."""

    random: random.Random
    module: nn.Module
    outside: Outside
    pool: list[torch.Tensor] = field(default_factory=list)
    layers: list[nn.Module] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    names: int = 0

    def any(self, floating: bool = False) -> torch.Tensor:
        """A tensor of the pool, mostly a recent one."""
        found = [t for t in self.pool if t.dtype.is_floating_point or not floating]
        if not found:
            return self.put(torch.randn(4, 5))
        return found[-1 - min(int(self.random.expovariate(0.35)), len(found) - 1)]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() <= _MOST_ELEMENTS and tensor.dim() <= 5:
            self.pool.append(tensor.detach())
        return tensor

    def size(self) -> tuple[int, ...]:
        return tuple(
            self.random.choice(
                (1, 2, 3, 4, 5, 7, 8, 16, 17, 24, 0 if self.random.random() < 0.1 else 6)
            )
            for _ in range(self.random.choice((0, 1, 1, 2, 2, 2, 3)))
        )

    def generator(self) -> torch.Generator | None:
        return (
            self.random.choice(self.generators)
            if self.generators and self.random.random() < 0.2
            else None
        )

    def register(self, tensor: torch.Tensor) -> None:
        self.names += 1
        name = f"t{self.names}"
        if tensor.dtype.is_floating_point and self.random.random() < 0.6:
            setattr(self.module, name, nn.Parameter(tensor.detach()))
            self.pool.append(getattr(self.module, name).detach())
        else:
            self.module.register_buffer(name, tensor.detach())


@step(10)
def make(p: Program) -> None:
    size, generator = p.size(), p.generator()
    dtype = p.random.choice((None, None, None, torch.float64, torch.bfloat16))
    p.put(
        p.random.choice((
            lambda: torch.randn(size, dtype=dtype, generator=generator),
            lambda: torch.rand(size, dtype=dtype, generator=generator),
            lambda: torch.empty(size, dtype=dtype).normal_(1, 2, generator=generator),
            lambda: torch.empty(size, dtype=dtype).uniform_(-1, 1, generator=generator),
            lambda: torch.zeros(size, dtype=dtype),
            lambda: torch.full(size, 0.5, dtype=dtype),
            lambda: torch.randint(0, 9, size),
            lambda: torch.randperm(9 + sum(size)),
            lambda: torch.arange(7.0),
            lambda: torch.eye(4, dtype=dtype),
            lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype),
            lambda: torch.randn(size, dtype=torch.complex64),
        ))()
    )  # fmt: skip


@step(10)
def view(p: Program) -> None:
    t, r = p.any(), p.random
    if t.dim() == 0:
        p.put(t.reshape(1, 1) if r.random() < 0.5 else t.expand(3))
        return
    dim = r.randrange(t.dim())
    low = r.randint(0, t.shape[dim])
    high = r.randint(low, t.shape[dim])
    p.put(
        r.choice((
            lambda: t.narrow(dim, low, high - low),
            lambda: t.narrow(dim, low, high - low),
            lambda: t.select(dim, r.randrange(max(1, t.shape[dim]))),
            lambda: t.transpose(0, -1),
            lambda: t.reshape(-1),
            lambda: t.unsqueeze(dim),
            lambda: t.chunk(2, dim)[-1],
            lambda: t[..., ::2],
            lambda: t.view(t.shape),
            t.diagonal,
            t.flatten,
            lambda: t.expand(2, *t.shape),
            lambda: t.conj() if t.is_complex() else t.mT,
            lambda: torch.view_as_real(t) if t.is_complex() else t.squeeze(),
            lambda: t.imag if t.is_complex() else t.movedim(0, -1),
            lambda: t.view(torch.int32) if t.dtype is torch.float32 else t,
            lambda: torch.unflatten(t, dim, (2, -1)),
            t.detach,
        ))()
    )  # fmt: skip


@step(14)
def write(p: Program) -> None:
    t, r, generator = p.any(), p.random, p.generator()
    other = p.any()
    inside = t if t.dim() == 0 or r.random() < 0.5 else t[r.randrange(max(1, t.shape[0])) :]
    r.choice((
        inside.zero_,
        lambda: inside.fill_(2),
        lambda: inside.mul_(0.5),
        lambda: inside.add_(1),
        lambda: inside.add_(inside),
        lambda: inside.clamp_(-1, 1),
        lambda: inside.copy_(other),
        lambda: inside.copy_(inside.flip(0)),
        lambda: inside.add_(other),
        lambda: inside.mul_(other),
        lambda: inside.normal_(generator=generator),
        lambda: inside.uniform_(generator=generator),
        lambda: inside.bernoulli_(0.4, generator=generator),
        lambda: inside.masked_fill_(inside > 0, 3),
        lambda: nn.init.trunc_normal_(inside, std=r.choice((0.02, 1.5))),
        lambda: nn.init.orthogonal_(inside),
        inside.exponential_,
        lambda: inside.random_(0, 5),
        lambda: inside.index_fill_(0, torch.tensor([0]), 4),
        lambda: inside.lerp_(other, 0.5),
        lambda: inside.data.mul_(2),
        lambda: torch._foreach_mul_([inside, other], 0.5),
        lambda: (
            inside.shape == other.shape and torch.add(other, 1, out=inside)
        ),
        lambda: inside.neg_().abs_(),
        inside.t_,
        inside.tanh_,
        lambda: inside[0].fill_(other.reshape(-1)[0]),
    ))()  # fmt: skip


def _view_inside(t: torch.Tensor, shape: tuple[int, ...], r: random.Random) -> torch.Tensor:
    """Return a view of the storage of ``t`` of this shape, or one that is expanded to it."""
    count = t.untyped_storage().nbytes() // t.itemsize
    strides = [
        r.choice((0, 1, 1, 2, 3)) if dim == len(shape) - 1 else r.choice((0, 1, shape[-1], 5, 1))
        for dim in range(len(shape))
    ]
    if r.random() < 0.2:
        strides.reverse()
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if span > count:
        return t.as_strided(shape, (0,) * len(shape), 0)
    return t.as_strided(shape, strides, r.randint(0, count - span))


@step(10)
def overlap(p: Program) -> None:
    """In-place operations between views of one storage, which may overlap each other or themselves,
    and what torch refuses of them.
    """
    t, r = p.any(floating=True), p.random
    shape = p.random.choice(((3,), (5,), (2, 3), (4, 1), (1, 4), (8,), (17,)))
    to, one, other = (_view_inside(t, shape, r) for _ in range(3))
    call = r.choice((
        lambda: to.add_(one),
        lambda: to.mul_(one),
        lambda: to.sub_(one, alpha=2),
        lambda: to.copy_(one),
        lambda: to.addcmul_(one, other),
        lambda: to.lerp_(one, other),
        lambda: to.lerp_(one, 0.5),
        lambda: torch.maximum(one, other, out=to),
        lambda: torch.add(one, other, out=to),
        lambda: to.masked_fill_(one > other, 1),
        lambda: to.index_copy_(0, torch.arange(one.shape[0]), one),
        lambda: to.index_add_(0, torch.zeros(one.shape[0], dtype=torch.int64), one),
        lambda: to.index_put_((torch.tensor([0, 0]),), one[:1]),
        lambda: to.scatter_(0, torch.zeros(shape, dtype=torch.int64), one),
        lambda: to.clamp_(one, other),
        lambda: to.mul_(0.5),
        lambda: to.bernoulli_(one.nan_to_num().clamp(0, 1)),
        to.uniform_,
        to.zero_,
        lambda: to.cumsum_(0),
        lambda: torch._foreach_add_([to, other], [one, one]),
        lambda: torch._foreach_copy_([to, other], [one, to]),
        to.tril_,
        lambda: to.triu_(1),
        lambda: to.add_(one.flip(0)),
        lambda: to.add_(one.clone()),
        lambda: to.div_(one.sum()),
        lambda: to.fill_(one.reshape(-1)[0]),
        lambda: to.swapaxes_(0, -1).add_(one),
        lambda: to.addcdiv_(one, other.abs() + 1),
        lambda: to.view(torch.int32).bitwise_xor_(one.view(torch.int32)),
        lambda: to.data.add_(one),
    ))  # fmt: skip
    try:
        call()
    except (RuntimeError, IndexError) as error:
        if isinstance(error, TorchRelayError):
            raise
        p.seen.append("refused")


@step(12)
def compute(p: Program) -> None:
    t, r = p.any(), p.random
    other = p.any()
    p.put(
        r.choice((
            t.clone,
            t.clone,
            t.contiguous,
            lambda: copy.deepcopy(t),
            lambda: t * 0.5,
            lambda: t + other,
            lambda: torch.cat([t, t]),
            lambda: torch.stack([t, other]),
            lambda: torch.where(t > 0, t, -t),
            lambda: t.sum(0),
            lambda: t @ t.mT,
            t.double,
            t.half,
            lambda: torch.rand_like(t),
            lambda: torch.zeros_like(t),
            lambda: torch.bernoulli(t.sigmoid()),
            lambda: nn.functional.dropout(t, 0.5),
            lambda: torch.normal(t, 1.0),
            lambda: torch.multinomial(t.abs() + 1, 2),
            lambda: torch.sort(t)[0],
            lambda: r.choice((torch.tril, torch.triu))(t),
            lambda: r.choice((torch.tril, torch.triu))(t.reshape(-1, 1).mT),
            lambda: t.roll(1, 0),
            lambda: t.flip(0),
            lambda: torch.addcmul(t, other, other),
            lambda: torch.lerp(t, other, 0.3),
            t.mT.contiguous,
            lambda: torch.empty_like(t.mT).copy_(other),
            lambda: nn.functional.softmax(t, 0),
            lambda: t[torch.tensor([0, 0])],
            lambda: t.mT * other,
            lambda: t.cumsum(0),
            t.norm,
            t.resolve_conj,
            t.exp,
            lambda: t.new_ones(3),
            lambda: t.abs().max(0)[0],
            lambda: torch.poisson(t.abs()),
            lambda: torch.binomial(
                t.abs().ceil().nan_to_num().clamp(max=50), torch.full_like(t, 0.5)
            ),
        ))()
    )  # fmt: skip


@step(5)
def read(p: Program) -> None:
    t, r = p.any(), p.random
    value = r.choice((
        lambda: t.sum().item(),
        t.reshape(-1)[:3].tolist,
        lambda: bool((t.abs() > 0.5).any()),
        lambda: float(t.norm()),
        lambda: t.numpy().tolist(),
        lambda: f"{t.norm():.3f}",
        lambda: torch.nonzero(t > 0).shape[0],
    ))()  # fmt: skip
    p.seen.append(value)
    if isinstance(value, (bool, float)) and value > 0:
        p.any().mul_(0.5)


@step(8)
def layer(p: Program) -> None:
    r = p.random
    if not p.layers or r.random() < 0.4:
        made = r.choice((
            lambda: nn.Linear(4, 5),
            lambda: nn.Linear(4, 5),
            lambda: nn.Embedding(7, 4, padding_idx=2),
            lambda: nn.BatchNorm1d(4),
            lambda: nn.GRUCell(3, 2),
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
        ))()  # fmt: skip
        p.layers.append(made)
        p.module.add_module(f"m{len(p.layers)}", made)
        return
    one: Any = r.choice(p.layers)
    two: Any = r.choice(p.layers)
    r.choice((
        one.reset_parameters,
        one.reset_parameters,
        lambda: two.load_state_dict(one.state_dict()),
        lambda: two.load_state_dict(one.state_dict()),
        lambda: p.layers.append(copy.deepcopy(one)),
        lambda: p.module.add_module(f"c{len(p.layers)}", copy.deepcopy(one)),
        lambda: p.put(next(one.parameters()).data),
        one.double,
        lambda: setattr(one, "weight", two.weight),
        lambda: setattr(one.weight, "data", two.weight.data.clone()),
        lambda: p.put(one(torch.ones(2, 4))),
    ))()  # fmt: skip


@step(3)
def seeding(p: Program) -> None:
    r = p.random
    state = torch.get_rng_state() if r.random() < 0.3 else None
    r.choice((
        lambda: torch.manual_seed(r.randrange(5)),
        lambda: p.generators.append(torch.Generator().manual_seed(r.randrange(5))),
        lambda: p.seen.append(torch.initial_seed()),
    ))()  # fmt: skip
    if state is not None:
        p.put(torch.rand(5))
        torch.set_rng_state(state)


@step(4)
def outside(p: Program) -> None:
    """Real tensors that were there before: read, drawn from, changed."""
    r = p.random
    t = r.choice(p.outside.tensors)
    r.choice((
        lambda: p.put(t.clone().uniform_() * torch.ones(1)),
        lambda: p.put(torch.bernoulli(t) * torch.ones(1)),
        lambda: p.put(nn.functional.dropout(t) + torch.ones(1)),
        lambda: p.put(torch.multinomial(t, 1) + torch.zeros(1)),
        lambda: p.put(torch.zeros(1) + t),
        lambda: p.put(torch.zeros(t.shape).copy_(t)),
        p.outside.layer.reset_parameters,
        lambda: nn.init.uniform_(t[-2:]),
        lambda: t.mul_(1.5),
        lambda: t.data.mul_(0.5),
        lambda: p.module.add_module(f"o{p.names}", copy.deepcopy(p.outside.layer)),
        lambda: t.copy_(p.any()),
        lambda: p.seen.append(torch.normal(t, 1.0).tolist()),
    ))()  # fmt: skip


@step(8)
def register(p: Program) -> None:
    p.register(p.any())


@step(2)
def forget(p: Program) -> None:
    if p.pool:
        p.pool.pop(p.random.randrange(len(p.pool)))


_FUNCTIONS = [function for _, function in STEPS]
_WEIGHTS = [weight for weight, _ in STEPS]


def run(
    seed: int, length: int, skip: frozenset[int], outside: Outside, bad: set[int] | None = None
) -> Program:
    """Run a program. An instruction that raises is entered into ``bad``, if that is given."""
    p = Program(random.Random(), nn.Module(), outside)
    for index in range(length):
        p.random = random.Random(f"{seed}/{index}")
        if index in skip:
            continue
        function = p.random.choices(_FUNCTIONS, _WEIGHTS)[0]
        try:
            with torch.no_grad():
                function(p)
        except Exception as error:
            if bad is None:
                raise
            if isinstance(error, TorchRelayError):
                raise
            bad.add(index)
    for tensor in p.pool[-3:]:
        p.register(tensor)
    return p


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, ties under each name."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bitwise equality of values, NaN equal to NaN, and equal dtype, shape."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (
        t.detach().resolve_conj().resolve_neg().contiguous().clone() for t in (one, other)
    )
    if one.numel() == 0 or torch.equal(one, other):
        return True
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return (
        one.is_floating_point()
        and torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7))
        and bool(torch.equal(one.isnan(), other.isnan()))
    )


def compare(module: nn.Module, eager: nn.Module) -> None:
    mine, theirs = tensors_of(module), tensors_of(eager)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert not is_deferred(mine[name]), f"{name} is still deferred"
        assert same(mine[name], tensor), f"{name}: {mine[name]} is not {tensor}"
        assert mine[name].requires_grad == tensor.requires_grad, name
        assert type(mine[name]) is type(tensor), name
        assert _strides(mine[name]) == _strides(tensor), f"{name}: other strides"


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides that mean something."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [step for step, extent in pairs if extent > 1 and tensor.numel()]


def whole(module: nn.Module, eager: nn.Module, r: random.Random) -> None:
    materialize_module(module)


def shuffled(module: nn.Module, eager: nn.Module, r: random.Random) -> None:
    tensors = list(tensors_of(module).values())
    r.shuffle(tensors)
    for tensor in tensors:
        materialize_tensor(tensor)


def changed(module: nn.Module, eager: nn.Module, r: random.Random) -> None:
    """Each tensor is overwritten as soon as it is materialized, as by loading a checkpoint into
    it.
    """
    mine, theirs = tensors_of(module), tensors_of(eager)
    names = list(mine)
    r.shuffle(names)
    for name in names:
        tensor = materialize_tensor(mine[name])
        assert same(tensor, theirs[name]), f"{name}: {tensor} is not {theirs[name]}"
        for one in (tensor, theirs[name]) if r.random() < 0.7 else ():
            if not _overlaps(one):
                one.data.fill_(3)


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(s == 0 and e > 1 for s, e in zip(tensor.stride(), tensor.shape, strict=True))


def by_module(module: nn.Module, eager: nn.Module, r: random.Random) -> None:
    children = list(module.children())
    r.shuffle(children)
    for child in children:
        materialize_module(child)
    materialize_module(module)


def back(module: nn.Module, eager: nn.Module, r: random.Random) -> None:
    materialize_module(module)
    try:
        dematerialize(module)
    except DeferredError:
        return
    shuffled(module, eager, r)


def by_shard(module: nn.Module, eager: nn.Module, r: random.Random) -> None:
    """A random slice of each tensor; some tensors whole."""
    theirs = tensors_of(eager)
    cuts: dict[int, tuple[slice, ...] | None] = {}

    def cut(name: str, tensor: torch.Tensor) -> tuple[slice, ...] | None:
        if id(tensor) not in cuts:
            slices = []
            for extent in tensor.shape[: r.randint(0, tensor.dim())]:
                low = r.randint(0, extent)
                slices.append(slice(low, r.randint(low, extent)))
            cuts[id(tensor)] = tuple(slices) if r.random() < 0.8 else None
        return cuts[id(tensor)]

    names = {name: id(tensor) for name, tensor in tensors_of(module).items() if is_deferred(tensor)}
    materialize_module(module, shard=cut)
    for name, tensor in tensors_of(module).items():
        slices = cuts.get(names.get(name, -1))
        expected = theirs[name] if slices is None else theirs[name][slices]
        assert same(tensor, expected), f"{name}{slices}: {tensor} is not {expected}"


WAYS = (whole, shuffled, by_module, back, by_shard, by_shard, changed)
_COMPARED = (whole, shuffled, by_module, back)


def check(seed: int, length: int) -> list[str]:
    """Check one program in every way. Return the sentences with which ways of it were refused.

    Raises:
        AssertionError: something differs from eager construction.
    """
    refusals = []
    bad: set[int] = set()
    found = {-1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while found:  # without an instruction that fails, a later one may find other tensors
            found = set()
            torch.manual_seed(seed)
            run(seed, length, frozenset(bad), Outside(), found)
            bad |= found
        torch.manual_seed(seed)
        eager = run(seed, length, frozenset(bad), Outside())
        end = torch.get_rng_state()
        for index, way in enumerate(WAYS):  # the last one changes the eager module, too
            try:
                _check_way(seed, length, frozenset(bad), eager, end, way, index)
            except (DeferredError, UnsupportedError) as error:
                refusals.append(f"{type(error).__name__}: {error}")
    return refusals


def _check_way(
    seed: int,
    length: int,
    skip: frozenset[int],
    eager: Program,
    end: torch.Tensor,
    way: Callable[[nn.Module, nn.Module, random.Random], None],
    index: int,
) -> None:
    torch.manual_seed(seed)
    mine = deferred_init(run, seed, length, skip, Outside())
    assert torch.equal(torch.get_rng_state(), end), "another end state of the default generator"
    assert str(mine.seen) == str(eager.seen), f"{mine.seen} is not {eager.seen}"
    for mine_generator, eager_generator in zip(mine.generators, eager.generators, strict=True):
        states = mine_generator.get_state(), eager_generator.get_state()
        assert torch.equal(*states), "another end state of a generator"
    found = [*mine.outside.tensors, *mine.outside.layer.parameters()]
    expected = [*eager.outside.tensors, *eager.outside.layer.parameters()]
    for one, other in zip(found, expected, strict=True):
        assert same(one, other), "a tensor from outside has other values"
    module = mine.module
    del mine  # only the module is left, as where a constructor has returned
    way(module, eager.module, random.Random(f"{seed}/{index}"))
    if way in _COMPARED:
        compare(module, eager.module)
