"""Training that goes on when members come and go."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from torchrelay import _telemetry, config
from torchrelay._names import names_options
from torchrelay.errors import ArgumentError
from torchrelay.training._agreement import Agreement, Losses
from torchrelay.training._healing import RandomStates, Stateful, heal, layout_of
from torchrelay.training._membership import Record

__all__ = ["Elastic", "Step"]

_logger = logging.getLogger("torchrelay.training")


class Step:
    """A step that all members take together.

    Attributes:
        rank, size: of this member and of all, in this step.
        number: how many steps were committed before it.
        samples: how many samples this member has in it: the weight of its gradients.
        committed: after its block, whether it was committed, on all members that go on.
    """

    def __init__(self, agreement: Agreement, number: int) -> None:
        self._agreement = agreement
        self.rank, self.size, self.number = agreement.group.rank(), agreement.group.size(), number
        self.samples, self.committed = 1, False
        self.is_aborted = False
        self.failure: Exception | None = None
        self.callbacks: list[Callable[[], None]] = []

    def reduce(self, parameters: nn.Module | Iterable[Tensor]) -> None:
        """Average the gradients of ``parameters`` over the members, weighted by their
        :attr:`samples`. Collective; blocks.

        If a member is lost, the gradients are undefined, and the step is not committed.
        """
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        trained = [one for one in parameters if one.requires_grad]
        for one in trained:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        self.average([one.grad for one in trained if one.grad is not None])

    def average(self, tensors: list[Tensor]) -> None:
        """Average ``tensors`` over the members in place, as :meth:`reduce` does gradients."""
        with self.guarded():
            total = torch.tensor([self.samples])
            self._agreement.collective(lambda group: group.allreduce([total]))
            for tensor in tensors:
                tensor.mul_(self.samples / max(int(total), 1))
            if tensors:
                self._agreement.collective(lambda group: group.allreduce_coalesced(tensors))

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of DDP; see :meth:`Elastic.hook`."""
        self.average([bucket.buffer()])
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def abort(self) -> None:
        """Let no member commit this step."""
        self.is_aborted = True

    def on_commit(self, function: Callable[[], None]) -> None:
        """Call ``function`` at the end of the block if the step is committed."""
        self.callbacks.append(function)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep the loss of a member from being raised in the block, which runs to its end."""
        try:
            yield
        except Losses as error:
            self.failure = self.failure or error


@dataclass
class _Costs:
    """What this member's run cost since its first step."""

    began_s: float = 0.0
    steps: int = 0
    steps_s: float = 0.0
    repeated: int = 0
    repeated_s: float = 0.0
    changes: int = 0
    changes_s: float = 0.0
    heals: int = 0
    heals_s: float = 0.0
    lost: int = 0
    joined: int = 0

    @property
    def total_s(self) -> float:
        return time.monotonic() - self.began_s if self.began_s else 0.0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        setattr(self, name, getattr(self, name) + 1)
        seconds = f"{name}_s"
        setattr(self, seconds, getattr(self, seconds) + time.monotonic() - started_s)


_KINDS = {
    "steps": "steps that were committed",
    "repeated": "steps that were not committed",
    "changes": "changes of the members",
    "heals": "transfers of the state to members that lacked it",
}


class Elastic:
    """A member of a job that goes on when members come and go.

    Each process, a replica, is started on its own. There is no launcher and no daemon, and no
    member is special.

    Args:
        states: what new members get from the others, by name: modules, optimizers, schedulers, an
            :class:`ElasticLoader`, anything with ``state_dict`` and ``load_state_dict``. The states
            of random generators are added as ``random``, if that is not among them.
        settings: of ``TORCHRELAY_ELASTIC_*``, such as ``address``, ``peers`` and ``timeout_s``.

    Attributes:
        version: how many steps were committed, by this member or those that healed it.

    Raises:
        ConfigError: a setting is invalid, or there is neither token nor key where other hosts
            could connect.
        UnavailableError: this process cannot listen at its address.
    """

    @names_options(*(field.name for field in fields(config.ElasticSettings)))
    def __init__(self, states: Mapping[str, Stateful], **settings: Any) -> None:
        for name, one in states.items():
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ArgumentError(f"Elastic: {name} is a {type(one).__name__} without state_dict")
        self._states = {"random": RandomStates(), **states, "version": _Version(self)}
        chosen = replace(config.load(config.ElasticSettings), **settings)
        self._agreement = Agreement(chosen, layout_of(states))
        self.version = 0
        self._is_in_doubt, self._wants_round = False, True
        self._is_whole: list[bool] = []  # by rank
        self._is_closed = False
        self._step: Step | None = None
        self._costs = _Costs()
        _living.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def group(self) -> Any:
        """The process group of the members. Its rank and size change with them."""
        return self._agreement.group

    @property
    def members(self) -> tuple[str, ...]:
        """The members by rank: the address of each, and a random part."""
        return self._agreement.met.formation.members

    @contextlib.contextmanager
    def step(self) -> Iterator[Step]:
        """Agree on the members if they change, heal those that need it, run the block, and commit
        it. Collective; blocks.

        Where a member is lost, what the block's communications raise ends the block, and is not
        raised further: the step is not committed.

        Raises:
            MismatchError: the others refuse this member: its version, model, token or settings.
            OperationTimeoutError: this member must not go on, and waited ``wait_s``.
            UnavailableError: all members that had the state are lost.
        """
        self._prepare()
        self._costs.began_s = self._costs.began_s or time.monotonic()
        started_s = time.monotonic()
        step = self._step = Step(self._agreement, self.version)
        try:
            yield step
        except Exception as error:
            if self.group.get_error().name == "SUCCESS":
                raise
            step.failure = error
        took_s = time.monotonic() - started_s
        step.committed = self._commit(step)
        if step.committed:
            self._costs.steps, self._costs.steps_s = (
                self._costs.steps + 1,
                self._costs.steps_s + took_s,
            )
            for function in step.callbacks:
                function()
        else:
            self._costs.repeated += 1
            self._costs.repeated_s += took_s

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average gradients within :meth:`step`. A communication hook for DDP over :attr:`group`,
        which may keep its model when members change.
        """
        assert self._step is not None
        return self._step.hook(bucket)

    def report(self) -> str:
        """Return a table of what this member's run cost since its first step."""
        costs, total_s = self._costs, self._costs.total_s or 1.0
        lines = [f"{'':48} {'times':>7} {'seconds':>9} {'share':>7}"]
        for name, meaning in _KINDS.items():
            seconds = getattr(costs, f"{name}_s")
            share = f"{seconds / total_s:7.1%}"
            lines.append(f"{meaning:48} {getattr(costs, name):7} {seconds:9.2f} {share}")
        lines.append(f"members lost: {costs.lost}, members that joined: {costs.joined}")
        lines.append(f"goodput: {costs.steps_s / total_s:.1%} of {costs.total_s:.1f} s")
        return "\n".join(lines)

    def close(self) -> None:
        """Leave the job; the others go on. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            _living.discard(self)
            self._agreement.close()
            if self._costs.began_s:
                name = self._agreement.member
                _logger.info("%s leaves after step %d\n%s", name, self.version, self.report())

    # --- a step

    def _prepare(self) -> None:
        while self._wants_round or not all(self._is_whole):
            if self._wants_round:
                self._agree()
            if not all(self._is_whole):
                try:
                    self._heal()
                except Losses as error:
                    _logger.info("a member was lost while others got the state: %s", error)
                    self._wants_round = True

    def _heal(self) -> None:
        who = f"{self._is_whole.count(False)} of {len(self._is_whole)} members"
        with self._costs.timed("heals"), _telemetry.event("elastic", "heal", who) as event:
            event.size_bytes = heal(self.group, self._is_whole, self._states)
        self._agreement.machine.is_whole = True
        self._is_whole = [True] * len(self._is_whole)

    def _commit(self, step: Step) -> bool:
        """Return whether all members committed ``step``."""
        if step.failure is None:
            self._is_in_doubt = not step.is_aborted
            votes = torch.tensor([step.is_aborted, self._agreement.has_knocks()]).int()
            with step.guarded():
                self._agreement.collective(lambda group: group.allreduce([votes]))
        before = self.version
        if step.failure is None:
            self._is_in_doubt, self._wants_round = False, bool(votes[1])
            self.version += not votes[0]
        else:
            _logger.info("step %d: %s", self.version, step.failure)
            self._agree()
        return self.version > before

    def _agree(self) -> None:
        former, machine = self.members, self._agreement.machine
        self._wants_round = True
        with self._costs.timed("changes"), _telemetry.event("elastic", "change"):
            met = self._agreement.agree(Record(self.version, self._is_in_doubt, machine.is_whole))
        self._wants_round, self._is_in_doubt = False, False
        mine = met.records[met.formation.members.index(self._agreement.member)]
        machine.is_whole = mine.is_whole
        if mine.is_whole:
            self.version = mine.version
        self._is_whole = [record.is_whole for record in met.records]
        left = sorted({*former} - {*self.members})
        came = sorted({*self.members} - {*former})
        self._costs.lost += len(left)
        self._costs.joined += len(came) if former else 0
        ended = [f"{one} ({'ended' if one in machine.dead else 'silent'})" for one in left]
        _logger.info(
            "step %d: %d members; left: %s; came: %s",
            mine.version,
            len(self.members),
            ", ".join(ended) or "none",
            ", ".join(came) or "none",
        )


class _Version:
    """The number of steps, which heals with the rest."""

    def __init__(self, elastic: Elastic) -> None:
        self._elastic = weakref.ref(elastic)

    def state_dict(self) -> int:
        elastic = self._elastic()
        return elastic.version if elastic else 0

    def load_state_dict(self, state: int) -> None:
        elastic = self._elastic()
        if elastic:
            elastic.version = state


_living: weakref.WeakSet[Elastic] = weakref.WeakSet()


def _samples() -> Iterator[_telemetry.MetricSample]:
    for elastic in [*_living]:
        costs = elastic._costs
        for name, meaning in _KINDS.items():
            for suffix, unit in (("", ""), ("_s", ", in seconds")):
                value = getattr(costs, name + suffix)
                yield _telemetry.MetricSample(
                    f"elastic_{name}{'_seconds' if suffix else ''}",
                    f"{'Time of' if suffix else 'Number of'} {meaning}{unit}",
                    "counter",
                    value,
                    {},
                )
        for name, meaning in (("lost", "Members that were lost"), ("joined", "Members that came")):
            yield _telemetry.MetricSample(
                f"elastic_{name}", meaning, "counter", getattr(costs, name), {}
            )
        yield _telemetry.MetricSample(
            "elastic_members", "Members of the job", "gauge", len(elastic.members), {}
        )


_telemetry.publish(_samples)
