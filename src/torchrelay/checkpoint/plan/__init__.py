"""What a save writes, and what a load reads: found by comparing, before a byte is moved."""

__all__: list[str] = []
