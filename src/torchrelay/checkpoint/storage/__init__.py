"""Where checkpoints lie: the contract of a folder, its implementations, and the catalog."""

__all__: list[str] = []
