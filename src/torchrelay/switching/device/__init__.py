"""Memory that processes share, on the CPU and on CUDA, and how the arena is divided."""

__all__: list[str] = []
