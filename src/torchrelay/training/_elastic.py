"""Training that goes on when members come and go."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchrelay import _telemetry, config
from torchrelay._names import names_options
from torchrelay.training._agreement import Agreement, Losses
from torchrelay.training._healing import (
    RandomStates,
    Stateful,
    check,
    heal,
    layout_of,
    refuse_ddp,
)
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
        refuse_ddp("the model of step.reduce", parameters)
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


_KINDS = {
    "steps": "steps that were committed",
    "repeated_steps": "steps that were not committed",
    "changes": "changes of the members",
    "heals": "transfers of the state",
}


class _Costs:
    """What this member's run cost since its first step."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.times, self.seconds = dict.fromkeys(_KINDS, 0), dict.fromkeys(_KINDS, 0.0)
        self.lost = self.joined = self.healed_bytes = 0

    def add(self, kind: str, started_s: float, ended_s: float) -> None:
        self.times[kind] += 1
        self.seconds[kind] += ended_s - started_s


class Elastic:
    """A member of a job that goes on when members come and go.

    Each process, a replica, is started on its own. There is no launcher and no daemon, and no
    member is special.

    Args:
        states: what new members get from the others, by name: modules, optimizers, schedulers, an
            :class:`ElasticLoader`, anything with ``state_dict`` and ``load_state_dict``. They are
            equal on all members.
        local: states that differ between members, such as that of an inner optimizer of DiLoCo: a
            new member gets those of one of the others. Those of random generators are added.
        settings: of ``TORCHRELAY_ELASTIC_*``, such as ``address``, ``peers`` and ``timeout_s``.

    Attributes:
        version: how many steps were committed, by this member or those that healed it.

    Raises:
        ArgumentError: a state contains what is no dense tensor and no plain value, or is a
            DistributedDataParallel.
        ConfigError: a setting is invalid, or there is neither token nor key where other hosts
            could connect.
        UnavailableError: this process cannot listen at its address.
        UnsupportedError: the replica has several processes: the default process group has several
            ranks, or a state has DTensors.
    """

    @names_options(*(field.name for field in fields(config.ElasticSettings)))
    def __init__(
        self,
        states: Mapping[str, Stateful],
        local: Mapping[str, Stateful] | None = None,
        **settings: Any,
    ) -> None:
        self._states = dict(states)
        self._local = {"random": RandomStates(), **(local or {})}
        check({**self._states, **self._local})
        chosen = replace(config.load(config.ElasticSettings), **settings)
        self._agreement = Agreement(chosen, layout_of({**self._states, **self._local}))
        self.version = 0
        self._is_in_doubt, self._wants_round = False, True
        self._is_whole: list[bool] = []  # by rank
        self._is_closed = False
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
        started_s = time.monotonic()
        self._costs.began_s = self._costs.began_s or started_s
        step = Step(self._agreement, self.version)
        try:
            yield step
        except Exception as error:
            if self.group.get_error().name == "SUCCESS":
                raise
            step.failure = error
        ended_s = time.monotonic()
        step.committed = self._commit(step)
        self._costs.add("steps" if step.committed else "repeated_steps", started_s, ended_s)
        if step.committed:
            for function in step.callbacks:
                function()

    def report(self) -> str:
        """Return a table of what this member's run cost since its first step."""
        costs = self._costs
        total_s = time.monotonic() - costs.began_s if costs.began_s else 0.0
        lines = [f"{'':32} {'times':>7} {'seconds':>9} {'share':>7}"]
        for kind, meaning in _KINDS.items():
            times, seconds = costs.times[kind], costs.seconds[kind]
            lines.append(f"{meaning:32} {times:7} {seconds:9.2f} {seconds / (total_s or 1):7.1%}")
        goodput = costs.seconds["steps"] / (total_s or 1)
        return "\n".join(
            [
                *lines,
                f"members lost: {costs.lost}, members that joined: {costs.joined}",
                f"goodput: {goodput:.1%} of {total_s:.1f} s",
            ]
        )

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
        started_s = time.monotonic()
        size_bytes = heal(self.group, self._is_whole, self._states, self._local)
        self._costs.healed_bytes += size_bytes
        self._costs.add("heals", started_s, time.monotonic())
        _logger.info(
            "step %d: %d members got the state, this one %.4g MB, in %.3g s",
            self.version,
            self._is_whole.count(False),
            size_bytes / 1e6,
            time.monotonic() - started_s,
        )
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
        return self._agreement.machine.is_whole and self.version > before

    def _agree(self) -> None:
        former, machine, started_s = self.members, self._agreement.machine, time.monotonic()
        self._wants_round = True
        record = Record(self.version, self._is_in_doubt, machine.is_whole)
        records = self._agreement.agree(record).records
        self._wants_round, self._is_in_doubt = False, False
        mine = records[self.members.index(self._agreement.member)]
        machine.is_whole = mine.is_whole
        self.version = mine.version
        self._is_whole = [one.is_whole for one in records]
        self._costs.add("changes", started_s, time.monotonic())
        left = [
            f"{one} ({'ended' if one in machine.dead else 'silent'})"
            for one in former
            if one not in self.members
        ]
        came = [one for one in self.members if one not in former]
        self._costs.lost += len(left)
        self._costs.joined += len(came) if former else 0
        _logger.info(
            "step %d: %d members, after %.3g s; left: %s; came: %s",
            mine.version,
            len(self.members),
            time.monotonic() - started_s,
            ", ".join(left) or "none",
            ", ".join(came) or "none",
        )


_living: weakref.WeakSet[Elastic] = weakref.WeakSet()


def _samples() -> Iterator[_telemetry.MetricSample]:
    for elastic in [*_living]:
        costs = elastic._costs
        counts: list[tuple[str, str, float]] = [
            ("lost", "Members that were lost", costs.lost),
            ("joined", "Members that came", costs.joined),
            ("healed_bytes", "Bytes of the state that this member received", costs.healed_bytes),
        ]
        for kind, meaning in _KINDS.items():
            counts.append((kind, f"Number of {meaning}", costs.times[kind]))
            counts.append((f"{kind}_seconds", f"Time of {meaning}", costs.seconds[kind]))
        for name, meaning, value in counts:
            yield _telemetry.MetricSample(f"elastic_{name}", meaning, "counter", value, {})
        yield _telemetry.MetricSample(
            "elastic_members", "Members of the job", "gauge", len(elastic.members), {}
        )


_telemetry.publish(_samples)
