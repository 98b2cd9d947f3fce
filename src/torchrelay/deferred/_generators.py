"""Generators: where a program stands in their sequences, and moving them to any place there.

During deferred initialisation nothing is drawn. Each drawing operation gets a :class:`.Position`,
and the real generator is put into a *mark*: its own state, with a few words replaced by an
identifier of the position after the draw, and the others by noise. Whatever the program does with
generator states (seeding, ``fork_rng``, copying) moves marks, and the next draw identifies its
position by them. Replay moves private generators to recorded positions, mostly without drawing what
precedes them.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from torchrelay import _native
from torchrelay.deferred._graph import Node, Origin, Position
from torchrelay.errors import UnavailableError

__all__ = ["Generators", "Watch", "acquire", "jump", "release", "watches"]

# The blob of a CPU generator's ``get_state()``, in 64-bit words: the seed; ``left`` and ``seeded``
# in one; the index of the next word; the 624 words of the twister's state; and what normal draws
# keep for the next call. A mark is the first words of the state.
_LEFT, _NEXT = 1, 2
_BLOCK_WORDS = 624
_STATE, _MARK = slice(3, 3 + _BLOCK_WORDS), slice(3, 6)
_MAGIC = (0x7472656C, 0x61794D6B)
_LOW = np.int64(0xFFFFFFFF)
# The CUDA generator's blob: seed, offset. An offset must be a multiple of 4; no program draws this
# many.
_PHILOX_STEP = 4
_PHILOX_BASE = 1 << 56

# A mark is full of noise, so that another thread, if it draws meanwhile, gets no numbers that the
# module gets.
_noise = random.Random()

_lock = threading.RLock()
_marks: dict[int, Position] = {}
_new_mark = itertools.count(1).__next__
_watches: dict[int, Watch] = {}


class Watch:
    """A generator under watch: its state when the watch began, and the marks it has been given
    since.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.entry = generator.get_state()
        self.depth = 0
        self._is_cpu = generator.device.type == "cpu"
        self._given: list[int] = []

    def position(self) -> Position:
        """Return where the generator stands, as the recorded program sees it."""
        state = self.generator.get_state()
        return self.mark(state) or Position(Origin(self.generator.device, state))

    def mark(self, state: torch.Tensor) -> Position | None:
        """Return the position that ``state`` names; None: it is a state of its own."""
        words = state.numpy().view(np.int64)
        if self._is_cpu:
            mark = int(words[_MARK.stop - 1]) if (words[3], words[4]) == _MAGIC else 0
        else:
            mark = int(words[1]) // _PHILOX_STEP - _PHILOX_BASE // _PHILOX_STEP
        return _marks.get(mark)

    def draw(self, node: Node, words: int | None) -> None:
        """Give ``node`` its positions, ``words`` apart, and mark the generator with the second.

        ``words`` is None if it is unknown before the draw.
        """
        state = self.generator.get_state()
        known = self.mark(state)
        node.position = before = known or Position(Origin(self.generator.device, state.clone()))
        node.after = after = (
            Position(Origin(before.origin.device, None, before, node))
            if words is None
            else Position(before.origin, before.words + words)
        )
        mark = _new_mark()
        _marks[mark] = after
        blob = state.numpy().view(np.int64)
        if not self._is_cpu:
            blob[1] = _PHILOX_BASE + mark * _PHILOX_STEP
        elif known and blob[_NEXT] == len(_MAGIC) + 1:
            blob[_MARK.stop - 1] = mark  # no other thread has drawn from the noise yet
        else:
            blob[_STATE] = np.frombuffer(_noise.randbytes(4 * _BLOCK_WORDS), np.uint32)
            blob[_MARK] = (*_MAGIC, mark)
            blob[_LEFT] = blob[_LEFT] & ~_LOW | (_BLOCK_WORDS - len(_MAGIC))
            blob[_NEXT] = len(_MAGIC) + 1
            blob[_STATE.stop :] = 0
        self._given.append(mark)
        self.generator.set_state(state)

    def forget(self) -> None:
        """Withdraw the marks: they mean nothing from now on."""
        for mark in self._given:
            _marks.pop(mark, None)


def acquire(generator: torch.Generator) -> Watch:
    """Return the watch over ``generator``, begun if there is none. It ends with as many calls of
    :func:`release`.
    """
    with _lock:
        found = _watches.get(id(generator))
        if found is None:
            found = _watches[id(generator)] = Watch(generator)
        found.depth += 1
        return found


def watches() -> list[Watch]:
    """Return the open watches of all threads."""
    with _lock:
        return list(_watches.values())


def release(watch: Watch) -> bool:
    """Give up one claim on ``watch``; return whether it was the last, after which the caller sets
    the generator.
    """
    with _lock:
        watch.depth -= 1
        if watch.depth == 0:
            del _watches[id(watch.generator)]
        return watch.depth == 0


class Generators:
    """Private generators, one per device, that are moved from draw to draw.

    Args:
        run: executes a node whose draw determines where the next one starts, and discards the
            result.
    """

    def __init__(self, run: Callable[[Node], None]) -> None:
        self._run = run
        self._generators: dict[torch.device, torch.Generator] = {}
        self._positions: dict[torch.device, Position] = {}
        self._last: dict[Origin, tuple[int, torch.Tensor | None]] = {}

    def at(self, position: Position) -> torch.Generator:
        """Return a generator at ``position``. Its state is unknown then, until :meth:`drawn`."""
        device = position.origin.device
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = _new_generator(device)
        if self._positions.get(device) != position:
            generator.set_state(self.state(position))
        self._positions.pop(device, None)
        return generator

    def drawn(self, device: torch.device, after: Position) -> None:
        """Record that the generator of ``device`` has drawn, and is at ``after``."""
        if after.origin.state is None:
            after.origin.settle(self._generators[device].get_state())
        self._positions[device] = after

    def state(self, position: Position) -> torch.Tensor:
        """Return the generator's state at ``position``."""
        origin = position.origin
        if position.words == 0:
            return self._origin_state(origin)
        # From the last state asked for: the layers of a model lie at equal distances, which jump()
        # remembers.
        words, state = self._last.get(origin, (0, None))
        if state is None or words > position.words:
            words, state = 0, self._origin_state(origin)
        state = jump(state, position.words - words)
        self._last[origin] = position.words, state
        return state

    def _origin_state(self, origin: Origin) -> torch.Tensor:
        chain = [origin]
        while chain[-1].state is None:
            before = chain[-1].before
            assert before is not None
            chain.append(before.origin)
        for unknown in reversed(chain[:-1]):
            if unknown.state is None:
                assert unknown.node is not None
                self._run(unknown.node)
        assert origin.state is not None
        return origin.state


def _new_generator(device: torch.device) -> torch.Generator:
    try:
        return torch.Generator(device)
    except RuntimeError as error:
        raise UnavailableError(
            f"The recorded random numbers come from the generator of {device}, which this machine "
            f"does not have: {error}. Record with another device, or materialize on a machine that "
            "has it."
        ) from error


def jump(state: torch.Tensor, words: int) -> torch.Tensor:
    """Return the blob of a CPU generator that has drawn ``words`` more 32-bit words than ``state``.

    Takes about 1 ms, whatever the distance.
    """
    moved = state.clone()
    blob = moved.numpy().view(np.int64)
    # A generator that was just seeded has used up a block that it never returned.
    fresh = int(blob[_LEFT] & _LOW) == 1 and int(blob[_NEXT]) == 0
    used = (_BLOCK_WORDS if fresh else int(blob[_NEXT])) + words
    if words == 0:
        return moved
    blocks = (used - 1) // _BLOCK_WORDS
    used -= blocks * _BLOCK_WORDS
    if blocks:
        block = blob[_STATE].astype(np.uint32)
        _native.twister_jump(block, _polynomial(blocks * _BLOCK_WORDS - 1))
        blob[_STATE] = block
    blob[_NEXT] = used
    blob[_LEFT] = (blob[_LEFT] & ~_LOW) | (_BLOCK_WORDS - used + 1)
    return moved


@lru_cache(maxsize=256)
def _polynomial(distance: int) -> bytes:
    return _native.twister_polynomial(distance)
