"""The operators of c10d."""

from __future__ import annotations

from typing import Any

__all__ = ["operator_results"]


def operator_results(operator: Any, args: Any, work: Any) -> Any:
    """Return what a c10d operator returns: its first tensors, if it returns some, and ``work``."""
    results = [
        work.boxed() if result.type.kind() == "ClassType" else args[0]
        for result in operator._schema.returns
    ]
    return tuple(results) if len(results) != 1 else results[0]
