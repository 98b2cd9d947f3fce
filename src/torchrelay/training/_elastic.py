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
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from torchrelay import _telemetry, config
from torchrelay._names import names_options
from torchrelay.errors import ArgumentError, UnavailableError
from torchrelay.training._agreement import Agreement, Losses
from torchrelay.training._comm_hooks import local_tensor
from torchrelay.training._healing import (
    RandomStates,
    Stateful,
    about,
    check,
    heal,
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
        self.is_aborted = self.is_over = False
        self.failure: Exception | None = None
        self.callbacks: list[Callable[[], None]] = []

    def reduce(self, parameters: nn.Module | Iterable[Tensor]) -> None:
        """Average the gradients of ``parameters`` over the members, weighted by their
        :attr:`samples`, and the running means and variances of normalisation layers of a module.
        Collective; blocks.

        If a member is lost, the gradients are undefined, and the step is not committed.

        Raises:
            ArgumentError: the step's block has ended, or the module is a DistributedDataParallel.
        """
        refuse_ddp("the model of step.reduce", parameters)
        statistics: list[Tensor] = []
        if isinstance(parameters, nn.Module):
            buffers = parameters.named_buffers()
            statistics = [one for name, one in buffers if name.endswith(_STATISTICS)]
            parameters = parameters.parameters()
        trained = [one for one in parameters if one.requires_grad]
        for one in trained:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        averages = [one.clone() for one in statistics]
        self.average([*(one.grad for one in trained if one.grad is not None), *averages])
        if self.failure is None:
            for one, average in zip(statistics, averages, strict=True):
                one.copy_(average)

    def average(self, tensors: list[Tensor]) -> None:
        """Average ``tensors`` over the members in place, as :meth:`reduce` does gradients. Of a
        DTensor each rank of a replica averages its own part.
        """
        self._check_block("step.reduce and step.average")
        tensors = [part for part in map(local_tensor, tensors) if part.numel()]
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
        self._check_block("step.on_commit, as of ElasticLoader.take,")
        self.callbacks.append(function)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep the loss of a member from being raised in the block, which runs to its end."""
        try:
            yield
        except Losses as error:
            self.failure = self.failure or error

    def _check_block(self, calls: str) -> None:
        if self.is_over:
            raise ArgumentError(f"{calls} belong into the block of `with elastic.step()`")


_STATISTICS = ("running_mean", "running_var")  # of normalisation layers

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
        replica: the ranks of this replica, if it has several, such as those of the mesh of FSDP2.
            They make the same calls, and are lost and started again together. Each averages its own
            parts of DTensors with the ranks of the same number of other replicas, and gets its
            state from them.
        settings: of ``TORCHRELAY_ELASTIC_*``, such as ``address``, ``peers`` and ``timeout_s``.

    Attributes:
        version: how many steps were committed, by this member or those that healed it.

    Raises:
        ArgumentError: a state contains what is no dense tensor and no plain value, or is a
            DistributedDataParallel.
        ConfigError: a setting is invalid, or there is neither token nor key where other hosts
            could connect.
        UnavailableError: this process cannot listen at its address.
        UnsupportedError: the default process group has several ranks, and ``replica`` is not given.
    """

    @names_options(*(field.name for field in fields(config.ElasticSettings)))
    def __init__(
        self,
        states: Mapping[str, Stateful],
        local: Mapping[str, Stateful] | None = None,
        *,
        replica: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        self._states = dict(states)
        self._local = {"random": RandomStates(), **(local or {})}
        check({**self._states, **self._local})
        chosen = replace(config.load(config.ElasticSettings), **settings)
        self._agreement = Agreement(chosen, about({**self._states, **(local or {})}), replica)
        self.version = 0
        self._is_in_doubt, self._wants_round, self._has_state = False, True, False
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

        What else is raised in the block, or by Ctrl-C, is raised further, and this member has not
        committed the step. If it takes another one, it gets the state of those that have.

        Raises:
            MismatchError: the others refuse this member: its version, states, token or settings.
            OperationTimeoutError: this member must not go on, and waited ``wait_s``.
            UnavailableError: all members that had the state are lost, or this one was closed.
        """
        if self._is_closed:
            raise UnavailableError("Elastic: this member has left the job by close()")
        with self._whole_or_left():
            self._prepare()
        with self._whole_or_left():
            step = Step(self._agreement, self.version)
            started_s = time.monotonic()
            self._costs.began_s = self._costs.began_s or started_s
            try:
                yield step
            except Exception as error:
                if self.group.get_error().name == "SUCCESS":
                    raise
                step.failure = error
            ended_s, step.is_over = time.monotonic(), True
            is_committed = self._commit(step)
            self._costs.add("steps" if is_committed else "repeated_steps", started_s, ended_s)
            if is_committed:
                for function in step.callbacks:
                    function()
            step.callbacks.clear()  # they hold iterators, and `step.failure` makes a cycle
            step.committed = is_committed

    @contextlib.contextmanager
    def _whole_or_left(self) -> Iterator[None]:
        """Leave the group where its members would wait for what this one does not do any more."""
        version = self.version
        try:
            yield
        except BaseException:
            self.version, self._is_in_doubt, self._wants_round = version, False, True
            if not self._is_closed:
                self.group.abort()
            raise

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
                self._heal()

    def _heal(self) -> None:
        started_s, size_bytes = time.monotonic(), 0
        try:
            size_bytes = heal(self.group, self._is_whole, self._states, self._local)
        except Losses as error:
            _logger.info("a member was lost while others got the state: %s", error)
            self._wants_round = True
        (self._wants_round,) = self._agreement.any(self._wants_round)
        if self._wants_round:
            return
        self._costs.healed_bytes += size_bytes
        self._costs.add("heals", started_s, time.monotonic())
        _logger.info(
            "step %d: %d members got the state, this one %.4g MB, in %.3g s",
            self.version,
            self._is_whole.count(False),
            size_bytes / 1e6,
            time.monotonic() - started_s,
        )
        self._has_state = True
        self._is_whole = [True] * len(self._is_whole)

    def _commit(self, step: Step) -> bool:
        """Return whether all members committed ``step``."""
        any_of, before = self._agreement.any, self.version
        is_failed, is_aborted = any_of(step.failure is not None, step.is_aborted)
        if not is_failed:
            self._is_in_doubt = not is_aborted
            votes = torch.tensor([is_aborted, self._agreement.delegate.has_knocks()]).int()
            with step.guarded():
                self._agreement.collective(lambda group: group.allreduce([votes]))
            is_failed, wants_round = any_of(step.failure is not None, bool(votes[1]))
        if not is_failed:
            self._is_in_doubt, self._wants_round = False, wants_round
            self.version += not votes[0]
        else:
            cause = step.failure or "a member was lost by another rank of this replica"
            _logger.info("step %d: %s", self.version, cause)
            self._agree()
        return self._has_state and self.version > before

    def _agree(self) -> None:
        former, started_s = self.members, time.monotonic()
        self._wants_round = True
        record = Record(self.version, self._is_in_doubt, self._has_state)
        _, records, dead = self._agreement.agree(record)
        self._wants_round, self._is_in_doubt = False, False
        mine = records[self.members.index(self._agreement.member)]
        self.version, self._has_state = mine.version, mine.is_whole
        self._is_whole = [one.is_whole for one in records]
        self._costs.add("changes", started_s, time.monotonic())
        left = [
            f"{one} ({'ended' if one in dead else 'silent'})"
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
