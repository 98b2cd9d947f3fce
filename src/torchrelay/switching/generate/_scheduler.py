"""Sequences in the daemon: they run in slices, between which models take turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchrelay.errors import ModelError, OverloadedError, TorchRelayError, from_json
from torchrelay.switching.daemon._descriptor import Descriptor
from torchrelay.switching.daemon._runs import Run, Runs
from torchrelay.switching.daemon._served import Served, State
from torchrelay.switching.daemon._shares import Rank
from torchrelay.switching.generate import _messages as generate
from torchrelay.switching.generate._models import GenerateOptions
from torchrelay.switching.generate._sequences import Sequence
from torchrelay.switching.worker import _messages

__all__ = ["SliceScheduler"]

_MAX_LOSSES = 1  # workers that may die at the same token


@dataclass(eq=False)
class _Slice(Run):
    """Sequences of one model on a worker."""

    turn_s: float  # how long it lasts if others wait
    options: GenerateOptions
    sequences: dict[int, Sequence] = field(default_factory=dict)
    # Sequences of which tokens are computed again, and how many were there before.
    behind: dict[int, int] = field(default_factory=dict)
    is_paused: bool = False

    @property
    def weight(self) -> float:
        return self.options.weight

    @property
    def priority(self) -> int:
        return max((one.priority for one in self.sequences.values()), default=-(1 << 30))

    @property
    def is_behind(self) -> bool:
        """Whether a sequence has not gone on from where it was: to end the slice now, again and
        again, would let it get nowhere.
        """
        return any(
            self.sequences[one].reached <= reached
            for one, reached in self.behind.items()
            if one in self.sequences
        )


@dataclass(eq=False)
class SliceScheduler(Runs[_Slice]):
    """Runs the sequences of one model at a time."""

    activity = "generating"

    # That have not ended, in the order of arrival.
    sequences: dict[int, Sequence] = field(default_factory=dict, init=False)
    wakes_at: float = field(default=math.inf, init=False)  # when the slice ends if others wait
    # Of models, once known.
    _shapes: dict[str, generate.KvShape] = field(default_factory=dict, init=False)

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence.

        Raises:
            OverloadedError: there are too many.
        """
        if len(self.sequences) >= self.options.queue_limit:
            raise OverloadedError(
                f"{len(self.sequences)} sequences are there, the limit; try again later"
            )
        self.sequences[sequence.sequence_id] = sequence
        self._fill()

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence that nobody wants, if it has not ended; it leaves at the next token."""
        if sequence.sequence_id in self.sequences:
            self._forget(sequence)
            self._fill()

    def fail_model(self, name: str, error: TorchRelayError) -> None:
        """Fail all sequences of a model."""
        for one in list(self.sequences.values()):
            if one.model == name:
                self._fail(one, error)

    def fail_all(self, error: TorchRelayError) -> None:
        for one in list(self.sequences.values()):
            self._fail(one, error)

    def decide(self, rival: Rank | None, make_way: Callable[[], None]) -> bool:
        """Start a slice, or let the running one end; return whether `rival`, a request of another
        kind that waits, may run.
        """
        self.wakes_at = math.inf
        ranks = self._ranks()
        run = self.run
        if run is not None:
            others = [rank for name, rank in ranks.items() if name != run.served.name]
            others += [] if rival is None else [rival]
            if others and not run.is_paused:
                priority, ends = -min(others)[0], run.started + run.turn_s
                is_over = time.monotonic() >= ends and not run.is_behind
                if priority > run.priority or (priority == run.priority and is_over):
                    self.pause()
                elif priority == run.priority and not run.is_behind:
                    self.wakes_at = ends
            return False
        name = min(ranks, key=lambda one: ranks[one], default="")
        if not name or (rival is not None and rival <= ranks[name]):
            return True
        self._start(self.catalog.models[name], make_way)
        return False

    def pause(self) -> None:
        """End the running slice after its token."""
        if self.run is not None and not self.run.is_paused:
            self.run.is_paused = True
            self.run.worker.send(generate.Pause(self.run.run_id))

    def next_model(self) -> str:
        """Return the model that will run after the present one, or ""."""
        ranks = self._ranks()
        ranks.pop(self.model, None)
        return min(ranks, key=lambda one: ranks[one], default="")

    # --- events

    def on_answer(self, run: _Slice, message: Any, descriptors: list[int]) -> None:
        """Handle a message of the slice's worker."""
        run.worker.due = time.monotonic() + run.worker.limit_s  # which is for one step
        if isinstance(message, generate.Stepped | generate.SliceEnded):
            self._note_stashed(run, message.stashed, descriptors)
        if isinstance(message, generate.Stepped):
            for one in message.emitted:
                self._emit(run, one)
            self._fill()
            return
        self.end()
        run.worker.last_model = run.served.name
        run.worker.release()
        if isinstance(message, _messages.Failed):
            self._retry(run, from_json(message.error, ModelError))

    def end(self) -> _Slice:
        self.counts["slices"] += 1
        return super().end()

    def retry(self, run: _Slice) -> None:
        """Continue the sequences elsewhere, each from its stash; fail one that this happens to
        again and again.
        """
        for one in run.sequences.values():
            one.losses += 1
        error = run.worker.loss(f"generated with model {run.served.name!r}")
        self._retry(run, error, can_repeat=not run.worker.is_late)

    def fail_run(self, run: _Slice, error: TorchRelayError) -> None:
        self.fail_model(run.served.name, error)

    # --- slices

    def _ranks(self) -> dict[str, Rank]:
        """Return the ranks of the models that have sequences and can run."""
        priorities: dict[str, int] = {}
        for one in self.sequences.values():
            priorities[one.model] = max(one.priority, priorities.get(one.model, one.priority))
        models = self.catalog.models
        return {
            name: self.shares.rank(priority, name)
            for name, priority in priorities.items()
            if name in models and self.catalog.can_run(models[name])
        }

    def _start(self, served: Served, make_way: Callable[[], None]) -> None:
        place = self.place(served, make_way)
        if place is None:
            return
        worker, pinned = place
        overlaps = bool(pinned.missing) and not served.runs_whole
        turn_s = self.shares.start(served.name)
        run = _Slice(worker, served, overlaps, turn_s, served.model.language.options)
        self.begin(run)
        chosen = self._chosen(run)
        work = generate.Generate(
            run.run_id,
            served.name,
            pinned.offsets,
            pinned.missing,
            served.runs_whole,
            [self._enter(run, one) for one in chosen],
        )
        worker.send(work, [one.stash.number for one in chosen if one.stash is not None])

    def _fill(self) -> None:
        """Let sequences join the running slice, if there is room."""
        run = self.run
        if run is None or run.is_paused:
            return
        for one in self._chosen(run):
            message = generate.Join(run.run_id, self._enter(run, one))
            run.worker.send(message, [] if one.stash is None else [one.stash.number])

    def _chosen(self, run: _Slice) -> list[Sequence]:
        """Return the sequences that can run beside those of the slice."""
        running = list(run.sequences.values())
        waiting = [
            one
            for one in self.sequences.values()
            if one.model == run.served.name and one.sequence_id not in run.sequences
        ]
        chosen: list[Sequence] = []
        for one in sorted(waiting, key=lambda one: (-one.priority, one.sequence_id)):
            others = running + chosen
            is_alone = one.is_alone or any(other.is_alone for other in others)
            if others and (
                is_alone
                or len(others) >= run.options.max_batch_size
                or not self._fits([*others, one], run.options.kv_bytes)
            ):
                break
            chosen.append(one)
        return chosen

    def _fits(self, sequences: list[Sequence], kv_bytes: int) -> bool:
        """Return whether all that these may grow to takes at most `kv_bytes`."""
        shape = self._shapes.get(sequences[0].model)
        lengths = (len(one.prompt) + one.sampling.max_tokens for one in sequences)
        return not kv_bytes or (
            shape is not None and sum(map(shape.size_bytes, lengths)) <= kv_bytes
        )

    def _enter(self, run: _Slice, sequence: Sequence) -> generate.SequenceState:
        """Add a sequence to the slice; return its state for the worker."""
        run.sequences[sequence.sequence_id] = sequence
        sequence.slices += 1
        again = sequence.reached - sequence.stashed
        if again:
            run.behind[sequence.sequence_id] = sequence.reached
        sequence.recomputed += again
        self.counts["recomputed_tokens"] += again
        return sequence.state()

    # --- sequences

    def _emit(self, run: _Slice, emitted: generate.Emitted) -> None:
        """Pass on a token, unless nobody wants it any more."""
        sequence = run.sequences.get(emitted.sequence_id)
        if sequence is None:
            return
        sequence.add(emitted.token)
        self.counts["tokens"] += 1
        if emitted.finished:
            self._forget(sequence, is_known=True)
        sequence.on_event(emitted)

    def _note_stashed(
        self, run: _Slice, stashed: list[generate.Stashed], descriptors: list[int]
    ) -> None:
        for one in stashed:
            descriptor = None if one.shape is None else Descriptor(descriptors.pop(0))
            sequence = run.sequences.get(one.sequence_id)
            if sequence is not None:
                sequence.note_stashed(one, descriptor)
            if one.shape is not None:
                self._shapes[run.served.name] = one.shape
        self._limit_stashes(run)

    def _limit_stashes(self, run: _Slice) -> None:
        """Drop the oldest stashes of sequences that wait, if all take too much."""
        taken = sum(one.stash_bytes for one in self.sequences.values())
        waiting = [one for one in self.sequences.values() if one.sequence_id not in run.sequences]
        for one in sorted(waiting, key=lambda one: one.stashed_at):
            if taken <= self.options.stash_bytes:
                return
            if one.stash is not None:
                taken -= one.stash_bytes
                one.drop_stash()
                self._drop_in_workers(one)

    def _retry(self, run: _Slice, error: TorchRelayError, *, can_repeat: bool = False) -> None:
        """Continue the sequences of a slice that failed: those of a batch each alone. One that was
        alone is failed, unless the worker's death may have been no fault of its.
        """
        is_batch = len(run.sequences) > 1
        for one in list(run.sequences.values()):
            is_hopeless = one.losses > _MAX_LOSSES or not (is_batch or can_repeat)
            if is_hopeless or run.served.state is State.LEAVING:
                self._fail(one, error)
            else:
                one.is_alone = is_batch
                self.counts["retried"] += 1

    def _fail(self, sequence: Sequence, error: TorchRelayError) -> None:
        self.counts["failed"] += 1
        self._forget(sequence)
        sequence.on_event(error)

    def _forget(self, sequence: Sequence, *, is_known: bool = False) -> None:
        """Let a sequence end; the worker of its slice may know already."""
        self.sequences.pop(sequence.sequence_id, None)
        run = self.run
        ran = run is not None and run.sequences.pop(sequence.sequence_id, None) is not None
        if run is not None and ran and not is_known:
            run.worker.send(generate.Leave(run.run_id, sequence.sequence_id))
        self._drop_in_workers(sequence)
        sequence.drop_stash()

    def _drop_in_workers(self, sequence: Sequence) -> None:
        """Let workers forget what they keep of a sequence that ran there before."""
        for worker in self.fleet.workers:
            runs = self.run is not None and worker is self.run.worker
            if sequence.model in worker.loaded and sequence.slices and not runs:
                worker.send(generate.Drop([sequence.sequence_id]))

    def status(self) -> list[dict[str, Any]]:
        """Return the sequences, as JSON values."""
        running = {} if self.run is None else self.run.sequences
        return [
            {
                "model": one.model,
                "state": "running"
                if one.sequence_id in running
                else "stashed"
                if one.stash is not None
                else "waiting",
                "priority": one.priority,
                "prompt_tokens": len(one.prompt),
                "tokens": len(one.tokens),
                "stash_bytes": one.stash_bytes,
                "slices": one.slices,
            }
            for one in self.sequences.values()
        ]
