"""Models before they are served: built, stored in host memory, and described to workers."""

__all__: list[str] = []
