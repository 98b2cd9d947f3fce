"""Every private or version-bound torch call, each with the versions it was checked on.

Nothing else in TorchRelay touches a private torch name; ``tests/unit/test_torch_shims.py`` calls each one.
"""

from __future__ import annotations

__all__: list[str] = []
