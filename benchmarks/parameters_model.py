"""The parameter manager's algorithm without its threads: counts what N nodes would send, for more
nodes than fit here.

Time is in rounds: each node's channel does one round per tick, in a random order, and what it sends
arrives and is answered within the tick. All else follows the native channels: acting on intents by
the estimate of ticks, relocation or replication at the owner, updates, acknowledgements and
refreshes of replicas, upgrades of the last replica, routing over known locations. One worker a
node, one channel, pushes that add.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Counts", "Keys", "Model", "Trace"]

Keys = np.ndarray[Any, Any]
Trace = list[list[Keys]]
"""For each node and step, the distinct keys that the step pulls and pushes."""

HEADER, RECORD, REQUEST, REPLY = 24, 24, 16, 24
PER_KEY_ASKED, PER_KEY_ANSWERED = 16, 8
ABSENT, REPLICA, OWNED = 0, 1, 2
CERTAINTY, FIRST_ESTIMATE, DECAY, HYSTERESIS = 0.9999, 10.0, 0.9, 10


@dataclass
class Counts:
    """Sums over all nodes."""

    messages: int = 0
    bytes: int = 0
    local: int = 0
    remote: int = 0
    missed: int = 0  # updates by others that a pulled value lacked
    steps: int = 0
    kinds: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def poisson_quantile(mean: float) -> int:
    if mean <= 0:
        return 0
    k, mass = 0, math.exp(-mean)
    total = mass
    while total < CERTAINTY:
        k += 1
        mass *= mean / k
        total += mass
    return k


class Model:
    """Args: ``row_bytes`` of a value; ``rounds_per_step`` of a channel; ``lookahead`` in steps of
    the announcements.
    """

    def __init__(
        self,
        trace: Trace,
        num_keys: int,
        row_bytes: int,
        rounds_per_step: int,
        lookahead: int,
        techniques: str = "all",
    ) -> None:
        nodes = len(trace)
        self.trace, self.nodes, self.row_bytes = trace, nodes, row_bytes
        self.rounds_per_step, self.lookahead, self.techniques = (
            rounds_per_step,
            lookahead,
            techniques,
        )
        self.home = np.arange(num_keys) % nodes
        self.owner = self.home.copy()
        self.state = np.zeros((nodes, num_keys), np.uint8)
        self.state[self.home, np.arange(num_keys)] = OWNED
        self.intents = np.zeros((nodes, num_keys), np.int16)
        self.known = np.broadcast_to(self.home, (nodes, num_keys)).astype(np.int16)
        self.holders = np.zeros((num_keys, nodes), bool)  # of replicas
        self.replicas = np.zeros(num_keys, np.int32)
        self.version = np.zeros(num_keys, np.int32)
        self.changed = np.zeros(num_keys, bool)
        self.replica_version = np.zeros((num_keys, nodes), np.int32)
        self.pushed = np.zeros(num_keys, np.int32)
        self.seen = np.zeros((num_keys, nodes), np.int32)
        self.pending = np.zeros((num_keys, nodes), np.int32)
        self.arrived = np.zeros(num_keys, np.int32)
        self.rounds = np.zeros(nodes, np.int32)
        self.clock, self.last_clock = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
        self.estimate = np.full(nodes, FIRST_ESTIMATE)
        self.begun, self.ended = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
        self.reconsider: list[list[Keys]] = [[] for _ in range(nodes)]
        self.counts = Counts()
        self._pairs: list[Keys] = []

    def run(self, warm_up: int) -> Counts:
        """All steps; what it counts begins after ``warm_up`` of them."""
        random = np.random.default_rng(0)
        steps = len(self.trace[0])
        # Workers are not in step with each other: each begins its steps in a round of its own.
        offset = np.arange(self.nodes) * self.rounds_per_step // self.nodes
        for tick in range(steps * self.rounds_per_step):
            if tick == warm_up * self.rounds_per_step:
                self.counts = Counts()
            for node in random.permutation(self.nodes):
                due = (tick - offset[node]) % self.rounds_per_step == 0 and tick >= offset[node]
                if due:
                    self._step(node)
                self._round(node)
        return self.counts

    def _step(self, node: int) -> None:
        """The worker ends its step with pushes, and begins the next with pulls."""
        step = int(self.clock[node])
        if step > 0:
            self._push(node, self.trace[node][step - 1])
        keys = self.trace[node][step]
        here = self.state[node, keys] != ABSENT
        self.counts.local += int(here.sum())
        self.counts.remote += int((~here).sum())
        held = keys[here]
        self.counts.missed += int((self.pushed[held] - self.seen[held, node]).sum())
        self._ask(node, keys[~here], asked=0, answered=self.row_bytes)
        self.counts.steps += 1
        self.clock[node] += 1
        self._flush()

    def _push(self, node: int, keys: Keys) -> None:
        state = self.state[node, keys]
        self.pushed[keys] += 1
        here, copies, away = keys[state == OWNED], keys[state == REPLICA], keys[state == ABSENT]
        self.seen[keys[state != ABSENT], node] += 1
        self.pending[copies, node] += 1
        self.changed[here] |= self.replicas[here] > 0
        owners = self.owner[away]
        self.seen[away, owners] += 1
        self.changed[away] |= self.replicas[away] > 0
        self._ask(node, away, asked=self.row_bytes, answered=0)

    def _ask(self, node: int, keys: Keys, asked: int, answered: int) -> None:
        """Requests to owners, one message an owner, and their answers."""
        if len(keys) == 0:
            return
        self._flush()
        self._route(node, keys, PER_KEY_ASKED + asked)
        self._flush(REQUEST)
        owners = self.owner[keys]
        self._send("answer", owners, np.full(len(keys), node), PER_KEY_ANSWERED + answered)
        self._flush(REPLY)
        self.known[node, keys] = owners

    def _route(self, node: int, keys: Keys, size: int) -> None:
        """Over the locations that nodes know, to the owners; counts all hops."""
        at: Keys = self.known[node, keys].astype(np.int64)
        going, source = keys, np.full(len(keys), node)
        while True:
            self._send("routed", source, at, size)
            wrong = at != self.owner[going]
            if not wrong.any():
                return
            source, going = at[wrong], going[wrong]
            at = self.known[source, going].astype(np.int64)

    def _round(self, node: int) -> None:
        self.rounds[node] += 1
        self._begin_and_end(node)
        self._sync(node)
        self._refresh(node)
        again, self.reconsider[node] = self.reconsider[node], []
        for keys in again:
            self._upgrade(node, keys)
        self._flush()

    def _begin_and_end(self, node: int) -> None:
        clock = int(self.clock[node])
        ticks = clock - self.last_clock[node]
        self.last_clock[node] = clock
        if ticks > 0:
            self.estimate[node] = DECAY * self.estimate[node] + (1 - DECAY) * ticks
        window = poisson_quantile(2 * max(float(ticks), self.estimate[node]))
        # The worker's clock while it works on step s is s + 1 here, as it ends a step when it
        # begins the next.
        horizon = min(clock - 1 + min(window, self.lookahead), len(self.trace[node]) - 1)
        while self.begun[node] <= horizon:
            keys = self.trace[node][self.begun[node]]
            self.begun[node] += 1
            self.intents[node, keys] += 1
            self._acquire(
                node, keys[(self.intents[node, keys] == 1) & (self.state[node, keys] == ABSENT)]
            )
        while self.ended[node] < clock - 1:
            keys = self.trace[node][self.ended[node]]
            self.ended[node] += 1
            self.intents[node, keys] -= 1
            free = keys[(self.intents[node, keys] == 0) & (self.state[node, keys] == OWNED)]
            self._upgrade(node, free)

    def _acquire(self, node: int, keys: Keys) -> None:
        if len(keys) == 0:
            return
        self._route(node, keys, RECORD)
        owners = self.owner[keys]
        alone = (self.replicas[keys] == 0) & (self.intents[owners, keys] == 0)
        relocate = {"all": alone, "replication_only": np.zeros_like(alone)}.get(
            self.techniques, np.ones_like(alone)
        )
        self._transfer(keys[relocate], np.full(int(relocate.sum()), node))
        copied = keys[~relocate]
        owners = self.owner[copied]
        self._raise_version(copied)
        self._send("grant", owners, np.full(len(copied), node), RECORD + self.row_bytes)
        self.state[node, copied] = REPLICA
        self.known[node, copied] = owners
        self.holders[copied, node] = True
        self.replicas[copied] += 1
        self.replica_version[copied, node] = self.version[copied]
        self.seen[copied, node] = self.seen[copied, owners]

    def _transfer(self, keys: Keys, to: Keys) -> None:
        if len(keys) == 0:
            return
        owners, homes = self.owner[keys], self.home[keys]
        self._send("transfer", owners, to, RECORD + self.row_bytes)
        told = (homes != owners) & (homes != to)
        self._send("location", owners[told], homes[told], RECORD)
        self.state[owners, keys] = ABSENT
        self.state[to, keys] = OWNED
        for knowing in (owners, to, homes):
            self.known[knowing, keys] = to
        self.seen[keys, to] = self.seen[keys, owners] + self.pending[keys, to]
        self.pending[keys, to] = 0
        was_copy = self.holders[keys, to]
        self.holders[keys, to] = False
        self.replicas[keys] -= was_copy
        self.owner[keys] = to
        self.arrived[keys] = self.rounds[to]

    def _raise_version(self, keys: Keys) -> None:
        self.version[keys] += self.changed[keys]
        self.changed[keys] = False

    def _sync(self, node: int) -> None:
        copies = np.flatnonzero(self.state[node] == REPLICA)
        if len(copies) == 0:
            return
        wanted, dirty = self.intents[node, copies] > 0, self.pending[copies, node] > 0
        for keys, drop in ((copies[wanted & dirty], False), (copies[~wanted], True)):
            if len(keys) == 0:
                continue
            owners = self.owner[keys]
            payload = (self.pending[keys, node] > 0) * self.row_bytes
            self._send("update", np.full(len(keys), node), owners, RECORD + payload)
            self._raise_version(keys)
            before = self.version[keys].copy()
            self.version[keys] += payload > 0
            self.seen[keys, owners] += self.pending[keys, node]
            self.pending[keys, node] = 0
            stale = (self.replica_version[keys, node] != before) & (not drop)
            self._send("ack", owners, np.full(len(keys), node), RECORD + stale * self.row_bytes)
            self.replica_version[keys, node] = self.version[keys]
            self.seen[keys[stale], node] = self.seen[keys[stale], owners[stale]]
            if drop:
                self.state[node, keys] = ABSENT
                self.holders[keys, node] = False
                self.replicas[keys] -= 1
                for owner in np.unique(owners):
                    self._upgrade(int(owner), keys[owners == owner])

    def _refresh(self, node: int) -> None:
        shared = np.flatnonzero((self.state[node] == OWNED) & (self.replicas > 0))
        if len(shared) == 0:
            return
        self._raise_version(shared)
        old = self.holders[shared] & (self.replica_version[shared] != self.version[shared][:, None])
        place, copies = old.nonzero()
        keys = shared[place]
        self._send("refresh", np.full(len(keys), node), copies, RECORD + self.row_bytes)
        self.replica_version[keys, copies] = self.version[keys]
        self.seen[keys, copies] = self.seen[keys, node] + self.pending[keys, copies]

    def _upgrade(self, node: int, keys: Keys) -> None:
        """The only node that still needs a key becomes its owner."""
        if self.techniques != "all" or len(keys) == 0:
            return
        mine = (
            (self.owner[keys] == node)
            & (self.replicas[keys] == 1)
            & (self.intents[node, keys] == 0)
        )
        keys = keys[mine]
        fresh = self.rounds[node] - self.arrived[keys] < HYSTERESIS
        if fresh.any():
            self.reconsider[node].append(keys[fresh])
        keys = keys[~fresh]
        self._transfer(keys, self.holders[keys].argmax(axis=1) if len(keys) else keys)

    def _send(self, kind: str, source: Keys | int, to: Keys, size: Keys | int) -> None:
        """Records of one kind; those of a node to another within a turn share a message."""
        source = np.broadcast_to(source, to.shape)
        away = source != to
        sizes = np.broadcast_to(size, to.shape)[away]
        self.counts.bytes += int(sizes.sum())
        self.counts.kinds[kind] += len(sizes)
        if len(sizes):
            self._pairs.append(np.unique(source[away] * self.nodes + to[away]))

    def _flush(self, head: int = 0) -> None:
        """The records so far go out, as one message from each node to each other that has any."""
        if not self._pairs:
            return
        messages = len(np.unique(np.concatenate(self._pairs)))
        self.counts.messages += messages
        self.counts.bytes += messages * (HEADER + head)
        self._pairs = []
