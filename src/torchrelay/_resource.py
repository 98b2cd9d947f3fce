"""What all objects that hold resources have in common."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

__all__ = ["Resource"]

R = TypeVar("R", bound="Resource")


class Resource:
    """Context manager that calls :meth:`close` when its block ends."""

    def close(self) -> None:
        """Release what this object holds. Idempotent."""
        raise NotImplementedError

    def __enter__(self: R) -> R:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_block(error)

    def _end_block(self, error: BaseException | None) -> None:
        """End the block; ``error`` is what it raised."""
        self.close()
