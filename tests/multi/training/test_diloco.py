"""LocalSGD and DiLoCo: against the algorithm written out for all members in one process."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchrelay.aggregation import Options, get_reconfigure_handle, reconfigure
from torchrelay.checkpoint import load, save
from torchrelay.errors import ArgumentError, MismatchError, PeerLostError
from torchrelay.training import DiLoCo, LocalSGD
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

WORLD = 2
LR, OUTER_LR, EVERY = 0.05, 0.7, 4
TIMEOUT_S = 60.0


def _start(world: World) -> None:
    """Make the default group, once for all tests that share the processes."""
    if not dist.is_initialized():
        os.environ["TORCHRELAY_HOST_ID"] = "ab"[world.rank]
        store = world.connect(TIMEOUT_S)
        dist.init_process_group("sml", store=store, rank=world.rank, world_size=world.size)


def _model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    return nn.Sequential(*layers).to(dtype)


def _fragments(model: nn.Sequential, number: int) -> list[nn.Module]:
    return [model[0], model[2], model[4]] if number == 3 else [model]


def _inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def _outer(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    nesterov = momentum > 0
    return torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=momentum, nesterov=nesterov)


def _take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()


class Reference:
    """All members in one process."""

    def __init__(
        self, number: int = 1, delay: int = 0, momentum: float = 0.9, alpha: float = 0.0
    ) -> None:
        self.number, self.delay, self.momentum, self.alpha = number, delay, momentum, alpha
        self.models = [_model() for _ in range(3)]
        self.inner = [_inner(model) for model in self.models]
        self.x = [p.detach().clone() for p in _model().parameters()]
        self.u: list[torch.Tensor | None] = [None] * len(self.x)
        self.running: dict[int, tuple[int, list[torch.Tensor]]] = {}

    def params(self, rank: int) -> list[torch.Tensor]:
        return [p.detach() for p in self.models[rank].parameters()]

    def indices(self, fragment: int) -> range:
        width = len(self.x) // self.number
        return range(fragment * width, (fragment + 1) * width)

    def change(self, fragment: int, members: Sequence[int]) -> list[torch.Tensor]:
        return [
            torch.stack([self.x[i] - self.params(rank)[i] for rank in members]).mean(0)
            for i in self.indices(fragment)
        ]

    def step(
        self, step: int, members: Sequence[int] = range(WORLD), sums_anew: bool = False
    ) -> None:
        """Take a step; the first one is step 1."""
        for rank in members:
            _take_step(self.models[rank], self.inner[rank], rank, step)
        for fragment in range(self.number):
            offset = (fragment + 1) * EVERY // self.number
            if step >= offset and (step - offset) % EVERY == 0:
                self.running[fragment] = step, self.change(fragment, members)
        for fragment, (started, change) in [*self.running.items()]:
            if started + self.delay == step:
                del self.running[fragment]
                anew = self.change(fragment, members) if sums_anew else change
                self.apply(fragment, anew, members)

    def apply(self, fragment: int, change: list[torch.Tensor], members: Sequence[int]) -> None:
        for i, g in zip(self.indices(fragment), change, strict=True):
            u = self.u[i]
            self.u[i] = u = g if u is None else self.momentum * u + g
            self.x[i] = self.x[i] - OUTER_LR * (g + self.momentum * u)
            for rank in members:
                param = self.params(rank)[i]
                param.copy_(self.alpha * param + (1 - self.alpha) * self.x[i])


def _assert_close(model: nn.Module, expected: list[torch.Tensor], atol: float = 1e-12) -> None:
    found = [p.detach().double() for p in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=atol)


def _same_on_all(model: nn.Module) -> bool:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(one, flat) for one in every)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.processes(WORLD, together=True)
def test_it_is_the_algorithm(world: World, number: int, delay: int, momentum: float) -> None:
    _start(world)
    alpha = 0.25 if delay else 0.0
    model, reference = _model(), Reference(number, delay, momentum, alpha)
    inner = _inner(model)
    diloco = DiLoCo(
        _fragments(model, number),
        inner,
        _outer(model, momentum),
        EVERY,
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    )
    for step in range(1, 10):
        _take_step(model, inner, world.rank, step)
        reference.step(step)
        _assert_close(model, reference.params(world.rank))
    assert not _same_on_all(model)
    diloco.synchronize(everything=True)
    assert _same_on_all(model)


@pytest.mark.processes(WORLD, together=True)
def test_local_sgd_over_gloo_averages(world: World) -> None:
    _start(world)
    group = dist.new_group(backend="gloo")
    model, models = _model(), [_model() for _ in range(WORLD)]
    inner, inners = _inner(model), [_inner(one) for one in models]
    LocalSGD(model, inner, 3, process_group=group)
    for step in range(1, 7):
        _take_step(model, inner, world.rank, step)
        for rank in range(WORLD):
            _take_step(models[rank], inners[rank], rank, step)
        if step % 3 == 0:
            for params in zip(*(one.parameters() for one in models), strict=True):
                mean = torch.stack([p.detach() for p in params]).mean(0)
                for param in params:
                    param.detach().copy_(mean)
        _assert_close(model, [p.detach() for p in models[world.rank].parameters()])
    assert _same_on_all(model)


@pytest.mark.processes(WORLD, together=True)
def test_a_compressed_group_keeps_members_equal(world: World) -> None:
    _start(world)
    group = dist.new_group(backend="sml", pg_options=Options(compression="int8"))
    torch.manual_seed(0)
    model = nn.Linear(4, 300)  # more than what travels exactly
    before = model.weight.detach().clone()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    LocalSGD(model, inner, 1, process_group=group)
    changes = [torch.randn(300, 4, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    model.weight.grad = changes[world.rank]
    inner.step()
    exact = before - torch.stack(changes).mean(0)
    error = float((model.weight.detach() - exact).abs().max())
    assert 1e-6 < error < sum(float(one.abs().max()) for one in changes) / 126 / 2 + 1e-6
    assert _same_on_all(model)


@pytest.mark.processes(WORLD, together=True)
def test_shards_of_dtensors(world: World) -> None:
    """A replica of all ranks is the only member, so that each of them communicates alone."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    _start(world)
    alone = [dist.new_group([rank]) for rank in range(world.size)]
    model, reference = _model(), Reference(3, 1, alpha=0.25)
    fully_shard(model)
    inner = _inner(model)
    DiLoCo(
        _fragments(model, 3),
        inner,
        _outer(model),
        EVERY,
        process_group=lambda: alone[world.rank],
        fragment_sync_delay=1,
        fragment_update_alpha=0.25,
    )
    for step in range(1, 10):
        _take_step(model, inner, 0, step)
        reference.step(step, [0])
    full = [cast(DTensor, p).full_tensor().detach() for p in model.parameters()]
    torch.testing.assert_close(full, reference.params(0), rtol=1e-12, atol=1e-12)


@pytest.mark.processes(WORLD, together=True)
def test_a_resumed_run_has_the_same_bits(world: World) -> None:
    _start(world)

    def fresh() -> tuple[nn.Sequential, torch.optim.Optimizer, DiLoCo]:
        model = _model(torch.float32)
        inner = torch.optim.AdamW(model.parameters(), lr=LR)
        outer = _outer(model)
        return model, inner, DiLoCo(_fragments(model, 3), inner, outer, 4, fragment_sync_delay=3)

    model, inner, diloco = fresh()
    for step in range(1, 8):
        _take_step(model, inner, world.rank, step)
    assert len([one for one in diloco.state_dict()["fragments"] if one["means"]]) == 2
    other, other_inner, resumed = fresh()
    with tempfile.TemporaryDirectory() as path:  # of each rank, because they differ
        save({"model": model, "inner": inner, "diloco": diloco}, path, no_dist=True)
        load({"model": other, "inner": other_inner, "diloco": resumed}, path, no_dist=True)
    for step in range(8, 14):
        _take_step(model, inner, world.rank, step)
        _take_step(other, other_inner, world.rank, step)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.processes(WORLD, together=True)
def test_a_newcomer_with_the_state_of_a_member_is_equal_to_it(world: World) -> None:
    """It comes while a fragment is communicated."""
    _start(world)
    group: Any = dist.new_group([0])
    model, reference = _model(), Reference(3, 2)
    inner = _inner(model)
    diloco = DiLoCo(
        _fragments(model, 3),
        inner,
        _outer(model),
        EVERY,
        process_group=lambda: group,
        fragment_sync_delay=2,
    )
    for step in range(1, 7):
        if world.rank == 0:
            _take_step(model, inner, world.rank, step)
        reference.step(step, [0])
    assert reference.running
    states: list[Any] = [[one.state_dict() for one in (model, inner, diloco)]]
    dist.broadcast_object_list(states)
    if world.rank == 1:
        model.load_state_dict(states[0][0])
        inner.load_state_dict(states[0][1])
        diloco.load_state_dict(states[0][2])
    reference.models[1] = copy.deepcopy(reference.models[0])
    reference.inner[1] = _inner(reference.models[1])
    reference.inner[1].load_state_dict(copy.deepcopy(reference.inner[0].state_dict()))
    group = None
    for step in range(7, 13):
        _take_step(model, inner, world.rank, step)
        reference.step(step)
        _assert_close(model, reference.params(world.rank))


class _FailingWork:
    """Of a sum that has completed, but whose member has noticed a loss first."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        raise PeerLostError("rank 9 was lost", (9,))


def _fail_once(patch: pytest.MonkeyPatch, phase: str) -> None:
    """Let the next sum, or the next agreement, complete and then raise."""
    all_reduce = dist.all_reduce

    def failing(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        if bool(work) != (phase == "sum"):
            return work
        patch.undo()
        if phase == "agreement":
            raise PeerLostError("rank 9 was lost", (9,))
        return _FailingWork(work)

    patch.setattr(dist, "all_reduce", failing)


@pytest.mark.parametrize("phase", ["sum", "agreement"])
@pytest.mark.processes(WORLD, together=True)
def test_what_fails_on_one_member_is_done_on_all(world: World, phase: str) -> None:
    _start(world)
    model, reference = _model(), Reference(3)
    inner = _inner(model)
    seen: list[Any] = []
    inner.register_step_post_hook(lambda *_: seen.append(copy.deepcopy(model.state_dict())))
    diloco = DiLoCo(_fragments(model, 3), inner, _outer(model), EVERY)
    for step in range(1, 10):
        reference.step(step)
        if (world.rank, step) == (1, 6):
            before = copy.deepcopy(diloco.state_dict())
            with pytest.MonkeyPatch.context() as patch:
                _fail_once(patch, phase)
                if phase == "sum":
                    _take_step(model, inner, world.rank, step)
                else:
                    with pytest.raises(PeerLostError):
                        _take_step(model, inner, world.rank, step)
                    before |= {"step": 6}
                    before["fragments"][1] |= {"started": 6}
                    now = diloco.state_dict()
                    assert now["fragments"][1].pop("means") is not None
                    assert before["fragments"][1].pop("means") is None
                    torch.testing.assert_close(
                        [now, model.state_dict()], [before, seen[-1]], rtol=0, atol=0
                    )
        else:
            _take_step(model, inner, world.rank, step)
        if step == 6:
            diloco.synchronize()
        _assert_close(model, reference.params(world.rank))


@pytest.mark.processes(WORLD, together=True)
def test_a_member_at_another_step_is_refused(world: World) -> None:
    _start(world)
    model = _model()
    inner = _inner(model)
    diloco = DiLoCo([model], inner, _outer(model), 99)
    for step in range(2 if world.rank == 1 else 1):
        _take_step(model, inner, world.rank, step)
    with pytest.raises(MismatchError, match=r"at step [12] .* at steps 1 to 2"):
        diloco.synchronize(everything=True)


def _lose_one(world: World, delays: tuple[int, ...]) -> str:
    """For each delay, the last rank dies instead of the step after which all sum."""
    os.environ["TORCHRELAY_HOST_ID"] = "aab"[world.rank]
    store = world.connect(TIMEOUT_S)
    dist.init_process_group("sml", store=store, rank=world.rank, world_size=world.size)
    handles: list[Any] = [None] * world.size
    dist.all_gather_object(handles, get_reconfigure_handle())
    for round_, delay in enumerate(delays):
        members = range(world.size - round_)
        model, reference = _model(), Reference(1, delay)
        inner = _inner(model)
        diloco = DiLoCo([model], inner, _outer(model), EVERY, fragment_sync_delay=delay)
        summed = 2 * EVERY
        for step in range(1, summed):
            _take_step(model, inner, world.rank, step)
            reference.step(step, members)
        if world.rank == members[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        members = members[:-1]
        before = copy.deepcopy(diloco.state_dict())
        for step in range(summed, summed + delay):
            with contextlib.suppress(PeerLostError):  # if it is known when the sum begins
                _take_step(model, inner, world.rank, step)
            reference.step(step, members)
        with pytest.raises(PeerLostError):
            _take_step(model, inner, world.rank, summed + delay)
        before |= {"step": summed + delay}
        before["fragments"][0] |= {"started": summed}
        torch.testing.assert_close(diloco.state_dict(), before, rtol=0, atol=0)
        reference.step(summed + delay, members, sums_anew=True)
        reconfigure(None, round_, handles[: len(members)])
        diloco.synchronize()
        for step in range(summed + delay + 1, 2 * summed):
            _assert_close(model, reference.params(world.rank))
            _take_step(model, inner, world.rank, step)
            reference.step(step, members)
    return "went on"


def test_survivors_repeat_a_synchronisation(run_processes: RunProcesses) -> None:
    results = run_processes(_lose_one, 3, delays=(0, 1))
    assert [one.value for one in results] == ["went on", None, None], results
    assert [one.exitcode for one in results[1:]] == [-signal.SIGKILL] * 2, results


def test_what_cannot_work_is_refused() -> None:
    model = _model()

    def diloco(
        fragments: Sequence[nn.Module] = (model,), outer: nn.Module = model, **options: Any
    ) -> DiLoCo:
        return DiLoCo(fragments, _inner(model), _outer(outer), **{"sync_every": 2, **options})

    wrong: tuple[dict[str, Any], ...] = (
        {"sync_every": 0},
        {"fragment_sync_delay": 2},
        {"fragment_update_alpha": 1.5},
    )
    for options in wrong:
        with pytest.raises(ArgumentError, match=next(iter(options))):
            diloco(**options)
    for fragments in ([], [model[0]], [model, model[0]], [model, nn.Tanh()]):
        with pytest.raises(ArgumentError, match="must be in one fragment"):
            diloco(fragments)
    with pytest.raises(ArgumentError, match="lacks 4 of the 6 parameters"):
        diloco(outer=model[2])
    with pytest.raises(ArgumentError, match="is of other parameters"):
        diloco().load_state_dict(diloco(_fragments(model, 3)).state_dict())


def test_outer_optimizers_that_have_state_and_frozen_parameters() -> None:
    model = _model()
    model[0].requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    outer = torch.optim.Adagrad(model.parameters())
    DiLoCo([model], torch.optim.SGD(trained, lr=LR), outer, 1)
    assert outer.state.keys() == {*outer.param_groups[0]["params"]}
    assert not {*trained} & {*outer.param_groups[0]["params"]}
