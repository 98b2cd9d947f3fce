"""Positions in generator sequences at which recorded operations draw their random numbers.

During deferred initialisation nothing is drawn. Each drawing operation gets a :class:`Position`,
and the real generator is put into a *mark*: its own state, with a few words replaced by an
identifier of the position after the draw, and the others by noise. Whatever the program does with
generator states (seeding, ``fork_rng``, copying) moves marks, and the next draw identifies its
position by them.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torchrelay.deferred._graph import Node

__all__ = ["Origin", "Position", "Watch", "acquire", "release", "watches"]


class Origin:
    """A generator state that is known (``state``), or will be once ``node`` has drawn from
    ``before`` on.
    """

    __slots__ = ("before", "device", "node", "state")

    def __init__(
        self,
        device: torch.device,
        state: torch.Tensor | None,
        before: Position | None = None,
        node: Node | None = None,
    ) -> None:
        self.device = device
        self.state = state
        self.before = before
        self.node = node

    def settle(self, state: torch.Tensor) -> None:
        """The operation has run, and left the generator in ``state``."""
        self.state = state
        self.before = self.node = None


class Position:
    """A point in a generator's sequence: ``words`` 32-bit words after ``origin``."""

    __slots__ = ("origin", "words")

    def __init__(self, origin: Origin, words: int = 0) -> None:
        self.origin = origin
        self.words = words

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Position)
            and self.origin is other.origin
            and self.words == other.words
        )

    __hash__ = None  # type: ignore[assignment]


# The CPU generator's blob, as 64-bit words: seed, (left, seeded), next, the 624 words of the
# twister's state.
_CPU_LEFT, _CPU_NEXT = 1, 2
_CPU_WORDS = 624
_CPU_STATE = slice(3, 3 + _CPU_WORDS)
_CPU_MARK = slice(3, 6)
_CPU_MAGIC = (0x7472656C, 0x61794D6B)
# The CUDA generator's blob: seed, offset. An offset must be a multiple of 4; no program draws this
# many.
_PHILOX_STEP = 4
_PHILOX_BASE = 1 << 56

# A mark is full of noise, so that another thread, if it draws meanwhile, gets no numbers that the
# module gets.
_noise = np.random.SFC64()
_LOW, _HALF = np.int64(0xFFFFFFFF), np.uint64(32)

_lock = threading.RLock()
_marks: dict[int, Position] = {}
_new_mark = itertools.count(1).__next__
_watches: dict[int, Watch] = {}


class Watch:
    """A generator under watch: its state when the watch began, and the marks it has been given
    since.
    """

    __slots__ = ("_given", "_is_cpu", "depth", "entry", "generator")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.entry = generator.get_state()
        self.depth = 0
        self._is_cpu = generator.device.type == "cpu"
        self._given: list[int] = []

    def position(self) -> Position:
        """Where the generator stands now, as the recorded program sees it."""
        return self.mark() or Position(Origin(self.generator.device, self.generator.get_state()))

    def mark(self) -> Position | None:
        """The position that the generator's state names; None: it is a state of its own."""
        words = self.generator.get_state().numpy().view(np.int64)
        if self._is_cpu:
            mark = int(words[5]) if words[3] == _CPU_MAGIC[0] and words[4] == _CPU_MAGIC[1] else 0
        else:
            mark = int(words[1]) // _PHILOX_STEP - _PHILOX_BASE // _PHILOX_STEP
        with _lock:
            return _marks.get(mark)

    def advance(self, position: Position) -> None:
        """Marks the generator as standing at ``position``."""
        mark = _new_mark()
        with _lock:
            _marks[mark] = position
        self._given.append(mark)
        state = self.generator.get_state()
        words = state.numpy().view(np.int64)
        if self._is_cpu:
            words[_CPU_STATE] = _noise.random_raw(_CPU_WORDS) >> _HALF
            words[_CPU_MARK] = (*_CPU_MAGIC, mark)
            words[_CPU_LEFT] = words[_CPU_LEFT] & ~_LOW | (_CPU_WORDS - len(_CPU_MAGIC))
            words[_CPU_NEXT] = len(_CPU_MAGIC) + 1
            words[_CPU_STATE.stop :] = 0
        else:
            words[1] = _PHILOX_BASE + mark * _PHILOX_STEP
        self.generator.set_state(state)

    def forget(self) -> None:
        """Marks given out mean nothing from now on."""
        with _lock:
            for mark in self._given:
                _marks.pop(mark, None)


def acquire(generator: torch.Generator) -> Watch:
    """The watch over ``generator``, begun if there is none. Ends with as many calls of
    :func:`release`.
    """
    with _lock:
        found = _watches.get(id(generator))
        if found is None:
            found = _watches[id(generator)] = Watch(generator)
        found.depth += 1
        return found


def watches() -> list[Watch]:
    """Those that are open, of all threads."""
    with _lock:
        return list(_watches.values())


def release(watch: Watch) -> bool:
    """Gives up one claim on ``watch``; True if it was the last, and the caller must now set the
    generator.
    """
    with _lock:
        watch.depth -= 1
        if watch.depth == 0:
            del _watches[id(watch.generator)]
        return watch.depth == 0
