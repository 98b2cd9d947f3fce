"""What all objects that hold resources have in common."""

from __future__ import annotations

from typing_extensions import Self

__all__ = ["Resource"]


class Resource:
    """Context manager that calls :meth:`close` when its block ends."""

    def close(self) -> None:
        """Release what this object holds. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end_block(error)

    def _end_block(self, error: BaseException | None) -> None:
        """End the block; ``error`` is what it raised."""
        self.close()
