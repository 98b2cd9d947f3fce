"""Generators at any position of a recorded sequence, mostly without drawing what precedes it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchrelay.deferred._graph import Node
from torchrelay.deferred._positions import Origin, Position
from torchrelay.deferred._twister import jump
from torchrelay.errors import UnavailableError

__all__ = ["Generators"]


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
        """Return a generator at ``position``."""
        device = position.origin.device
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = _new_generator(device)
        elif self._positions.get(device) == position:
            return generator
        generator.set_state(self.state(position))
        self._positions[device] = position
        return generator

    def loose_at(self, position: Position) -> torch.Generator:
        """Return a generator at ``position``, for a draw after which its state is unknown."""
        generator = self.at(position)
        del self._positions[position.origin.device]
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
        pending: list[Origin] = []
        at: Origin | None = origin
        while at is not None and at.state is None:
            pending.append(at)
            assert at.before is not None
            at = at.before.origin
        for known in reversed(pending):
            if known.state is None:
                assert known.node is not None
                self._run(known.node)
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
