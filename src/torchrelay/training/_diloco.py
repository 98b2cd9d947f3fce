"""LocalSGD and DiLoCo: steps without communication, and a synchronisation once in many steps.

LocalSGD averages the parameters (Stich, "Local SGD converges fast and communicates little", ICLR
2019). DiLoCo passes the average of what the parameters have changed to an outer optimizer
(Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023).
Streaming DiLoCo synchronises one fragment of the model at a time, while the next steps are taken
(Douillard et al., "Streaming DiLoCo with overlapping communication", 2025).

A synchronisation sums the pseudo-gradients, agrees, and takes the outer step, which is local. The
agreement is a small all-reduce after which each member knows that all have the sum. If it fails on
some members only, the others may have taken the outer step; the next agreement tells the former,
which have the sum too. So all members take an outer step, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrelay._names import names_options
from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.training import _comm_hooks as hooks

__all__ = ["DiLoCo", "LocalSGD"]

_log = logging.getLogger("torchrelay.training")

_MOST_STEPS = 1 << 32

Group = dist.ProcessGroup | Callable[[], dist.ProcessGroup | None] | None


class DiLoCo:
    """Average what parameters change in ``sync_every`` steps, and give it to an outer optimizer.

    A hook of ``inner_optimizer`` counts its steps. A fragment is synchronised every ``sync_every``
    steps, the fragments at evenly spaced ones. Let x be the outer parameters, at first a copy of
    the parameters, and y the parameters: the mean of x - y over the members is the gradient of a
    step of ``outer_optimizer``, which changes x, and y becomes x.

    All members must start with equal parameters, as under DDP, and take equally many steps. Buffers
    of the model are not synchronised. It needs one more tensor per parameter, the outer
    optimizer's, and while a fragment is synchronised one or two of its size, in float32 at least.

    Args:
        model_fragments: ``[model]``, or several modules for streaming. Each parameter of
            ``inner_optimizer`` must be in one of them.
        inner_optimizer: of any kind.
        outer_optimizer: over the same parameters. It is changed to update the outer parameters
            instead. The paper's is ``SGD(lr=0.7, momentum=0.9, nesterov=True)``.
        sync_every: steps.
        process_group: the members, each with the same part of the model; default: all ranks. A
            function that returns the group is called for each synchronisation: members may change.
        fragment_sync_delay: how many steps are taken while a fragment is communicated. What it
            changed in them is lost, unless ``fragment_update_alpha`` keeps a part.
        fragment_update_alpha: the share of y after a synchronisation; that of x is the rest.

    Raises:
        ArgumentError: a setting is out of range, a parameter is in no or in two fragments, or the
            outer optimizer lacks one.
    """

    @names_options()
    def __init__(
        self,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer,
        sync_every: int,
        *,
        process_group: Group = None,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        delay, alpha = fragment_sync_delay, fragment_update_alpha
        for name, value, holds, condition in (
            ("sync_every", sync_every, sync_every >= 1, "be at least 1"),
            ("fragment_sync_delay", delay, 0 <= delay < sync_every, "be less than sync_every"),
            ("fragment_update_alpha", alpha, 0 <= alpha <= 1, "be between 0 and 1"),
        ):
            hooks.check_setting(self, name, value, holds, condition)
        self.sync_every, self.process_group = sync_every, process_group
        self.fragment_sync_delay, self.fragment_update_alpha = delay, alpha
        self.outer_optimizer = outer_optimizer
        self._step = 0
        self._fragments = _fragments(self, model_fragments, inner_optimizer)
        _give_outer_parameters(self, outer_optimizer, self._fragments)
        inner_optimizer.register_step_post_hook(self._after_inner_step)

    def _after_inner_step(self, *_: Any) -> None:
        self._step += 1
        starting = []
        for index, fragment in enumerate(self._fragments):
            offset = (index + 1) * self.sync_every // len(self._fragments)
            if (self._step - offset) % self.sync_every == 0 and fragment.started is None:
                starting.append(fragment)
                fragment.started = self._step
        for fragment in starting:
            fragment.start(self._group())
        if self._due(self.fragment_sync_delay):
            self._complete(self.fragment_sync_delay, self.fragment_update_alpha)

    def synchronize(self, everything: bool = False) -> None:
        """Complete what is due, such as after a failure. Collective over the members; blocks.

        After an error, and whenever members have changed, all members call it before their next
        step: if one of them has applied a synchronisation that failed on others, they apply it too.
        What some members did not receive is summed anew, over the members there are, from their
        current parameters.

        Args:
            everything: all fragments, due or not, and as if ``fragment_update_alpha`` were 0. All
                members then have equal parameters.

        Raises:
            MismatchError: this member is at another step than others, or lacks a synchronisation
                that they have: it needs their state.
            Exception: what the group raises, such as :class:`PeerLostError`. Parameters and outer
                state are as before the synchronisation.
        """
        self._complete(self.fragment_sync_delay, self.fragment_update_alpha)
        if everything:
            for fragment in self._fragments:
                if fragment.started is None:
                    fragment.started = self._step
            self._complete(0, 0.0)

    def _group(self) -> dist.ProcessGroup | None:
        return self.process_group() if callable(self.process_group) else self.process_group

    def _due(self, delay: int) -> list[_Fragment]:
        latest = self._step - delay
        return [one for one in self._fragments if one.started is not None and one.started <= latest]

    def _complete(self, delay: int, alpha: float) -> None:
        """Apply the means of the fragments that are due once all members have them."""
        group = self._group()
        for fragment in self._due(delay):
            fragment.finish_if_possible()
        while True:
            due = self._due(delay)
            for fragment, completed, started, all_have_it in self._agree(group):
                if completed > fragment.completed:
                    self._apply(fragment, alpha)
                    fragment.started = started
                elif fragment in due and all_have_it:
                    self._apply(fragment, alpha)
            due = self._due(delay)
            if not due:
                return
            for fragment in due:
                fragment.start(group)
            for fragment in due:
                fragment.finish()

    def _agree(
        self, group: dist.ProcessGroup | None
    ) -> list[tuple[_Fragment, int, int | None, bool]]:
        """Return for each fragment how many synchronisations the member that is ahead has
        completed, when it started the next one, and whether all members have the mean of that.
        """
        mine = [(one.completed, one.means is not None) for one in self._fragments]
        values = [self._step, -self._step]
        for one in self._fragments:
            values += [one.completed * _MOST_STEPS + (one.started or 0), -(one.means is not None)]
        device = next(iter(self._fragments[0].outer.values())).device
        most = torch.tensor(values, dtype=torch.int64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        last, first, *found = most.tolist()
        leading = [divmod(value, _MOST_STEPS) for value in found[::2]]
        ahead = [done - own > has for (done, _), (own, has) in zip(leading, mine, strict=True)]
        if last != -first or any(ahead):
            raise MismatchError(
                f"{type(self).__name__}: this member is at step {self._step} with "
                f"{[done for done, _ in mine]} synchronisations of its fragments, and the members "
                f"are at steps {-first} to {last} with up to {[done for done, _ in leading]}; "
                "those that are behind must load the state of one that is not"
            )
        return [
            (one, done, started or None, negative == -1)
            for one, (done, started), negative in zip(
                self._fragments, leading, found[1::2], strict=True
            )
        ]

    @torch.no_grad()
    def _apply(self, fragment: _Fragment, alpha: float) -> None:
        """Take the outer step. Local."""
        assert fragment.means is not None, "_agree() has checked it"
        for name, outer in fragment.outer.items():
            outer.grad = fragment.means[name]
        self.outer_optimizer.step()
        for name, outer in fragment.outer.items():
            outer.grad = None
            new = hooks.local_tensor(outer)
            param = hooks.local_tensor(fragment.params[name].detach())
            param.copy_(torch.lerp(new, param, alpha) if alpha else new)
        fragment.started = fragment.means = None
        fragment.completed += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, the outer parameters, the state of the outer optimizer, and the means
        of fragments that are being communicated, for which it waits.

        With the model and the inner optimizer, it is all that a member needs to continue. A member
        that continues from the state of another one is equal to it; parameters and the inner
        optimizer's state differ between members until they are synchronised.
        """
        for fragment in self._fragments:
            fragment.finish_if_possible()
        return {
            "step": self._step,
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "fragments": [
                {name: getattr(fragment, name) for name in _Fragment.SAVED}
                for fragment in self._fragments
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state. Load the model and the inner optimizer too.

        Raises:
            ArgumentError: ``state_dict`` is of other fragments. Nothing was loaded then.
        """
        saved = state_dict["fragments"]
        shapes = [{name: outer.shape for name, outer in one["outer"].items()} for one in saved]
        own = [{name: outer.shape for name, outer in one.outer.items()} for one in self._fragments]
        if shapes != own:
            raise ArgumentError(
                f"{type(self).__name__}.load_state_dict: the state is of other parameters: its "
                f"fragments have {shapes}, and those here {own}"
            )
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])
        self._step = state_dict["step"]
        for fragment, one in zip(self._fragments, saved, strict=True):
            fragment.load(**one)


class LocalSGD(DiLoCo):
    """Average the parameters every ``sync_every`` steps of ``optimizer``.

    It is :class:`DiLoCo` with an outer step that takes the average as it is. Differences to the
    last average are communicated, so that compression of a group loses little.

    Args:
        model: all parameters of ``optimizer``.
        optimizer: of any kind.
        sync_every: steps.
        process_group: as for :class:`DiLoCo`.
    """

    @names_options()
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sync_every: int,
        *,
        process_group: Group = None,
    ) -> None:
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        super().__init__([model], optimizer, outer, sync_every, process_group=process_group)


class _Fragment:
    """Parameters that are synchronised together, by their names."""

    SAVED = ("completed", "started", "outer", "means")

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self.params = params
        self.outer = {name: param.detach().clone() for name, param in params.items()}
        self.completed = 0  # synchronisations
        self.started: int | None = None  # the step of the one that is not completed
        self.sums: list[_Sum] | None = None  # while they are communicated
        self.means: dict[str, Tensor] | None = None  # when they are complete

    @torch.no_grad()
    def start(self, group: dist.ProcessGroup | None) -> None:
        """Start to sum what the members' parameters have changed, divided by their number."""
        self.sums = self.means = None
        size = dist.get_world_size(group)
        kinds: dict[Any, list[str]] = {}
        for name, outer in self.outer.items():
            wide = torch.promote_types(outer.dtype, torch.float32)
            if hooks.local_tensor(outer).numel():
                kinds.setdefault((outer.device, wide), []).append(name)
        sums = []
        for (device, dtype), names in kinds.items():
            outers = [hooks.local_tensor(self.outer[name]).reshape(-1) for name in names]
            sizes = [outer.numel() for outer in outers]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            views = dict(zip(names, torch.split(flat, sizes), strict=True))
            for (name, view), outer in zip(views.items(), outers, strict=True):
                param = hooks.local_tensor(self.params[name].detach())
                view.copy_(outer).sub_(param.reshape(-1)).div_(size)
            sums.append((views, dist.all_reduce(flat, group=group, async_op=True)))
        self.sums = sums

    def finish(self) -> None:
        """Wait for the sums, if there are any. After an error there are none."""
        sums, self.sums = self.sums, None
        if sums is not None:
            for _, work in sums:
                work.wait()
            means = {name: torch.zeros_like(outer) for name, outer in self.outer.items()}
            for views, _ in sums:
                for name, view in views.items():
                    local = hooks.local_tensor(means[name])
                    local.copy_(view.view_as(local))
            self.means = means

    def finish_if_possible(self) -> None:
        """Wait for the sums, and log an error: they are started anew when they are due."""
        try:
            self.finish()
        except Exception as error:
            _log.warning("what was summed from step %s on is lost: %s", self.started, error)

    def load(
        self,
        completed: int,
        started: int | None,
        outer: dict[str, Tensor],
        means: dict[str, Tensor] | None,
    ) -> None:
        """Take the values of ``SAVED``."""
        self.completed, self.started, self.sums = completed, started, None
        for name, mine in self.outer.items():
            mine.copy_(outer[name])
        if means is not None:
            means = {name: torch.zeros_like(o).copy_(means[name]) for name, o in self.outer.items()}
        self.means = means


_Sum = tuple[dict[str, Tensor], Any]  # parts of a flat tensor by parameters, and the work


def _fragments(
    owner: DiLoCo, modules: Sequence[nn.Module], inner_optimizer: Optimizer
) -> list[_Fragment]:
    trained = {param for group in inner_optimizer.param_groups for param in group["params"]}
    named = [
        {name: param for name, param in module.named_parameters() if param in trained}
        for module in modules
    ]
    found = [param for params in named for param in params.values()]
    if len(found) != len(trained) or {*found} != trained or not all(named):
        raise ArgumentError(
            f"{type(owner).__name__}: each parameter of the inner optimizer must be in one "
            f"fragment, and each fragment must have one; of {len(trained)}, the fragments have "
            f"{' + '.join(str(len(params)) for params in named) or 'none'}, and "
            f"{len(trained - {*found})} are in none of them"
        )
    return [_Fragment(params) for params in named]


def _give_outer_parameters(
    owner: DiLoCo, optimizer: Optimizer, fragments: Sequence[_Fragment]
) -> None:
    """Make ``optimizer`` update the outer parameters instead of the parameters."""
    outer_of = {one.params[name]: outer for one in fragments for name, outer in one.outer.items()}
    missing = {*outer_of}.difference(*(group["params"] for group in optimizer.param_groups))
    if missing:
        raise ArgumentError(
            f"{type(owner).__name__}: the outer optimizer lacks {len(missing)} of the "
            f"{len(outer_of)} parameters of the inner one"
        )
    for group in optimizer.param_groups:
        group["params"] = [outer_of.get(param, param) for param in group["params"]]
    for param, outer in outer_of.items():
        if param in optimizer.state:  # some optimizers have one before their first step
            optimizer.state[outer] = optimizer.state.pop(param)
