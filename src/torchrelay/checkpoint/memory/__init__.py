"""Checkpoints in the memory of hosts: the server that keeps them, and the folder that reads."""

__all__: list[str] = []
