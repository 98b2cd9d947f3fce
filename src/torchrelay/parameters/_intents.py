"""A loader that announces the keys of coming batches to the parameter manager."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Literal, TypeVar

from torchrelay.errors import ArgumentError, TorchRelayError
from torchrelay.parameters._arrays import Keys, whole_number
from torchrelay.parameters._table import Table

__all__ = ["IntentLoader"]

Batch = TypeVar("Batch")

# The automatic lookahead starts here, doubles when a batch came too early, and stops growing there.
# It shrinks by a quarter after so many steps in a row that found all keys, but not to what was too
# short within so many steps.
FIRST_LOOKAHEAD = 4
LARGEST_LOOKAHEAD = 256
CALM_STEPS, REMEMBERED_STEPS = 64, 1024

# The first batch could not be announced early, so the first step waits for its keys, but not for
# longer than this: where another node keeps one (relocation only), the step fetches it.
FIRST_WAIT_S, FIRST_POLL_S = 1.0, 0.001


class IntentLoader(Generic[Batch]):
    """Iterate over ``loader``, announce the keys of coming batches, and advance the clock per step.

    Batch ``i`` is announced ``lookahead`` batches before it is yielded, for its own step: the step
    ends when the next batch is requested. An iteration that is left early ends what it announced. A
    table takes part in one iteration at a time. The first step waits up to a second for its keys,
    so iterate over all epochs in one loader.

    Args:
        loader: any iterable of batches, such as a ``DataLoader``. A new iteration starts over.
        keys_of: returns the keys of a batch per table: ``{table: keys}`` with keys as for
            :meth:`Table.pull`, or only the keys if ``table`` is given.
        lookahead: batches announced ahead, at least 1. ``auto`` starts with 4, doubles it up to 256
            while steps still find remote keys, and shrinks it while they do not. The manager
            decides itself how early it acts: announcing too early costs memory for keys, not
            traffic.
        table: the table whose keys ``keys_of`` returns.

    Raises:
        ArgumentError: ``lookahead`` is below 1, or ``table`` is not a table.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        keys_of: Callable[[Batch], Keys | Mapping[Table, Keys]],
        lookahead: int | Literal["auto"] = "auto",
        *,
        table: Table | None = None,
    ) -> None:
        if lookahead != "auto":
            whole_number("lookahead (if not 'auto')", lookahead, 1)
        if not isinstance(table, Table | None):
            raise ArgumentError(
                f"table must be a Table, not {type(table).__name__}; of an Embedding, pass "
                "embedding.table"
            )
        self.loader = loader
        self.lookahead = FIRST_LOOKAHEAD if lookahead == "auto" else lookahead
        self._automatic = lookahead == "auto"
        self._too_short = 1
        self._calm_steps = 0
        self._keys_of = keys_of
        self._table = table

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        ends: dict[Table, int] = {}  # of the last step that was announced
        try:
            yield from self._steps(ends)
        except BaseException:
            # Abandoned, or failed: what was announced ends. The tables may have been closed.
            with contextlib.suppress(TorchRelayError):
                for table, end in ends.items():
                    while table.clock < end:
                        table.advance_clock()
            raise

    def _steps(self, ends: dict[Table, int]) -> Iterator[Batch]:
        source = iter(self.loader)
        ahead: deque[tuple[Batch, int]] = deque()  # with how many steps early each was announced
        first = True
        while True:
            while len(ahead) < self.lookahead:
                try:
                    batch = next(source)
                except StopIteration:
                    break
                ahead.append((batch, len(ahead)))
                self._announce(batch, len(ahead) - 1, ends)
            if not ahead:
                return
            batch, steps_ahead = ahead.popleft()
            if first:
                self._await_local(batch)
                first = False
            before = {table: table.metrics().remote_pulls for table in ends}
            yield batch
            for table in ends:
                table.advance_clock()
            if self._automatic and steps_ahead >= self.lookahead - 1:
                self._adapt(
                    any(table.metrics().remote_pulls > count for table, count in before.items())
                )

    def _announce(self, batch: Batch, steps_ahead: int, ends: dict[Table, int]) -> None:
        """Announce the batch's keys for the step that begins ``steps_ahead`` clocks from now."""
        for table, used in self._keys(batch).items():
            start = table.clock + steps_ahead
            table.intent(used, start)
            ends[table] = start + 1

    def _keys(self, batch: Batch) -> Mapping[Table, Keys]:
        keys = self._keys_of(batch)
        if isinstance(keys, Mapping):
            return keys
        if self._table is None:
            raise ArgumentError("keys_of gave only keys: pass table=..., or give {table: keys}")
        return {self._table: keys}

    def _await_local(self, batch: Batch) -> None:
        """Wait briefly until the keys of ``batch`` have arrived."""
        latest = time.monotonic() + FIRST_WAIT_S
        for table, keys in self._keys(batch).items():
            while not table.is_local(keys) and time.monotonic() < latest:
                time.sleep(FIRST_POLL_S)

    def _adapt(self, too_late: bool) -> None:
        if too_late:
            self._too_short, self._calm_steps = self.lookahead, 0
            self.lookahead = min(2 * self.lookahead, LARGEST_LOOKAHEAD)
            return
        self._calm_steps += 1
        if self._calm_steps >= REMEMBERED_STEPS:
            self._too_short, self._calm_steps = 1, 0
        if self._calm_steps % CALM_STEPS == 0:
            self.lookahead = min(self.lookahead, max(self._too_short + 1, 3 * self.lookahead // 4))
